"""Stochastic rounding of table rows, repeatable and without a random state."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Int32, UInt32

from jaxrec.embed.formats.rounding import FloatGrid


def round_rows(
    rows: Float[Array, "n *dim"],
    row_ids: Int32[Array, " n"],
    step: Int[Array, ""],
    dtype: DTypeLike,
    salt: int = 0,
) -> Float[Array, "n *dim"]:
    """Round float32 rows up or down at random, so that the mean of the result is the input.

    The random bits of an element are a hash of its row, its column and the step: the same table
    trained twice has the same bits. float32 tables come back as they are.

    Args:
        rows: float32 values.
        row_ids: The row of the table that each is written to.
        step: Number of the update.
        dtype: The table's type; bfloat16 and float16 are rounded.
        salt: As for `random_bits`.
    """
    if jnp.dtype(dtype).itemsize != 2:
        return rows
    noise = random_bits(row_ids, step, rows.shape[1], salt)
    return FloatGrid.of(jnp.dtype(dtype).name).round(rows, noise)


def random_bits(
    row_ids: Int32[Array, " n"], step: Int[Array, ""], dim: int, salt: int = 0
) -> UInt32[Array, "n dim"]:
    """Return 32 well-mixed bits for each (row, column, step): two rounds of Murmur3's finalizer.

    Args:
        row_ids: The rows.
        step: Number of the update.
        dim: Number of columns.
        salt: Makes other bits for another array of the same rows.
    """
    step = step.astype(jnp.uint32) ^ jnp.uint32(salt)
    rows = row_ids.astype(jnp.uint32)[:, None] * jnp.uint32(0x9E3779B1)
    columns = jnp.arange(dim, dtype=jnp.uint32)[None] * jnp.uint32(0x85EBCA77)
    return _mix(_mix(rows ^ _mix(step)) + columns)


def _mix(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
