"""Rows of 16-bit floats that are stored as integers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt16, UInt32

from jaxrec.embed.formats.base import RowFormat
from jaxrec.embed.formats.rounding import FloatGrid


@dataclasses.dataclass(frozen=True)
class Bits16Rows(RowFormat):
    """Rows of "bfloat16" or "float16" as uint16: XLA's CPU backend copies arrays of such floats.

    Elements are bounded by the largest number of the type.

    Attributes:
        float_dtype: The type.
    """

    float_dtype: str

    dtype = "uint16"

    @property
    def name(self) -> str:
        return self.float_dtype

    @property
    def max_abs(self) -> float:
        return float(jnp.finfo(self.float_dtype).max)

    def width(self, dim: int) -> int:
        return dim

    def pack(self, rows: Float[Array, "n dim"]) -> UInt16[Array, "n dim"]:
        bounded = jnp.clip(rows, -self.max_abs, self.max_abs).astype(self.float_dtype)
        return jax.lax.bitcast_convert_type(bounded, jnp.uint16)

    def pack_at_random(
        self, rows: Float[Array, "n dim"], noise: UInt32[Array, "n dim"]
    ) -> UInt16[Array, "n dim"]:
        return self.pack(FloatGrid.of(self.float_dtype).round(rows, noise))

    def unpack(self, packed: UInt16[Array, "n dim"], dim: int) -> Float[Array, "n dim"]:
        floats = jax.lax.bitcast_convert_type(packed, jnp.dtype(self.float_dtype))
        return floats.astype(jnp.float32)
