"""Softmax over the rows of a ragged array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.offsets import segment_ids, without_padding


def jagged_softmax(
    values: Float[AnyArray, "capacity *element"], offsets: Int[AnyArray, " offsets"]
) -> Float[Array, "capacity *element"]:
    """Compute the softmax over the elements of each row, column by column.

    FBGEMM's op of that name, exact for rows of any length.

    Args:
        values: ``[capacity, ...]``, for attention the scores of each row's elements.
        offsets: ``[rows + 1]``, ascending from 0.

    Returns:
        ``[capacity, ...]`` of the same type, computed in float32 or wider; zeros at padding.

    Example:
        >>> import numpy as np
        >>> scores = np.array([0, 0, 5, 9], np.float32)
        >>> jagged_softmax(scores, np.array([0, 2, 3])).tolist()
        [0.5, 0.5, 1.0, 0.0]
    """
    rows, segments = offsets.shape[0] - 1, segment_ids(offsets, values.shape[0])
    scores = without_padding(values, offsets)
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    # One more row takes the padding, so that every element has a row to read its sum from.
    largest = jax.ops.segment_max(scores, segments, rows + 1, indices_are_sorted=True)
    powers = jnp.exp(scores - jax.lax.stop_gradient(largest)[segments])
    sums = jax.ops.segment_sum(powers, segments, rows + 1, indices_are_sorted=True)
    return without_padding(powers / sums[segments], offsets).astype(values.dtype)
