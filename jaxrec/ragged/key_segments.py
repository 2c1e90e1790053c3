"""Static reshaping of arrays that hold the keys' segments end to end, along the last axis.

The arrays may be on the host, on a device, or over a mesh, where an axis of devices comes first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from jaxrec.ragged.arrays import AnyArray, namespace, to_device
from jaxrec.ragged.raw_ids import like
from jaxrec.ragged.wide_ids import WideIds, concatenate_wide


def concatenate(arrays: Sequence[Any], dtype: Any, axis: int = -1) -> Any:
    """Concatenate arrays; return an empty one of ``dtype`` for an empty sequence."""
    if len(arrays) == 1:
        return arrays[0]
    if not arrays:
        return np.zeros(0, dtype)
    if any(isinstance(array, WideIds) for array in arrays):
        return concatenate_wide(arrays, axis)
    if namespace(*arrays) is np:
        return like(np.concatenate(arrays, axis), *arrays)
    return jnp.concatenate([to_device(array) for array in arrays], axis)


def concatenate_weights(weights: Sequence[AnyArray | None]) -> AnyArray | None:
    """Concatenate weights, or return None if all are None."""
    arrays = [array for array in weights if array is not None]
    if arrays and len(arrays) < len(weights):
        num_missing = len(weights) - len(arrays)
        raise ValueError(f"{num_missing} of {len(weights)} parts have no weights, but others do")
    return concatenate(arrays, np.float32) if arrays else None


def refit(array: Any, capacities: Sequence[int], wanted: Sequence[int]) -> Any:
    """Cut or zero-pad segments at their ends, from ``capacities`` to ``wanted``."""
    if isinstance(array, WideIds):
        return jax.tree.map(lambda words: refit(words, capacities, wanted), array)
    xp = namespace(array)
    ends = itertools.accumulate(capacities, initial=0)
    leading = [(0, 0)] * (array.ndim - 1)
    parts = [
        xp.pad(array[..., start:end][..., :size], [*leading, (0, max(size - (end - start), 0))])
        for (start, end), size in zip(itertools.pairwise(ends), wanted, strict=True)
    ]
    return like(concatenate(parts, array.dtype), array)


def starts_of(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the first position of each segment: segments of sizes 2 and 3 begin at 0 and 2."""
    return tuple(itertools.accumulate(sizes, initial=0))[:-1]


def take_segments(
    array: Shaped[Array, "n ..."],
    starts: Sequence[int],
    counts: Sequence[int],
    sizes: Sequence[int] | None = None,
    fill: int = 0,
) -> Shaped[Array, "total ..."]:
    """Join segments of an array, each padded with ``fill``.

    Segment ``i`` has the ``counts[i]`` elements from ``starts[i]`` on, and takes ``sizes[i]``
    positions of the result.
    """
    # One gather, however many segments: a program with a slice and a pad for each of a hundred
    # features takes seconds to compile.
    sizes = counts if sizes is None else sizes
    if not array.shape[0] or not sum(counts):
        return jnp.full((sum(sizes), *array.shape[1:]), fill, array.dtype)
    # The gather reads units of the greatest size that divides all segments (often the batch size),
    # which makes its index that much shorter.
    unit = math.gcd(array.shape[0], *starts, *counts, *sizes)
    units = array.reshape(-1, unit, *array.shape[1:])
    taken = [
        np.where(index < count, start // unit + index, -1)
        for start, count, index in (
            (start, count // unit, np.arange(size // unit, dtype=np.int32))
            for start, count, size in zip(starts, counts, sizes, strict=True)
        )
    ]
    index = np.concatenate(taken)
    first, last = int(index[0]), int(index[-1])
    if (np.diff(index) == 1).all() and first >= 0:
        return array[first * unit : (last + 1) * unit]
    is_padding = index < 0
    # Padding reads past the end, each unit at a position of its own, so that the indices stay
    # unique and XLA may use its faster backward scatter.
    index = np.where(is_padding, len(units) + np.arange(index.size, dtype=np.int32), index)
    segments = units.at[index].get(
        mode="fill" if is_padding.any() else "promise_in_bounds",
        fill_value=fill if is_padding.any() else None,
        unique_indices=np.unique(index).size == index.size,
    )
    return segments.reshape(-1, *array.shape[1:])


def runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Split indices into runs ``[start, end)`` of consecutive numbers."""
    result: list[tuple[int, int]] = []
    for index in indices:
        if result and result[-1][1] == index:
            result[-1] = (result[-1][0], index + 1)
        else:
            result.append((index, index + 1))
    return result
