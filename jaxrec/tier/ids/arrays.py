"""Checks of the arrays that native code reads and writes."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike


def checked(array: np.ndarray, dtype: DTypeLike, name: str, size: int | None = None) -> np.ndarray:
    """Return an array as one that native code can read: of a type, flat, contiguous and aligned.

    Raises:
        TypeError: The array is not a NumPy array of the type.
        ValueError: The array has several axes, or another size than the one given.
    """
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        wanted = np.dtype(dtype)
        given = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name} must be a NumPy array of {wanted}, not {given}")
    if array.ndim != 1 or size not in (None, array.size):
        wanted_shape = "[n]" if size is None else f"[{size}]"
        raise ValueError(f"{name} must have the shape {wanted_shape}, not {list(array.shape)}")
    flags = array.flags
    if flags.c_contiguous and flags.aligned:
        return array
    return np.require(array, requirements=("C_CONTIGUOUS", "ALIGNED"))
