"""Rows of 8-bit floats."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt8

from jaxrec.embed.formats.base import RowFormat

_FRACTION_BITS = 3


@dataclasses.dataclass(frozen=True)
class Float8Rows(RowFormat):
    """Floats of a sign, four bits of exponent and three of fraction, without a scale.

    The layout is that of FBGEMM's inference tables and of ``FloatToHFP8Quantized``. There are no
    infinities and no NaN. `pack` rounds to nearest, ties to even, and bounds elements by `max_abs`,
    at which FBGEMM keeps the topmost exponent free.

    Attributes:
        exponent_bias: Bias of the exponent: 7 in tables (largest element 240), 15 in FBGEMM's
            communication (largest element 0.9375).
    """

    exponent_bias: int = 7

    dtype = "uint8"

    @property
    def name(self) -> str:
        return "float8"

    @property
    def max_abs(self) -> float:
        return 1.875 * 2.0 ** (14 - self.exponent_bias)

    def width(self, dim: int) -> int:
        return dim

    def take_columns(
        self, packed: Shaped[Array, "n dim"], dim: int, columns: tuple[int, int]
    ) -> Shaped[Array, "n part_dim"]:
        return packed[:, slice(*columns)]

    def pack(self, rows: Float[Array, "n dim"]) -> UInt8[Array, "n dim"]:
        bits = jax.lax.bitcast_convert_type(rows.astype(jnp.float32), jnp.uint32)
        size = jax.lax.bitcast_convert_type(bits & 0x7FFFFFFF, jnp.float32)
        size = jnp.minimum(size, jnp.float32(self.max_abs))
        size_bits = jax.lax.bitcast_convert_type(size, jnp.uint32)
        dropped = 23 - _FRACTION_BITS
        is_odd = (size_bits >> dropped) & 1
        rounded = (size_bits + (1 << (dropped - 1)) - 1 + is_odd) >> dropped
        normal = rounded - ((127 - self.exponent_bias) << _FRACTION_BITS)
        # Elements below the smallest normal one are multiples of its last bit.
        smallest = 2.0 ** (1 - self.exponent_bias)
        subnormal = jnp.round(size * (2**_FRACTION_BITS / smallest)).astype(jnp.uint32)
        codes = jnp.where(size < smallest, subnormal, normal) | ((bits >> 24) & 0x80)
        return codes.astype(jnp.uint8)

    def unpack(self, packed: UInt8[Array, "n dim"], dim: int) -> Float[Array, "n dim"]:
        codes = packed.astype(jnp.uint32)
        size = codes & 0x7F
        normal = (size << (23 - _FRACTION_BITS)) + ((127 - self.exponent_bias) << 23)
        smallest = 2.0 ** (1 - self.exponent_bias)
        floats = jnp.where(
            size < 2**_FRACTION_BITS,
            size.astype(jnp.float32) * (smallest / 2**_FRACTION_BITS),
            jax.lax.bitcast_convert_type(normal, jnp.float32),
        )
        return jnp.where(codes & 0x80 != 0, -floats, floats)
