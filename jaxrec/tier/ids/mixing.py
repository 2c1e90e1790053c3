"""Random bits that depend on 64-bit numbers alone."""

from __future__ import annotations

import numpy as np


def mix(numbers: np.ndarray, seed: int) -> np.ndarray:
    """Return well-mixed uint64 bits of 64-bit integers.

    The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014) of the numbers plus a multiple of its increment.
    """
    offset = np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    bits = numbers.view(np.uint64) + offset
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
