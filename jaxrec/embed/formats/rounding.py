"""Rounding of float32 numbers to fewer bits, to nearest or at random, and the scales of rows.

Rows that are trained are unpacked, updated and packed again thousands of times, and checkpoints and
row stores hold them as floats. So stored rows unpack to floats that determine the stored bytes: the
largest element has the largest code, and a scale has so few significant bits that its multiples are
exact. An update rounds elements up or down at random, so that changes smaller than a code add up.
The random bits of an element are a hash of its row, its column and the step. There is no random
state, and the same table trained twice has the same bits.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Int32, Shaped, UInt8, UInt32

# Far above subnormal floats, which devices may treat as zeros.
SMALLEST_SCALE = 2.0**-100


@dataclasses.dataclass(frozen=True)
class FloatGrid:
    """Numbers of a binary floating-point type.

    Attributes:
        fraction_bits: Bits of the fraction.
        smallest_normal: Smallest normal number, a power of two.
        largest: Largest finite number.
    """

    fraction_bits: int
    smallest_normal: float
    largest: float

    @classmethod
    def of(cls, dtype: str) -> FloatGrid:
        """Return the numbers of a type such as "bfloat16" or "float8_e5m2"."""
        info = jnp.finfo(dtype)
        return cls(info.nmant, float(info.smallest_normal), float(info.max))

    @property
    def spacing(self) -> float:
        """Distance of subnormal numbers, the smallest number above 0."""
        return self.smallest_normal * 2.0**-self.fraction_bits

    def round(
        self, values: Float[Array, "*shape"], noise: UInt32[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        """Return each number rounded up or down, so that the mean of the result is the number.

        NaN, infinities and numbers past the largest one come back as they are.

        Args:
            values: float32 numbers.
            noise: 32 random bits for each.
        """
        rounded = cut_bits(values, 23 - self.fraction_bits, noise)
        if self.smallest_normal > float(jnp.finfo(jnp.float32).smallest_normal):
            # Subnormal numbers lie on a fixed grid.
            is_small = jnp.abs(values) < self.smallest_normal
            rounded = jnp.where(is_small, _round_to_grid(values, self.spacing, noise), rounded)
        return jnp.where(jnp.abs(values) <= self.largest, rounded, values)


def cut_bits(
    values: Float[Array, "*shape"], dropped: int, noise: UInt32[Array, "*shape"] | None = None
) -> Float[Array, "*shape"]:
    """Return float32 numbers without the last bits of their fractions.

    Args:
        values: Numbers.
        dropped: Number of bits.
        noise: 32 random bits for each, of which the first ``dropped`` are used; None rounds to
            nearest, ties to even.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    if noise is None:
        added = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
    else:
        # Uniform bits below the last kept bit carry into it with a probability equal to the cut
        # part, in units of the last place: away from zero exactly as often as the mean asks for.
        added = noise >> (32 - dropped)
    kept = (bits + added) & jnp.uint32((0xFFFFFFFF << dropped) & 0xFFFFFFFF)
    return jax.lax.bitcast_convert_type(kept, jnp.float32)


def round_up_or_down(
    values: Float[Array, "*shape"], noise: UInt32[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Return non-negative numbers rounded to integers at random, by 24 random bits."""
    whole = jnp.floor(values)
    return whole + ((noise >> 8).astype(jnp.float32) * 2.0**-24 < values - whole)


def _round_to_grid(
    values: Float[Array, "*shape"], spacing: float, noise: UInt32[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Round to multiples of ``spacing``, a power of two."""
    return jnp.copysign(round_up_or_down(jnp.abs(values) / spacing, noise) * spacing, values)


def round_rows(
    rows: Float[Array, "n *dim"],
    row_ids: Int32[Array, " n"],
    step: Int[Array, ""],
    dtype: DTypeLike,
    salt: int = 0,
) -> Float[Array, "n *dim"]:
    """Round float32 rows at random to bfloat16 or float16; a float32 table's come back as they are.

    Args:
        rows: float32 values.
        row_ids: The row of the table that each is written to.
        step: Number of the update.
        dtype: The table's type.
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


def divide(values: Float[Array, "n 1"], divisor: float) -> Float[Array, "n 1"]:
    """Divide by a constant: XLA would multiply by its reciprocal, which rounds otherwise."""
    return values / jnp.where(jnp.isnan(values), jnp.nan, jnp.float32(divisor))


def as_bytes(floats: Shaped[Array, "n 1"]) -> UInt8[Array, "n bytes"]:
    """Return the bytes of one float of each row."""
    return jax.lax.bitcast_convert_type(floats[:, 0], jnp.uint8)
