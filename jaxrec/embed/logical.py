"""Tables as checkpoints have them: rows in order, in equal parts over the devices, and padded."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from jaxrec.embed.tables import TableStore


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogicalTable:
    """A table's rows in order, and zeros after them, whatever the layout of the tables.

    Attributes:
        rows: ``[room, embedding_dim]``, in equal parts over the devices that the tables are on.
        state: The optimizer's state of each row, arrays of ``room`` rows that lie like ``rows``.
    """

    rows: Any
    state: dict[str, Any]


def part_rows(rows: int, parts: int) -> int:
    """Rows of each of so many equal parts that hold the rows.

    A number of four binary digits and zeros: less than an eighth is padding, tables of like sizes
    share programs, and parts divide into chunks of a file.

    Example:
        >>> [part_rows(rows, 8) for rows in (5, 128, 1000, 1_000_003)]
        [1, 16, 128, 131072]
    """
    least = -(-rows // parts)
    unit = 1 << max(0, least.bit_length() - 4)
    return -(-least // unit) * unit


@functools.singledispatch
def logical_form(tables: TableStore, name: str) -> LogicalTable:
    """The shapes, types and shardings that `to_logical` gives.

    Raises:
        KeyError: If there is no table of that name.
    """
    group, index = tables.layout.find(name)
    room = part_rows(group.tables[index].num_embeddings, 1)

    def form(array: Array) -> jax.ShapeDtypeStruct:
        shape = (room, *array.shape[1:])
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=array.sharding)

    return jax.tree.map(form, LogicalTable(tables.rows[group.name], tables.state[group.name]))


@functools.singledispatch
def to_logical(tables: TableStore, name: str) -> LogicalTable:
    """One table with its state, a copy. On a mesh no device has more than its part of it.

    With several processes all of them call it, and each has its devices' parts.

    Raises:
        KeyError: If there is no table of that name.
    """
    group, index = tables.layout.find(name)
    first, count = group.row_offsets[index], group.tables[index].num_embeddings
    take = functools.partial(
        _take, first=jnp.int32(first), count=jnp.int32(count), room=part_rows(count, 1)
    )
    return jax.tree.map(take, LogicalTable(tables.rows[group.name], tables.state[group.name]))


@functools.singledispatch
def from_logical(tables: TableStore, name: str, logical: LogicalTable, num_rows: int) -> TableStore:
    """Sets the first ``num_rows`` rows of one table, in place: ``tables`` is donated.

    Args:
        tables: The tables.
        name: The table to set.
        logical: Of the `logical_form` of the tables, though types may differ. State that it lacks
            stays as it is.
        num_rows: Rows to set; the others stay as they are.

    Raises:
        KeyError: If there is no table of that name.
    """
    group, index = tables.layout.find(name)
    first = jnp.int32(group.row_offsets[index])
    put = functools.partial(_put, first=first, count=jnp.int32(num_rows))
    rows = put(tables.rows[group.name], logical.rows)
    state = dict(tables.state[group.name])
    state |= {key: put(state[key], array) for key, array in logical.state.items()}
    return dataclasses.replace(
        tables,
        rows=tables.rows | {group.name: rows},
        state=tables.state | {group.name: state},
    )


@functools.partial(jax.jit, static_argnames="room")
def _take(
    array: Shaped[Array, "rows ..."], first: Int32[Array, ""], count: Int32[Array, ""], room: int
) -> Shaped[Array, "room ..."]:
    return array.at[_rows(array, first, count, room)].get(mode="fill", fill_value=0)


@functools.partial(jax.jit, donate_argnums=0)
def _put(
    array: Shaped[Array, "rows ..."],
    values: Shaped[Array, "room ..."],
    first: Int32[Array, ""],
    count: Int32[Array, ""],
) -> Shaped[Array, "rows ..."]:
    rows = _rows(array, first, count, values.shape[0])
    return array.at[rows].set(values.astype(array.dtype), mode="drop")


def _rows(
    array: Array, first: Int32[Array, ""], count: Int32[Array, ""], room: int
) -> Int32[Array, " room"]:
    """The rows from the first on; none, past the array, after ``count`` of them."""
    index = jnp.arange(room, dtype=jnp.int32)
    return jnp.where(index < count, first + index, array.shape[0])
