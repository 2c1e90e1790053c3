"""Arrays that lie on the host (NumPy) or on a device (JAX)."""

from __future__ import annotations

import types
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

AnyArray: TypeAlias = Array | np.ndarray


def namespace(*arrays: object) -> types.ModuleType:
    """``numpy`` if all the arrays (None aside) are NumPy's, else ``jax.numpy``.

    Host batches stay on the host while they are reshaped, so data workers need no device.
    """
    on_host = all(isinstance(array, np.ndarray) for array in arrays if array is not None)
    return np if on_host else jnp
