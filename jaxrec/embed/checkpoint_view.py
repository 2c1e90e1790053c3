"""Tables in the form of checkpoints: rows in order, padded, in equal parts over the devices."""

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
    """A table's rows in order, then zeros, whatever the placement: ``[padded_rows, dim]``."""

    rows: Any  # in equal parts over the store's devices
    state: dict[str, Any]  # optimizer state by name, ``[padded_rows, ...]``, sharded like rows


def part_rows(rows: int, parts: int) -> int:
    """Return the padded number of rows of one of ``parts`` equal parts of ``rows`` rows."""
    # Four binary digits, then zeros: 1,000,000 rows become 1,048,576. Padding is less than an
    # eighth, tables of like sizes share compiled programs, and parts divide into a file's chunks.
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
    """Return ``count`` rows of an array from row ``first`` on, then zeros."""
    rows = _row_indices(array, first, count, padded_rows)
    return array.at[rows].get(mode="fill", fill_value=0)


@functools.partial(jax.jit, donate_argnums=0)
def put_rows(
    array: Shaped[TableArray, "rows ..."],
    values: Shaped[Array, "padded_rows ..."],
    first: Int32[Array, ""],
    count: Int32[Array, ""],
) -> Shaped[TableArray, "rows ..."]:
    """Set ``count`` rows of an array from row ``first`` on, in place."""
    rows = _row_indices(array, first, count, values.shape[0])
    return array.at[rows].set(values.astype(array.dtype), mode="drop")


def _row_indices(
    array: TableArray, first: Int32[Array, ""], count: Int32[Array, ""], padded_rows: int
) -> Int32[Array, " padded_rows"]:
    """Return the indices of ``count`` rows, then indices past the end of the array."""
    index = jnp.arange(padded_rows, dtype=jnp.int32)
    return jnp.where(index < count, first + index, array.shape[0])
