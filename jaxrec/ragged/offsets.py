"""Lengths and offsets of segments, segment ids, and positions within a segment."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32, Shaped

from jaxrec.ragged.arrays import AnyArray, namespace, to_device


def complete_cumsum(lengths: Int[AnyArray, "*rows n"]) -> Int[AnyArray, "*rows n+1"]:
    """Return the offsets of segments of given lengths, ``[0, l0, l0 + l1, ...]``, by the last axis.

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
        ``[capacity]`` int32; at padding the number of segments, which scatters leave out.

    Example:
        >>> import numpy as np
        >>> segment_ids(np.array([0, 2, 2, 3]), 5).tolist()
        [0, 0, 2, 3, 3]
    """
    ends = jnp.zeros(capacity, jnp.int32).at[offsets[1:]].add(1, mode="drop")
    return jnp.cumsum(ends, dtype=jnp.int32)


def offsets_range(offsets: Int[AnyArray, " offsets"], capacity: int) -> Int32[Array, " {capacity}"]:
    """Return the position of each element in its own segment: 0, 1, 2, ... in each.

    FBGEMM's ``offsets_range``; ``offsets`` here includes the last one, so that padding is known.

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
    """Return ``[*devices, capacity, *element]`` values with zeros past the last offset.

    Whoever multiplies or sums values does so first: NaN times zero is NaN, in gradients as well.
    """
    ends = to_device(offsets)[..., -1:]
    places = jnp.arange(values.shape[ends.ndim - 1], dtype=jnp.int32)
    used = places.reshape((1,) * (ends.ndim - 1) + places.shape) < ends
    used = used.reshape(used.shape + (1,) * (values.ndim - used.ndim))
    return jnp.where(used, to_device(values), jnp.zeros((), values.dtype))
