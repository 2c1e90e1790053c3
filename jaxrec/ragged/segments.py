"""Arrays made of the keys' segments end to end, on the host or on a device: static reshaping."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrec.ragged.arrays import AnyArray, namespace, to_device


def concatenate(arrays: Sequence[AnyArray], dtype: Any) -> AnyArray:
    """The arrays end to end; an empty one of ``dtype`` where there are none."""
    if len(arrays) == 1:
        return arrays[0]
    if not arrays:
        return np.zeros(0, dtype)
    if namespace(*arrays) is np:
        return np.concatenate(arrays)
    return jnp.concatenate([to_device(array) for array in arrays])


def concatenate_weights(weights: Sequence[AnyArray | None]) -> AnyArray | None:
    """`concatenate`, or None where all are None.

    Raises:
        ValueError: Only some of them are None.
    """
    given = [array for array in weights if array is not None]
    if given and len(given) < len(weights):
        missing = len(weights) - len(given)
        raise ValueError(f"{missing} of {len(weights)} parts have no weights, but others do")
    return concatenate(given, np.float32) if given else None


def refit(array: AnyArray, capacities: Sequence[int], wanted: Sequence[int]) -> AnyArray:
    """Segments of ``capacities`` cut or zero-padded at their ends to those ``wanted``."""
    xp = namespace(array)
    ends = itertools.accumulate(capacities, initial=0)
    parts = [
        xp.pad(array[start:end][:size], (0, max(size - (end - start), 0)))
        for (start, end), size in zip(itertools.pairwise(ends), wanted, strict=True)
    ]
    return concatenate(parts, array.dtype)


def runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Indices as runs ``[start, end)`` of consecutive ones: as few slices as will do.

    Example:
        >>> runs([2, 3, 0, 0, 1])
        [(2, 4), (0, 1), (0, 2)]
    """
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found
