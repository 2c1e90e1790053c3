"""Rows of bfloat16 that are stored as integers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt16, UInt32

from jaxrec.embed.formats.base import RowFormat
from jaxrec.embed.formats.rounding import FloatGrid


@dataclasses.dataclass(frozen=True)
class BFloat16Bits(RowFormat):
    """Rows of bfloat16 as uint16: XLA's CPU backend copies whole arrays of 16-bit floats."""

    dtype = "uint16"
    max_abs = float(jnp.finfo(jnp.bfloat16).max)

    @property
    def name(self) -> str:
        return "bfloat16"

    def width(self, dim: int) -> int:
        return dim

    def take_columns(
        self, packed: Shaped[Array, "n dim"], dim: int, columns: tuple[int, int]
    ) -> Shaped[Array, "n part_dim"]:
        return packed[:, slice(*columns)]

    def pack(self, rows: Float[Array, "n dim"]) -> UInt16[Array, "n dim"]:
        return jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)

    def pack_at_random(
        self, rows: Float[Array, "n dim"], noise: UInt32[Array, "n dim"]
    ) -> UInt16[Array, "n dim"]:
        return self.pack(FloatGrid.of("bfloat16").round(rows, noise))

    def unpack(self, packed: UInt16[Array, "n dim"], dim: int) -> Float[Array, "n dim"]:
        floats = jax.lax.bitcast_convert_type(packed, jnp.bfloat16)
        return floats.astype(jnp.float32)
