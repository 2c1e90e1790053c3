"""Stochastic rounding to 16-bit floating point, repeatable and without a random state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Int32, UInt32


def round_rows(
    rows: Float[Array, "n dim"], row_ids: Int32[Array, " n"], step: Int[Array, ""], dtype: DTypeLike
) -> Float[Array, "n dim"]:
    """Round float32 rows up or down at random, so that the mean of the result is the input.

    The random bits of an element are a hash of its row, its column and the step: the same table
    trained twice has the same bits. float32 tables come back as they are.

    Args:
        rows: float32 values.
        row_ids: The row of the table that each is written to.
        step: Number of the update.
        dtype: The table's type; bfloat16 and float16 are rounded.
    """
    dropped = {jnp.dtype(jnp.bfloat16): 16, jnp.dtype(jnp.float16): 13}.get(jnp.dtype(dtype))
    if dropped is None:
        return rows
    # Adding uniform bits below the last kept bit and then cutting them off rounds away from zero
    # with a probability equal to the cut part in units of the last place.
    noise = _hash(row_ids, step, rows.shape[1])
    bits = jax.lax.bitcast_convert_type(rows, jnp.uint32)
    cut = (bits + (noise >> (32 - dropped))) & jnp.uint32((0xFFFFFFFF << dropped) & 0xFFFFFFFF)
    rounded = jax.lax.bitcast_convert_type(cut, jnp.float32)
    if jnp.dtype(dtype) == jnp.float16:
        # float16 keeps 10 of float32's 23 fraction bits while it is normal. Its subnormals lie on a
        # fixed grid instead.
        rounded = jnp.where(
            jnp.abs(rows) < 2.0**-14, _round_to_grid(rows, 2.0**-24, noise), rounded
        )
    # Infinity, NaN and values past the largest finite one are not rounded.
    is_inside = jnp.abs(rows) <= float(jnp.finfo(dtype).max)
    return jnp.where(is_inside, rounded, rows)


def _round_to_grid(
    rows: Float[Array, "n dim"], spacing: float, noise: UInt32[Array, "n dim"]
) -> Float[Array, "n dim"]:
    """Round to multiples of ``spacing``, a power of two, with 24 random bits."""
    units = jnp.abs(rows) / spacing
    whole = jnp.floor(units)
    away = (noise >> 8).astype(jnp.float32) * 2.0**-24 < units - whole
    return jnp.copysign((whole + away) * spacing, rows)


def _hash(row_ids: Int32[Array, " n"], step: Int[Array, ""], dim: int) -> UInt32[Array, "n dim"]:
    """Return 32 well-mixed bits for each (row, column, step): two rounds of Murmur3's finalizer."""
    rows = row_ids.astype(jnp.uint32)[:, None] * jnp.uint32(0x9E3779B1)
    columns = jnp.arange(dim, dtype=jnp.uint32)[None] * jnp.uint32(0x85EBCA77)
    return _mix(_mix(rows ^ _mix(step.astype(jnp.uint32))) + columns)


def _mix(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
