"""Scales of rows that are trained.

Rows are unpacked, updated and packed again thousands of times, and checkpoints and row stores hold
them as floats. So stored rows unpack to floats that determine the stored bytes: the largest element
has the largest code, and a scale has so few significant bits that its multiples are exact. An
update rounds elements up or down at random, so that changes smaller than a code add up.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

# Far above subnormal floats, which devices may treat as zeros.
SMALLEST_SCALE = 2.0**-100


def divide(values: Float[Array, "n 1"], divisor: float) -> Float[Array, "n 1"]:
    """Divide by a constant: XLA would multiply by its reciprocal, which rounds otherwise."""
    return values / jnp.where(jnp.isnan(values), jnp.nan, jnp.float32(divisor))
