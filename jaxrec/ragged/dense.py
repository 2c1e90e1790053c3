"""Ragged rows to padded dense ones and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jaxrec.ragged.arrays import AnyArray, take, to_device
from jaxrec.ragged.offsets import offsets_range, segment_ids


def jagged_to_padded_dense(
    values: Shaped[AnyArray, "capacity *element"],
    offsets: Int[AnyArray, " _"] | Sequence[Int[AnyArray, " _"]],
    max_lengths: int | Sequence[int],
    padding_value: float | int | bool = 0,
) -> Shaped[Array, "..."]:
    """Copy the rows of a ragged array to a dense one, padded or cut at their ends.

    FBGEMM's op of that name (and ``jagged_1d_to_dense``, ``jagged_2d_to_dense``).

    Args:
        values: ``[capacity, ...]``; elements past the last offset are padding and never read.
        offsets: ``[batch + 1]``. For nested rows one such array per level, outermost first; the
            offsets of a level count rows of the next.
        max_lengths: Static length of the dense rows, one for each level.
        padding_value: Value behind the end of a row.

    Returns:
        ``[batch, *max_lengths, ...]`` of the type of ``values``. Elements that were cut have no
        gradient.

    Raises:
        ValueError: The numbers of lengths and levels differ.

    Example:
        >>> import numpy as np
        >>> jagged_to_padded_dense(np.array([1, 2, 3, 0]), np.array([0, 1, 3]), 3, -1).tolist()
        [[1, -1, -1], [2, 3, -1]]
        >>> nested = jagged_to_padded_dense(
        ...     np.array([1, 2, 3]), [np.array([0, 2, 2]), np.array([0, 1, 3])], [2, 2])
        >>> nested.tolist()
        [[[1, 0], [2, 3]], [[0, 0], [0, 0]]]
    """
    levels = list(offsets) if isinstance(offsets, Sequence) else [offsets]
    sizes = list(max_lengths) if isinstance(max_lengths, Sequence) else [max_lengths]
    if len(levels) != len(sizes):
        raise ValueError(f"{len(levels)} levels of offsets but {len(sizes)} lengths: {sizes}")
    rows = jnp.arange(levels[0].shape[0] - 1, dtype=jnp.int32)
    exists = jnp.ones(rows.shape, bool)
    for level, size in zip(levels, sizes, strict=True):
        level = jnp.asarray(level).astype(jnp.int32)
        starts, ends = level[rows][..., None], level[rows + 1][..., None]
        within = jnp.arange(size, dtype=jnp.int32).reshape((1,) * rows.ndim + (size,))
        exists = exists[..., None] & (within < ends - starts)
        rows = jnp.where(exists, starts + within, 0)
    places = jnp.where(exists, rows, values.shape[0])
    return take(to_device(values), places, fill_value=padding_value)


def dense_to_jagged(
    dense: Shaped[AnyArray, "batch *lengths_and_element"],
    offsets: Int[AnyArray, " _"] | Sequence[Int[AnyArray, " _"]],
    capacity: int,
) -> Shaped[Array, "{capacity} ..."]:
    """Concatenate the first elements of each row of a dense array.

    FBGEMM's op of that name, with a static capacity in place of ``total_L``.

    Args:
        dense: ``[batch, length, ...]``; with several levels ``[batch, *lengths, ...]``.
        offsets: ``[batch + 1]``, ascending from 0; a row longer than ``length`` goes on with zeros.
            For nested rows one such array per level, outermost first; the offsets of a level count
            rows of the next.
        capacity: Length of the result, at least ``offsets[-1]`` of the last level.

    Returns:
        ``[capacity, ...]``; zeros past the last offset.

    Raises:
        ValueError: The array has too few axes for the levels, or there is no level.

    Example:
        >>> import numpy as np
        >>> dense_to_jagged(np.array([[1, 2], [3, 4]]), np.array([0, 1, 3]), 4).tolist()
        [1, 3, 4, 0]
        >>> nested = np.array([[[1, 0], [2, 3]], [[0, 0], [0, 0]]])
        >>> dense_to_jagged(nested, [np.array([0, 2, 2]), np.array([0, 1, 3])], 4).tolist()
        [1, 2, 3, 0]
    """
    levels = list(offsets) if isinstance(offsets, Sequence) else [offsets]
    if not levels or dense.ndim <= len(levels):
        raise ValueError(
            f"{len(levels)} levels of offsets need a dense array of {len(levels) + 1} axes or "
            f"more, [batch, *lengths], got shape {tuple(dense.shape)}"
        )
    rows, index = segment_ids(levels[-1], capacity), [offsets_range(levels[-1], capacity)]
    for within, level in itertools.pairwise(reversed(levels)):
        count = within.shape[0] - 1  # rows of the level within are elements of this one
        index.insert(0, take(offsets_range(level, count), rows))
        rows = take(segment_ids(level, count), rows, fill_value=dense.shape[0])
    return take(to_device(dense), rows, *index)
