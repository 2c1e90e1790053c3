"""Sums over millions of steps, exact without 64-bit numbers on the device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Total:
    """A running sum as two float32 numbers: the sum and its rounding error.

    A plain float32 sum of ones stops at 16,777,216. Here the rounding error of each addition is
    found exactly and kept (Knuth, "The Art of Computer Programming", volume 2, section 4.2.2,
    theorem B; Dekker 1971, "A floating-point technique for extending the available precision"), so
    that an addition is off by about 2^-48 of the sum, and not by 2^-24.

    Attributes:
        high: Any shape, the sum, rounded.
        low: The same shape, the rounding error: the sum is ``high + low``.
    """

    high: Float[Array, "*shape"]
    low: Float[Array, "*shape"]

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Total:
        """Return a sum of zero terms."""
        return cls(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

    def __add__(self, other: Total | Float[Array, "*shape"]) -> Total:
        term, rest = (other.high, other.low) if isinstance(other, Total) else (other, 0.0)
        high = self.high + term
        added = high - self.high
        error = (self.high - (high - added)) + (term - added)
        low = (self.low + rest) + error
        rounded = high + low
        return Total(rounded, low - (rounded - high))

    def on_host(self) -> Float[np.ndarray, "*shape"]:
        """Return the sum in float64; wait for the device."""
        high, low = jax.device_get((self.high, self.low))
        return np.asarray(np.float64(high) + np.float64(low))
