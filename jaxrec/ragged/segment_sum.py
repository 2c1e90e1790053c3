"""Sums over the rows of a ragged array."""

from __future__ import annotations

import jax
from jaxtyping import Array, Int, Num

from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.offsets import segment_ids, without_padding


def segment_sum_csr(
    values: Num[AnyArray, "capacity *element"],
    csr_seg: Int[AnyArray, " offsets"],
    batch_size: int = 1,
) -> Num[Array, "segments *element"]:
    """Sum ``values[csr_seg[i] * batch_size:csr_seg[i + 1] * batch_size]`` for each segment ``i``.

    FBGEMM's op of that name; with a ``batch_size`` of 1 the sum of each row of a ragged array.

    Args:
        values: ``[capacity, ...]``; elements past the last segment are never read.
        csr_seg: ``[segments + 1]`` offsets, ascending from 0, in units of ``batch_size`` elements.
        batch_size: Elements in a unit.

    Returns:
        ``[segments, ...]`` of the type of ``values``; zeros for empty segments.

    Example:
        >>> import numpy as np
        >>> segment_sum_csr(np.array([1., 2., 3., 9.], np.float32), np.array([0, 2, 2, 3])).tolist()
        [3.0, 0.0, 3.0]
    """
    offsets = csr_seg * batch_size
    return jax.ops.segment_sum(
        without_padding(values, offsets),
        segment_ids(offsets, values.shape[0]),
        csr_seg.shape[0] - 1,
        indices_are_sorted=True,
    )
