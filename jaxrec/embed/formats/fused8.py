"""Rows of 8-bit codes with a float32 scale and offset each."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jaxrec.embed.formats.base import RowFormat

_TRAILER_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Fused8Rows(RowFormat):
    """The layout of FBGEMM's ``FloatToFused8BitRowwiseQuantized``, in which rows also travel.

    A stored row is the codes, the scale, then the offset. An element is ``scale * code + offset``.
    """

    dtype = "uint8"
    max_abs = float(np.finfo(np.float32).max / 2)  # The difference of two elements is finite.

    @property
    def name(self) -> str:
        return "int8_float32"

    def width(self, dim: int) -> int:
        return dim + _TRAILER_BYTES

    def pack(self, rows: Float[Array, "n dim"]) -> UInt8[Array, "n width"]:
        rows = rows.astype(jnp.float32)
        offset = jnp.min(rows, axis=1, keepdims=True)
        span = jnp.max(rows, axis=1, keepdims=True) - offset
        # XLA multiplies by the reciprocal of a constant divisor, which rounds otherwise.
        scale = span / jnp.where(jnp.isnan(span), jnp.nan, jnp.float32(255))
        codes = jnp.round((rows - offset) * (255 / (span + jnp.float32(1e-8))))
        return jnp.concatenate([codes.astype(jnp.uint8), as_bytes(scale), as_bytes(offset)], axis=1)

    def unpack(self, packed: UInt8[Array, "n width"], dim: int) -> Float[Array, "n dim"]:
        trailer = packed[:, dim:].reshape(packed.shape[0], 2, 4)
        floats = jax.lax.bitcast_convert_type(trailer, jnp.float32)
        return packed[:, :dim].astype(jnp.float32) * floats[:, :1] + floats[:, 1:]

    def take_columns(
        self, packed: UInt8[Array, "n width"], dim: int, columns: tuple[int, int]
    ) -> UInt8[Array, "n part_width"]:
        return jnp.concatenate([packed[:, slice(*columns)], packed[:, dim:]], axis=1)


def as_bytes(floats: Float[Array, "n 1"]) -> UInt8[Array, "n 4"]:
    """Return the bytes of a float32 of each row."""
    return jax.lax.bitcast_convert_type(floats[:, 0], jnp.uint8)
