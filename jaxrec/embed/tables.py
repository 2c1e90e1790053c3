"""The arrays of a collection of tables."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxrec.embed import kernels
from jaxrec.embed.config import TableConfig
from jaxrec.embed.initialize import initialize_rows, table_key
from jaxrec.embed.layout import Group, TableLayout, layout_tables
from jaxrec.optim import RowOptimizer

Store = TypeVar("Store", bound="TableStore")

# Tables are copied in and out of groups in pieces of about this many elements.
_PIECE_ELEMENTS = 1 << 24


@dataclasses.dataclass(frozen=True)
class TableStore:
    """Tables and their optimizer state, wherever they lie.

    A pytree with a static layout: `Tables` on one device, `jaxrec.mesh.ShardedTables` over many.
    The functions of this module, `lookup` and `update_rows` dispatch on which it is.

    Attributes:
        rows: For each group of tables its rows.
        state: For each group the state of its row optimizer, as many rows.
        layout: Where each table lies in there and which features read it.
    """

    rows: dict[str, Float[Array, "rows dim"]]
    state: dict[str, dict[str, Array]]
    layout: Any = dataclasses.field(metadata={"static": True})

    @property
    def row_optimizers(self) -> tuple[RowOptimizer, ...]:
        """The optimizer of each group."""
        return tuple(group.optimizer for group in self.layout.groups)

    @property
    def without_rows(self: Store) -> Store:
        """The same store without arrays: a pytree without leaves that says how rows lie."""
        return dataclasses.replace(self, rows={}, state={})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables(TableStore):
    """Tables that are whole on one device.

    Attributes:
        rows: For each group its tables' rows, ``[num_rows, dim]`` of the group's type.
        state: For each group the state of its row optimizer, arrays of ``num_rows`` rows.
        layout: How the tables are grouped and which features read them.
    """

    layout: TableLayout = dataclasses.field(metadata={"static": True})


_make_tables: contextvars.ContextVar[Callable[[TableLayout, Array], TableStore] | None] = (
    contextvars.ContextVar("jaxrec_make_tables", default=None)
)


@contextlib.contextmanager
def making_tables(make: Callable[[TableLayout, Array], TableStore]) -> Iterator[None]:
    """Has `init_tables` make tables by ``make(layout, key)``, which may put them elsewhere."""
    token = _make_tables.set(make)
    try:
        yield
    finally:
        _make_tables.reset(token)


def init_tables(configs: Sequence[TableConfig], optimizer: RowOptimizer, key: Array) -> TableStore:
    """Fresh tables, made in place: beyond them only a block of rows is ever in memory.

    They are `Tables`, on one device, except in a function that `jaxrec.shard` calls, where they are
    made on the mesh.

    Args:
        configs: The tables, all `EmbeddingBagConfig` or all `EmbeddingConfig`.
        optimizer: Optimizer of the tables that name none.
        key: Random key. A table's values depend on it and on the table's name alone.

    Raises:
        ValueError, TypeError: If the tables cannot form a collection (see `layout_tables`).

    Example:
        >>> import jax, jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("user", num_embeddings=10, embedding_dim=4)
        >>> tables = init_tables([config], jaxrec.optim.sgd(0.1), jax.random.key(0))
        >>> read_table(tables, "user").shape
        (10, 4)
    """
    layout = layout_tables(configs, optimizer)
    if make := _make_tables.get():
        return make(layout, key)
    rows = {group.name: _init_group(group, key) for group in layout.groups}
    state = {group.name: _init_state(group) for group in layout.groups}
    return Tables(rows, state, layout)


def _init_group(group: Group, key: Array) -> Float[Array, "rows dim"]:
    rows = kernels.new_rows(jnp.zeros(group.dim, group.dtype), group.num_rows)
    for table, offset in zip(group.tables, group.row_offsets, strict=True):
        rows = initialize_rows(
            rows, table_key(key, table.name), table.initializer, offset, table.num_embeddings
        )
    return rows


def _init_state(group: Group) -> dict[str, Array]:
    first = group.optimizer.init(1, group.dim)
    return {key: kernels.new_rows(array[0], group.num_rows) for key, array in first.items()}


@functools.singledispatch
def put_beside(tables: TableStore, tree: Any) -> Any:
    """Arrays that are used with the tables, on all of the tables' devices."""
    return tree


@functools.singledispatch
def read_table(tables: TableStore, name: str) -> Float[Array, "num_embeddings embedding_dim"]:
    """The rows of one table, a copy.

    Raises:
        KeyError: If there is no table of that name.
    """
    group, rows = _place(tables.layout, name)
    return tables.rows[group.name][rows]


@functools.singledispatch
def read_state(tables: TableStore, name: str) -> dict[str, Array]:
    """The optimizer state of one table's rows, a copy; named as the optimizer names it.

    Raises:
        KeyError: If there is no table of that name.
    """
    group, rows = _place(tables.layout, name)
    return {key: array[rows] for key, array in tables.state[group.name].items()}


@functools.singledispatch
def write_table(
    tables: TableStore, name: str, values: Float[Array | np.ndarray, "num_embeddings embedding_dim"]
) -> TableStore:
    """Sets the rows of one table, in place: the arrays of ``tables`` are donated.

    Args:
        tables: The tables.
        name: The table to set.
        values: ``[num_embeddings, embedding_dim]``; converted to the table's type.

    Raises:
        KeyError: If there is no table of that name.
        ValueError: If the shape is another.
    """
    group, place = _place(tables.layout, name)
    array = _write(tables.rows[group.name], place, values, f"table {name!r}")
    return dataclasses.replace(tables, rows=tables.rows | {group.name: array})


@functools.singledispatch
def write_state(
    tables: TableStore, name: str, state: Mapping[str, Array | np.ndarray]
) -> TableStore:
    """Sets the optimizer state of one table's rows, in place: ``tables`` is donated.

    Raises:
        KeyError: If there is no table of that name.
        ValueError: If the state is not what the table's optimizer keeps.
    """
    group, place = _place(tables.layout, name)
    arrays = tables.state[group.name]
    if set(state) != set(arrays):
        raise ValueError(
            f"table {name!r}: its optimizer keeps {sorted(arrays)}, got {sorted(state)}"
        )
    arrays = {
        key: _write(array, place, state[key], f"state {key!r} of table {name!r}")
        for key, array in arrays.items()
    }
    return dataclasses.replace(tables, state=tables.state | {group.name: arrays})


def _place(layout: TableLayout, name: str) -> tuple[Group, slice]:
    group, index = layout.find(name)
    start = group.row_offsets[index]
    return group, slice(start, start + group.tables[index].num_embeddings)


def _write(array: Array, place: slice, values: Array | np.ndarray, what: str) -> Array:
    expected = (place.stop - place.start, *array.shape[1:])
    if np.shape(values) != expected:
        raise ValueError(f"{what} has shape {expected}, got {np.shape(values)}")
    if not isinstance(values, jax.Array):
        values = np.asarray(values)
    # In pieces, so that a host array never stands on the device whole beside the table.
    step = max(1, _PIECE_ELEMENTS // max(1, int(np.prod(array.shape[1:]))))
    for start in range(0, expected[0], step):
        piece = jnp.asarray(values[start : start + step], array.dtype)
        array = _write_piece(array, piece, jnp.int32(place.start + start))
    return array


@functools.partial(jax.jit, donate_argnums=0)
def _write_piece(array: Array, piece: Array, start: Int32[Array, ""]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, piece, start, 0)
