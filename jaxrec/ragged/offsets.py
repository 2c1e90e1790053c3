"""Offsets, segment ids and positions from the lengths of segments, in flat and keyed arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32, Shaped

from jaxrec.ragged.arrays import AnyArray, namespace, to_device


def complete_cumsum(lengths: Int[AnyArray, "*rows n"]) -> Int[AnyArray, "*rows n+1"]:
    """Return the offsets of segments, ``[0, l0, l0 + l1, ...]``, along the last axis.

    FBGEMM's ``asynchronous_complete_cumsum``.

    Example:
        >>> import numpy as np
        >>> complete_cumsum(np.array([2, 0, 3], np.int32))
        array([0, 2, 2, 5], dtype=int32)
    """
    leading = [(0, 0)] * (lengths.ndim - 1)
    return namespace(lengths).pad(inclusive_cumsum(lengths), [*leading, (1, 0)])


def inclusive_cumsum(lengths: Int[AnyArray, "*rows n"]) -> Int[AnyArray, "*rows n"]:
    """Return ``[l0, l0 + l1, ...]`` along the last axis, in the type of ``lengths``."""
    return namespace(lengths).cumsum(lengths, axis=-1, dtype=lengths.dtype)


def exclusive_cumsum(lengths: Int[AnyArray, "*rows n"]) -> Int[AnyArray, "*rows n"]:
    """Return ``[0, l0, l0 + l1, ...]`` without the total, along the last axis."""
    return complete_cumsum(lengths)[..., :-1]


def segment_ids(offsets: Int[AnyArray, " offsets"], capacity: int) -> Int32[Array, " {capacity}"]:
    """Return the segment that each of ``capacity`` positions belongs to.

    Args:
        offsets: ``[segments + 1]``, ascending from 0.
        capacity: Number of positions; those past ``offsets[-1]`` are padding.

    Returns:
        ``[capacity]`` int32; the number of segments at padding, which scatters drop.

    Example:
        >>> import numpy as np
        >>> segment_ids(np.array([0, 2, 2, 3]), 5).tolist()
        [0, 0, 2, 3, 3]
    """
    # The segment of a position is the number of segments that end at or before it. So a scatter and
    # a running sum suffice; a binary search would read the offsets a dozen times per position.
    ends = jnp.zeros(capacity, jnp.int32).at[offsets[1:]].add(1, mode="drop")
    return jnp.cumsum(ends, dtype=jnp.int32)


def offsets_range(offsets: Int[AnyArray, " offsets"], capacity: int) -> Int32[Array, " {capacity}"]:
    """Return the position of each element in its own segment: 0, 1, 2, ... in each.

    FBGEMM's ``offsets_range``, but ``offsets`` includes the total, where padding begins.

    Args:
        offsets: ``[segments + 1]``, ascending from 0.
        capacity: Number of positions; those past ``offsets[-1]`` are padding and give 0.

    Example:
        >>> import numpy as np
        >>> offsets_range(np.array([0, 2, 2, 5]), 6).tolist()
        [0, 1, 0, 1, 2, 0]
    """
    places = jnp.arange(capacity, dtype=jnp.int32)
    starts = jnp.asarray(offsets).astype(jnp.int32)[segment_ids(offsets, capacity)]
    return jnp.where(places < offsets[-1], places - starts, 0)


def lengths_range(lengths: Int[AnyArray, " n"], capacity: int) -> Int32[Array, " {capacity}"]:
    """Return `offsets_range` of segments given by their lengths."""
    return offsets_range(complete_cumsum(lengths), capacity)


def without_padding(
    values: Shaped[AnyArray, "..."], offsets: Int[AnyArray, "*devices offsets"]
) -> Shaped[Array, "..."]:
    """Return ``[*devices, capacity, *element]`` values with zeros past the last offset."""
    # Needed before products and sums: padding may be NaN, and NaN times zero is NaN, in gradients
    # too. Hence `where`, not a product with a mask.
    ends = to_device(offsets)[..., -1:]
    places = jnp.arange(values.shape[ends.ndim - 1], dtype=jnp.int32)
    used = places.reshape((1,) * (ends.ndim - 1) + places.shape) < ends
    used = used.reshape(used.shape + (1,) * (values.ndim - used.ndim))
    return jnp.where(used, to_device(values), jnp.zeros((), values.dtype))


def bag_starts(
    lengths: Int32[AnyArray, " bags"], strides: Sequence[int], capacities: Sequence[int]
) -> Int32[Array, " bags"]:
    """Return the position of each bag's first id in ``values``."""
    offsets = jnp.asarray(complete_cumsum(lengths))
    first = offsets[np.cumsum((0, *strides))[:-1]]
    return offsets[:-1] + spread(_starts(capacities) - first, strides)


def bag_ids(
    lengths: Int32[AnyArray, " bags"], strides: Sequence[int], capacities: Sequence[int]
) -> Int32[Array, " capacity"]:
    """Return the bag of each position in ``values``; ``sum(strides)`` at padding."""
    total, bags = sum(capacities), sum(strides)
    ends = bag_starts(lengths, strides, capacities) + lengths
    # The bag of a position is the number of bags that end at or before it.
    ids = _count_marks(jnp.zeros(total, jnp.int32).at[ends].add(1, mode="drop"))
    # Padding lies between the segments. +1 where a key's ids end and -1 where its segment ends make
    # a running sum that is 1 exactly there.
    per_key = jnp.diff(complete_cumsum(jnp.asarray(lengths))[np.cumsum((0, *strides))])
    starts = _starts(capacities)
    padding = jnp.zeros(total, jnp.int32)
    # The static ends come first: JAX 0.12 cannot scatter them into an array that `jax.vmap` maps.
    padding = padding.at[starts + np.array(capacities, np.int32)].add(-1, mode="drop")
    padding = padding.at[starts + per_key].add(1, mode="drop")
    return jnp.where(_count_marks(padding) > 0, bags, ids)


def spread(per_key: Any, strides: Sequence[int]) -> Array:
    """Expand ``[keys]`` to ``[bags]``: repeat each key's element once per bag."""
    # With one number of repeats XLA broadcasts; different numbers need a gather.
    if len(set(strides)) <= 1:
        return jnp.repeat(jnp.asarray(per_key), strides[0] if strides else 0)
    return jnp.repeat(
        jnp.asarray(per_key), np.array(strides, np.int32), total_repeat_length=sum(strides)
    )


def _starts(capacities: Sequence[int]) -> np.ndarray:
    return np.cumsum((0, *capacities))[:-1].astype(np.int32)


def _count_marks(marks: Int32[Array, " n"]) -> Int32[Array, " n"]:
    return jnp.cumsum(marks, dtype=jnp.int32)
