"""Types that modules compute in."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike


def promote(dtype: DTypeLike | None, *arrays: Any) -> tuple[Array, ...]:
    """Return the arrays in one type: ``dtype``, or the widest of theirs if it is None."""
    if dtype is None:
        dtype = jnp.result_type(*arrays)
    return tuple(jnp.asarray(array, dtype) for array in arrays)
