"""Stochastic rounding of float32 numbers to fewer bits, given random bits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32


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

    Adding uniform bits below the last kept bit and then cutting them off rounds away from zero with
    a probability equal to the cut part in units of the last place.

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
