"""Rounding of float32 numbers to fewer bits: to nearest, or at random."""

# Two properties of packed rows that are trained
#
# 1. Unpacked floats determine the stored bytes. A row is unpacked, updated and packed thousands of
#    times, and checkpoints and row stores hold it as floats; it must not drift on the way. So the
#    largest element always has the largest code, and a scale has so few significant bits that its
#    products with codes are exact in float32.
#
# 2. Small updates are not lost. An update of a tenth of a code, rounded to nearest, would change
#    nothing, step after step. So an update rounds up or down at random, up with a probability of a
#    tenth. The random bits are a hash of the element's row and column and of the step: no random
#    state is kept, and the same training twice gives the same bits.

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Int32, Shaped, UInt8, UInt32

# A bound for the scale of a row of zeros, far above subnormal floats, which devices may treat as 0.
SMALLEST_SCALE = 2.0**-100


@dataclasses.dataclass(frozen=True)
class FloatGrid:
    """The numbers that a binary floating-point type can represent."""

    fraction_bits: int
    smallest_normal: float  # a power of two
    largest: float  # finite

    @classmethod
    def of(cls, dtype: str) -> FloatGrid:
        """Return the grid of a type such as "bfloat16" or "float8_e5m2"."""
        info = jnp.finfo(dtype)
        return cls(info.nmant, float(info.smallest_normal), float(info.max))

    @property
    def spacing(self) -> float:
        """Distance between subnormal numbers: the smallest number above 0."""
        return self.smallest_normal * 2.0**-self.fraction_bits

    def round(
        self, values: Float[Array, "*shape"], noise: UInt32[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        """Round each float32 number up or down at random, so that the mean is the number.

        NaN, infinities and numbers beyond the largest one come back unchanged.
        """
        rounded = cut_bits(values, 23 - self.fraction_bits, noise)
        if self.smallest_normal > float(jnp.finfo(jnp.float32).smallest_normal):
            # Subnormal numbers lie at equal distances; those of float32 begin much further down.
            is_small = jnp.abs(values) < self.smallest_normal
            rounded = jnp.where(is_small, _round_to_grid(values, self.spacing, noise), rounded)
        return jnp.where(jnp.abs(values) <= self.largest, rounded, values)

    def encode(self, numbers: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
        """Return exponent and fraction of the nearest number, for numbers from 0 to `largest`."""
        dropped = 23 - self.fraction_bits
        bits = jax.lax.bitcast_convert_type(cut_bits(numbers, dropped), jnp.uint32) >> dropped
        subnormal = jnp.round(numbers / self.spacing).astype(jnp.uint32)
        is_small = numbers < self.smallest_normal
        return jnp.where(is_small, subnormal, bits - (self._bias_difference << self.fraction_bits))

    def decode(self, codes: UInt32[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Return the numbers that have these codes: the reverse of `encode`."""
        bits = (codes << (23 - self.fraction_bits)) + (self._bias_difference << 23)
        normal = jax.lax.bitcast_convert_type(bits, jnp.float32)
        is_small = codes < 2**self.fraction_bits
        return jnp.where(is_small, codes.astype(jnp.float32) * self.spacing, normal)

    @property
    def _bias_difference(self) -> int:
        """Difference of the exponent fields of one number in float32 and in this type."""
        return 126 + int(math.log2(self.smallest_normal))


def cut_bits(
    values: Float[Array, "*shape"], dropped: int, noise: UInt32[Array, "*shape"] | None = None
) -> Float[Array, "*shape"]:
    """Round float32 numbers to ``23 - dropped`` bits of fraction.

    Without ``noise`` they round to nearest, ties to even. With ``noise``, 32 random bits for each
    number, they round up or down at random, so that the mean is the number.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    if noise is None:
        added = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
    else:
        # If the dropped bits are a quarter of the last kept bit, a uniform number below that bit
        # carries into it in a quarter of the cases. Signs are apart from sizes in floats, so a
        # carry goes away from zero, and into the exponent if it must.
        added = noise >> (32 - dropped)
    kept = (bits + added) & jnp.uint32((0xFFFFFFFF << dropped) & 0xFFFFFFFF)
    return jax.lax.bitcast_convert_type(kept, jnp.float32)


def round_up_or_down(
    values: Float[Array, "*shape"], noise: UInt32[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Round non-negative numbers to integers at random, by the first 24 bits of ``noise``."""
    whole = jnp.floor(values)
    return whole + ((noise >> 8).astype(jnp.float32) * 2.0**-24 < values - whole)


def _round_to_grid(
    values: Float[Array, "*shape"], spacing: float, noise: UInt32[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Round numbers at random to multiples of ``spacing``, a power of two."""
    return jnp.copysign(round_up_or_down(jnp.abs(values) / spacing, noise) * spacing, values)


def round_rows(
    rows: Float[Array, "n *dim"],
    row_ids: Int32[Array, " n"],
    step: Int[Array, ""],
    dtype: DTypeLike,
    salt: int = 0,
) -> Float[Array, "n *dim"]:
    """Round float32 rows at random to bfloat16 or float16; return them as they are for float32.

    ``row_ids`` and ``step`` choose the random bits, as for `random_bits`.
    """
    if jnp.dtype(dtype).itemsize != 2:
        return rows
    noise = random_bits(row_ids, step, rows.shape[1], salt)
    return FloatGrid.of(jnp.dtype(dtype).name).round(rows, noise)


def random_bits(
    row_ids: Int32[Array, " n"], step: Int[Array, ""], dim: int, salt: int = 0
) -> UInt32[Array, "n dim"]:
    """Return 32 random bits for each (row, column, step, salt), by Murmur3's finalizer.

    Arrays of the same rows, such as rows and moments, take different salts.
    """
    step = step.astype(jnp.uint32) ^ jnp.uint32(salt)
    rows = row_ids.astype(jnp.uint32)[:, None] * jnp.uint32(0x9E3779B1)
    columns = jnp.arange(dim, dtype=jnp.uint32)[None] * jnp.uint32(0x85EBCA77)
    return _mix(_mix(rows ^ _mix(step)) + columns)


def _mix(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def divide(values: Float[Array, "n 1"], divisor: float) -> Float[Array, "n 1"]:
    """Divide by a constant, rounded as IEEE 754 rounds a division."""
    # XLA turns a division by a constant into a product with its reciprocal, which rounds otherwise.
    # A divisor that seems to depend on the values is no constant.
    return values / jnp.where(jnp.isnan(values), jnp.nan, jnp.float32(divisor))


def as_bytes(floats: Shaped[Array, "n 1"]) -> UInt8[Array, "n bytes"]:
    """Return the bytes of one float for each row, in memory's order."""
    return jax.lax.bitcast_convert_type(floats[:, 0], jnp.uint8)
