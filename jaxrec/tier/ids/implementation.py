"""Choice between C++ and NumPy for id maps and batch operations, and checks of their arrays."""

from __future__ import annotations

import functools
import warnings
from types import ModuleType

import numpy as np
from numpy.typing import DTypeLike

from jaxrec.tier.ids import library, reference


def current() -> ModuleType:
    """Return the module with the implementation: `library` (C++), or `reference` without it."""
    reason = library.missing()
    if reason is None:
        return library
    _warn(reason)
    return reference


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"id maps run in NumPy, up to fifty times slower: {reason}", RuntimeWarning, stacklevel=4
    )


def checked(array: np.ndarray, dtype: DTypeLike, name: str, size: int | None = None) -> np.ndarray:
    """Check an array's type, shape and size; return it contiguous and aligned for native code."""
    # Native code reads bare addresses: an unchecked array would be read past its end.
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
