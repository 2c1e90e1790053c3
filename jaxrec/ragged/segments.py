"""Segments of a flat array as rows of a dense one, and parts of segments."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32, Shaped

from jaxrec.ragged.arrays import AnyArray, take, to_device
from jaxrec.ragged.dense import dense_to_jagged, jagged_to_padded_dense
from jaxrec.ragged.offsets import complete_cumsum, offsets_range, segment_ids


def pack_segments(
    values: Shaped[AnyArray, "capacity *element"],
    lengths: Int[AnyArray, " segments"],
    max_length: int,
    padding_value: float | int | bool = 0,
) -> Shaped[Array, "segments {max_length} *element"]:
    """Return each segment as a row of a dense array, padded or cut at its end.

    FBGEMM's ``pack_segments``; ``pack_segments_v2(pad_minf=True)`` is ``padding_value=-jnp.inf``.

    Args:
        values: ``[capacity, ...]``; elements past the last segment are padding and never read.
        lengths: ``[segments]``.
        max_length: Static length of the dense rows.
        padding_value: Value behind the end of a segment.

    Example:
        >>> import numpy as np
        >>> pack_segments(np.array([1, 2, 3, 4]), np.array([1, 3]), 2).tolist()
        [[1, 0], [2, 3]]
    """
    return jagged_to_padded_dense(values, complete_cumsum(lengths), max_length, padding_value)


def segment_mask(
    lengths: Int[AnyArray, " segments"], max_length: int
) -> Bool[Array, "segments {max_length}"]:
    """Return which elements of `pack_segments` exist; FBGEMM's presence mask.

    Example:
        >>> import numpy as np
        >>> segment_mask(np.array([1, 3]), 2).tolist()
        [[True, False], [True, True]]
    """
    return jnp.arange(max_length, dtype=jnp.int32)[None] < jnp.asarray(lengths)[:, None]


def unpack_segments(
    packed: Shaped[AnyArray, "segments length *element"],
    lengths: Int[AnyArray, " segments"],
    capacity: int,
) -> Shaped[Array, "{capacity} *element"]:
    """Concatenate the first elements of each row: the inverse of `pack_segments`.

    Args:
        packed: ``[segments, length, ...]``.
        lengths: ``[segments]``; what a segment has beyond ``length`` was cut, and is zero.
        capacity: Static length of the result, at least the sum of the lengths.

    Returns:
        ``[capacity, ...]``; zeros past the last segment.

    Example:
        >>> import numpy as np
        >>> unpack_segments(np.array([[1, 0], [2, 3]]), np.array([1, 2]), 4).tolist()
        [1, 2, 3, 0]
    """
    return dense_to_jagged(packed, complete_cumsum(lengths), capacity)


def jagged_slice(
    values: Shaped[AnyArray, "capacity *element"],
    lengths: Int[AnyArray, " rows"],
    starts: Int[AnyArray, " rows"],
    max_length: int,
    capacity: int | None = None,
) -> tuple[Shaped[Array, "out_capacity *element"], Int32[Array, " rows"]]:
    """Return up to ``max_length`` elements of each row, from a position in the row on.

    FBGEMM's op of that name. Differentiable with respect to the values.

    Args:
        values: ``[capacity, ...]``.
        lengths: ``[rows]``.
        starts: ``[rows]`` first position of each slice, 0 or more. A slice that starts past the end
            of its row is empty. A negative start counts as 0.
        max_length: Static bound on the length of a slice.
        capacity: Static capacity of the result. None: large enough for every batch of this shape.

    Returns:
        ``[capacity, ...]`` values with zeros as padding, and ``[rows]`` lengths. Elements beyond
        the capacity are left out: lengths then sum to more than it.

    Raises:
        ValueError: ``max_length`` is negative.

    Example:
        >>> import numpy as np
        >>> rows = np.array([1, 2, 3, 4, 5]), np.array([2, 3])
        >>> values, lengths = jagged_slice(*rows, starts=np.array([1, 0]), max_length=2)
        >>> values.tolist(), lengths.tolist()
        ([2, 3, 4, 0], [1, 2])
    """
    if max_length < 0:
        raise ValueError(f"jagged_slice: max_length is 0 or more, got {max_length}")
    size, num_rows = values.shape[0], lengths.shape[0]
    capacity = min(size, num_rows * max_length) if capacity is None else capacity
    lengths = jnp.asarray(lengths).astype(jnp.int32)
    starts = jnp.clip(jnp.asarray(starts).astype(jnp.int32), 0, lengths)
    out_lengths = jnp.minimum(lengths - starts, max_length)
    out_offsets = complete_cumsum(out_lengths)
    firsts = jnp.asarray(complete_cumsum(lengths)[:-1] + starts)
    source = take(firsts, segment_ids(out_offsets, capacity))
    source = source + offsets_range(out_offsets, capacity)
    source = jnp.where(jnp.arange(capacity) < out_offsets[-1], source, size)
    return take(to_device(values), source), out_lengths


def jagged_1d_to_truncated_values(
    values: Shaped[AnyArray, "capacity *element"],
    lengths: Int[AnyArray, " rows"],
    max_truncated_length: int,
    capacity: int | None = None,
) -> Shaped[Array, "out_capacity *element"]:
    """Return the first ``max_truncated_length`` elements of each row, one row after the other.

    FBGEMM's op of that name. The lengths of the result are
    ``jnp.minimum(lengths, max_truncated_length)``.

    Args:
        values: ``[capacity, ...]``.
        lengths: ``[rows]``.
        max_truncated_length: Static bound on the length of a row.
        capacity: As for `jagged_slice`.

    Example:
        >>> import numpy as np
        >>> jagged_1d_to_truncated_values(np.array([1, 2, 3, 4]), np.array([1, 3]), 2).tolist()
        [1, 2, 3, 0]
    """
    starts = jnp.zeros(lengths.shape, jnp.int32)
    return jagged_slice(values, lengths, starts, max_truncated_length, capacity)[0]
