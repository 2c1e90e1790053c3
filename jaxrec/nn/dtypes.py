"""Types that modules compute in."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike


def promote(dtype: DTypeLike | None, *arrays: Any) -> tuple[Array, ...]:
    """The arrays in one type: ``dtype``, or if it is None the widest that occurs among them."""
    if dtype is None:
        dtype = jnp.result_type(*arrays)
    return tuple(jnp.asarray(array, dtype) for array in arrays)
