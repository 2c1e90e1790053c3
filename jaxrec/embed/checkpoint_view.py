"""Tables as checkpoints hold them: rows in order, in equal parts over the devices, padded."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from jaxrec.embed.formats import TableArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogicalTable:
    """A table's rows in order, followed by zeros, whatever the layout of its store.

    Attributes:
        rows: ``[padded_rows, embedding_dim]``, in equal parts over the devices of the store.
        state: The optimizer state of each row, arrays of ``padded_rows`` rows, sharded as ``rows``.
    """

    rows: Any
    state: dict[str, Any]


def part_rows(rows: int, parts: int) -> int:
    """Return the number of rows of each of ``parts`` equal parts that hold ``rows`` rows.

    It is four binary digits followed by zeros: less than an eighth is padding, tables of like
    sizes share compiled programs, and parts divide into chunks of a file.
    """
    least = -(-rows // parts)
    unit = 1 << max(0, least.bit_length() - 4)
    return -(-least // unit) * unit


@functools.partial(jax.jit, static_argnames="padded_rows")
def take_rows(
    array: Shaped[TableArray, "rows ..."],
    first: Int32[Array, ""],
    count: Int32[Array, ""],
    padded_rows: int,
) -> Shaped[Array, "padded_rows ..."]:
    """Return ``count`` rows from ``first`` on, followed by zeros."""
    rows = _row_indices(array, first, count, padded_rows)
    return array.at[rows].get(mode="fill", fill_value=0)


@functools.partial(jax.jit, donate_argnums=0)
def put_rows(
    array: Shaped[TableArray, "rows ..."],
    values: Shaped[Array, "padded_rows ..."],
    first: Int32[Array, ""],
    count: Int32[Array, ""],
) -> Shaped[TableArray, "rows ..."]:
    """Set ``count`` rows from ``first`` on, in place."""
    rows = _row_indices(array, first, count, values.shape[0])
    return array.at[rows].set(values.astype(array.dtype), mode="drop")


def _row_indices(
    array: TableArray, first: Int32[Array, ""], count: Int32[Array, ""], padded_rows: int
) -> Int32[Array, " padded_rows"]:
    """Return the indices of the rows; past the end of the array after ``count`` of them."""
    index = jnp.arange(padded_rows, dtype=jnp.int32)
    return jnp.where(index < count, first + index, array.shape[0])
