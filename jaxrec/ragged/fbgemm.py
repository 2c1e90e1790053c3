"""FBGEMM's operations on plain arrays: values, with offsets or lengths.

They have the names of ``torch.ops.fbgemm``, and static capacities where FBGEMM computes a size.
``values`` are ``[capacity, ...]``; elements past the last row are padding: never read, zeros in
results. ``offsets`` are ``[rows + 1]``, ascending from 0. `jaxrec.ragged` takes `JaggedArray`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Num, Shaped

from jaxrec.ragged.arrays import AnyArray, take, to_device
from jaxrec.ragged.bucketize import Bucketized as Bucketized
from jaxrec.ragged.bucketize import (
    block_bucketize_sparse_features as block_bucketize_sparse_features,
)
from jaxrec.ragged.bucketize import (
    boundary_bucketize_sparse_features as boundary_bucketize_sparse_features,
)
from jaxrec.ragged.bucketize import bucketize_sparse_features as bucketize_sparse_features
from jaxrec.ragged.offsets import complete_cumsum, offsets_range, segment_ids, without_padding
from jaxrec.ragged.packing import check_indices, checked_capacities

Values: TypeAlias = Shaped[AnyArray, "capacity *element"]
Lengths: TypeAlias = Int[AnyArray, " rows"]
Offsets: TypeAlias = Int[AnyArray, " offsets"]
# Nested rows have one array per level, outermost first.
Levels: TypeAlias = Int[AnyArray, " _"] | Sequence[Int[AnyArray, " _"]]
Fill: TypeAlias = float | int | bool
Dense: TypeAlias = Num[AnyArray, "batch length *element"]


def jagged_to_padded_dense(
    values: Values, offsets: Levels, max_lengths: int | Sequence[int], padding_value: Fill = 0
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
    # Each level replaces row numbers by the numbers of their elements, which are rows of the next
    # level. A row that does not exist goes on as row 0 until the mask below.
    for level, size in zip(levels, sizes, strict=True):
        level = jnp.asarray(level).astype(jnp.int32)
        starts, ends = level[rows][..., None], level[rows + 1][..., None]
        within = jnp.arange(size, dtype=jnp.int32).reshape((1,) * rows.ndim + (size,))
        exists = exists[..., None] & (within < ends - starts)
        rows = jnp.where(exists, starts + within, 0)
    # A position past the end reads the padding value, and sends no gradient to a real element.
    places = jnp.where(exists, rows, values.shape[0])
    return take(to_device(values), places, fill_value=padding_value)


def dense_to_jagged(
    dense: Shaped[AnyArray, "batch *lengths_and_element"], offsets: Levels, capacity: int
) -> Shaped[Array, "{capacity} ..."]:
    """Concatenate the first elements of each row of a dense array.

    FBGEMM's op of that name, with a static capacity in place of ``total_L``.

    Args:
        dense: ``[batch, length, ...]``; with several levels ``[batch, *lengths, ...]``.
        offsets: As for `jagged_to_padded_dense`; a row longer than ``length`` ends with zeros.
        capacity: Length of the result, at least ``offsets[-1]`` of the last level.

    Returns:
        ``[capacity, ...]``; zeros past the last offset.

    Raises:
        ValueError: The array has too few axes for the levels, or there is no level.

    Example:
        >>> import numpy as np
        >>> dense_to_jagged(np.array([[1, 2], [3, 4]]), np.array([0, 1, 3]), 4).tolist()
        [1, 3, 4, 0]
    """
    levels = list(offsets) if isinstance(offsets, Sequence) else [offsets]
    if not levels or dense.ndim <= len(levels):
        raise ValueError(
            f"{len(levels)} levels of offsets need a dense array of {len(levels) + 1} axes or "
            f"more, [batch, *lengths], got shape {tuple(dense.shape)}"
        )
    # From the innermost level outwards, since only there the capacity is static: an element knows
    # its row, that row its place in the row around it, and so on up to the batch.
    rows, index = segment_ids(levels[-1], capacity), [offsets_range(levels[-1], capacity)]
    for within, level in itertools.pairwise(reversed(levels)):
        count = within.shape[0] - 1  # rows of the level within are elements of this one
        index.insert(0, take(offsets_range(level, count), rows))
        rows = take(segment_ids(level, count), rows, fill_value=dense.shape[0])
    return take(to_device(dense), rows, *index)


def pack_segments(
    values: Values, lengths: Lengths, max_length: int, padding_value: Fill = 0
) -> Shaped[Array, "rows {max_length} *element"]:
    """Return each segment as a row of a dense array, ``[segments, max_length, ...]``.

    FBGEMM's ``pack_segments``; ``pack_segments_v2(pad_minf=True)`` is ``padding_value=-jnp.inf``.

    Example:
        >>> import numpy as np
        >>> pack_segments(np.array([1, 2, 3, 4]), np.array([1, 3]), 2).tolist()
        [[1, 0], [2, 3]]
    """
    return jagged_to_padded_dense(values, complete_cumsum(lengths), max_length, padding_value)


def segment_mask(lengths: Lengths, max_length: int) -> Bool[Array, "rows {max_length}"]:
    """Return which elements of `pack_segments` exist; FBGEMM's presence mask.

    Example:
        >>> import numpy as np
        >>> segment_mask(np.array([1, 3]), 2).tolist()
        [[True, False], [True, True]]
    """
    return jnp.arange(max_length, dtype=jnp.int32)[None] < jnp.asarray(lengths)[:, None]


def unpack_segments(
    packed: Shaped[AnyArray, "rows length *element"], lengths: Lengths, capacity: int
) -> Shaped[Array, "{capacity} *element"]:
    """Concatenate the first elements of each row: the inverse of `pack_segments`.

    Args:
        packed: ``[segments, length, ...]``.
        lengths: ``[segments]``. Elements beyond ``length`` were cut, and are zeros here.
        capacity: Static length of the result, at least the sum of the lengths.

    Example:
        >>> import numpy as np
        >>> unpack_segments(np.array([[1, 0], [2, 3]]), np.array([1, 2]), 4).tolist()
        [1, 2, 3, 0]
    """
    return dense_to_jagged(packed, complete_cumsum(lengths), capacity)


def jagged_slice(
    values: Values,
    lengths: Lengths,
    starts: Int[AnyArray, " rows"],
    max_length: int,
    capacity: int | None = None,
) -> tuple[Shaped[Array, "out_capacity *element"], Int32[Array, " rows"]]:
    """Return up to ``max_length`` elements of each row, from a position in the row on.

    FBGEMM's op of that name; see `jaxrec.ragged.jagged_slice` for the arguments.

    Returns:
        ``[capacity, ...]`` values and ``[rows]`` lengths.

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
    # Slices of one batch do not overlap, so they never hold more elements than the batch does.
    capacity = min(size, num_rows * max_length) if capacity is None else capacity
    lengths = jnp.asarray(lengths).astype(jnp.int32)
    starts = jnp.clip(jnp.asarray(starts).astype(jnp.int32), 0, lengths)
    out_lengths = jnp.minimum(lengths - starts, max_length)
    out_offsets = complete_cumsum(out_lengths)
    firsts = jnp.asarray(complete_cumsum(lengths)[:-1] + starts)
    return take(to_device(values), _sources(firsts, out_offsets, capacity, size)), out_lengths


def _sources(
    firsts: Int[Array, " rows"], offsets: Offsets, capacity: int, padding: int | Int[Array, ""]
) -> Int32[Array, " {capacity}"]:
    """Return where each element of copied rows comes from; ``padding`` past the last offset.

    ``firsts`` are the positions of the rows' first elements in the source, ``offsets`` those of the
    rows in the copy.
    """
    source = take(firsts, segment_ids(offsets, capacity)) + offsets_range(offsets, capacity)
    return jnp.where(jnp.arange(capacity) < offsets[-1], source, padding)


def jagged_1d_to_truncated_values(
    values: Values, lengths: Lengths, max_truncated_length: int, capacity: int | None = None
) -> Shaped[Array, "out_capacity *element"]:
    """Return the first elements of each row, at most ``max_truncated_length``, row after row.

    FBGEMM's op of that name. The lengths of the result are
    ``jnp.minimum(lengths, max_truncated_length)``; ``capacity`` is that of `jagged_slice`.

    Example:
        >>> import numpy as np
        >>> jagged_1d_to_truncated_values(np.array([1, 2, 3, 4]), np.array([1, 3]), 2).tolist()
        [1, 2, 3, 0]
    """
    starts = jnp.zeros(lengths.shape, jnp.int32)
    return jagged_slice(values, lengths, starts, max_truncated_length, capacity)[0]


def jagged_index_select(
    values: Values,
    lengths: Lengths,
    indices: Int[AnyArray, " selected"],
    capacity: int | None = None,
) -> tuple[Shaped[Array, "out_capacity *element"], Int32[Array, " selected"]]:
    """Concatenate rows ``indices[0], indices[1], ...`` of a ragged array.

    FBGEMM's op of that name; see `jaxrec.ragged.jagged_index_select` for arguments and errors.

    Returns:
        ``[capacity, ...]`` values and ``[selected]`` lengths.

    Example:
        >>> import numpy as np
        >>> rows = np.array([1, 2, 3], np.int32), np.array([1, 2], np.int32)
        >>> values, lengths = jagged_index_select(*rows, np.array([1, 0, 1]), capacity=6)
        >>> values.tolist(), lengths.tolist()
        ([2, 3, 1, 2, 3, 0], [2, 1, 2])
    """
    check_indices(indices, lengths.shape[0])
    bags, indices = jnp.asarray(lengths).astype(jnp.int32), jnp.asarray(indices)
    # JAX would count a negative index from the end; past the end it gives an empty row.
    indices = jnp.where(indices < 0, bags.shape[0], indices)
    out_lengths = take(bags, indices)
    (capacity,) = checked_capacities(
        ("values",), out_lengths[None], None if capacity is None else [capacity]
    )
    out_offsets = complete_cumsum(out_lengths)
    firsts = take(jnp.asarray(complete_cumsum(bags)), indices)
    source = _sources(firsts, out_offsets, capacity, values.shape[0])
    return take(to_device(values), source), out_lengths


def invert_permute(permute: Int[AnyArray, " n"]) -> Int[Array, " n"]:
    """Invert a permutation, ``out[permute[i]] = i``, as FBGEMM's op of that name does."""
    places = jnp.arange(permute.shape[0], dtype=jnp.asarray(permute).dtype)
    return jnp.zeros_like(places).at[permute].set(places)


def expand_into_jagged_permute(
    permute: Int[AnyArray, " selected"],
    input_offsets: Int[AnyArray, " in_offsets"],
    output_offsets: Int[AnyArray, " out_offsets"],
    capacity: int,
) -> Int32[Array, " {capacity}"]:
    """Expand a permutation of segments to one of their elements.

    ``out[output_offsets[t] + i] = input_offsets[permute[t]] + i``; FBGEMM's op of that name.

    Args:
        permute: ``[selected]`` segments of the input; they may repeat.
        input_offsets: ``[segments + 1]``.
        output_offsets: ``[selected + 1]``, of the permuted segments.
        capacity: Length of the result, at least ``output_offsets[-1]``.

    Returns:
        ``[capacity]`` int32: for each position of the output, the position of its element in the
        input; ``input_offsets[-1]``, the number of elements, at padding.
    """
    starts = jnp.asarray(input_offsets).astype(jnp.int32)
    firsts = take(starts, jnp.asarray(permute))
    return _sources(firsts, output_offsets, capacity, starts[-1])


def permute_sparse_data(
    permute: Int[AnyArray, " selected"],
    lengths: Int[AnyArray, "segments *bags"],
    values: Shaped[AnyArray, " capacity"],
    weights: Shaped[AnyArray, " capacity"] | None = None,
    capacity: int | None = None,
) -> tuple[
    Int[Array, "selected *bags"],
    Shaped[Array, " out_capacity"],
    Shaped[Array, " out_capacity"] | None,
]:
    """Permute segments of ragged data in an order known at run time.

    FBGEMM's ``permute_1D_sparse_data`` and ``permute_2D_sparse_data``. Where the order is static,
    `KeyedJaggedArray.permute` costs less.

    Args:
        permute: ``[selected]`` segments; they may repeat.
        lengths: ``[segments]``, or ``[segments, bags]`` where a segment (a feature) has many bags.
        values: ``[capacity]``.
        weights: ``[capacity]`` or None.
        capacity: Capacity of the result. None: `capacity_for` its elements; not under jit.

    Returns:
        Lengths, values and weights (or None) in the new order.

    Raises:
        IndexError, TypeError, ValueError: As `jagged_index_select`.
    """
    totals = lengths.reshape(lengths.shape[0], -1).sum(axis=1)
    out_values, _ = jagged_index_select(values, totals, permute, capacity)
    out_weights = None
    if weights is not None:
        out_weights, _ = jagged_index_select(weights, totals, permute, capacity)
    return take(jnp.asarray(lengths), jnp.asarray(permute)), out_values, out_weights


def jagged_dense_elementwise_add(
    x_values: Num[AnyArray, "capacity *element"], x_offsets: Offsets, y: Dense
) -> Num[Array, "batch length *element"]:
    """Return the dense sum of a ragged and a dense array, ``padded(x) + y``; FBGEMM's op.

    Rows of ``x`` longer than ``length`` are cut.
    """
    return jagged_to_padded_dense(x_values, x_offsets, y.shape[1]) + y


def jagged_dense_elementwise_add_jagged_output(
    x_values: Num[AnyArray, "capacity *element"], x_offsets: Offsets, y: Dense
) -> Num[Array, "capacity *element"]:
    """Return the ragged sum of a ragged and a dense array; FBGEMM's op.

    Elements of ``y`` past the end of a row of ``x`` are left out. Missing elements of ``y`` count
    as zero.
    """
    y_values = dense_to_jagged(y, x_offsets, x_values.shape[0])
    return without_padding(x_values, x_offsets) + y_values


def jagged_dense_dense_elementwise_add_jagged_output(
    x_values: Num[AnyArray, "capacity *element"], x_offsets: Offsets, y_0: Dense, y_1: Dense
) -> Num[Array, "capacity *element"]:
    """Compute `jagged_dense_elementwise_add_jagged_output` with ``y_0 + y_1``; FBGEMM's op."""
    return jagged_dense_elementwise_add_jagged_output(x_values, x_offsets, y_0 + y_1)


def jagged_dense_elementwise_mul(
    x_values: Num[AnyArray, "capacity *element"], x_offsets: Offsets, y: Dense
) -> Num[Array, "capacity *element"]:
    """Return the ragged product of a ragged and a dense array; FBGEMM's op.

    Elements of ``y`` past the end of a row of ``x`` are left out. Missing elements of ``y`` count
    as zero.
    """
    y_values = dense_to_jagged(y, x_offsets, x_values.shape[0])
    return without_padding(x_values, x_offsets) * y_values


# Products of rows pad them to a static `max_length` and multiply densely: XLA's batched products
# take one shape, and a product for each row would compile a program for each batch.
def jagged_dense_bmm(
    x_values: Float[AnyArray, "capacity inner"],
    x_offsets: Offsets,
    y: Float[AnyArray, "batch inner columns"],
    max_length: int,
) -> Float[Array, "capacity columns"]:
    """Multiply each row of ``x`` (``[length, inner]``) by its matrix of ``y``; ragged like ``x``.

    FBGEMM's op of that name. ``max_length`` is a static bound on the rows' lengths. Elements past
    it give zeros and have no gradient.
    """
    x = jagged_to_padded_dense(x_values, x_offsets, max_length)
    return dense_to_jagged(jnp.matmul(x, y), x_offsets, x_values.shape[0])


def jagged_jagged_bmm(
    x_values: Float[AnyArray, "capacity rows"],
    y_values: Float[AnyArray, "capacity columns"],
    offsets: Offsets,
    max_length: int,
) -> Float[Array, "batch rows columns"]:
    """Return ``x_b^T y_b`` for each row ``b`` of two arrays that are ragged alike.

    FBGEMM's op of that name; ``max_length`` as for `jagged_dense_bmm`.
    """
    x = jagged_to_padded_dense(x_values, offsets, max_length)
    y = jagged_to_padded_dense(y_values, offsets, max_length)
    return jnp.einsum("blr,blc->brc", x, y)


def batched_dense_vec_jagged_2d_mul(
    v: Float[AnyArray, "batch_heads length"],
    a_values: Float[AnyArray, "capacity heads_dims"],
    a_offsets: Offsets,
) -> Float[Array, "batch_heads dim"]:
    """Sum each row's vectors, weighted per head, as attention does with its values.

    ``out[b * H + h] = sum_n v[b * H + h, n] a_b[n, h * D:(h + 1) * D]``; FBGEMM's op of that name.

    Args:
        v: ``[batch * H, length]``; rows of ``a`` longer than ``length`` are cut, and elements past
            a row are never read.
        a_values: ``[capacity, H * D]``.
        a_offsets: ``[batch + 1]``, ascending from 0.

    Returns:
        ``[batch * H, D]``.

    Raises:
        ValueError: The number of rows of ``v`` is not a multiple of the batch, or the width of
            ``a`` not a multiple of the number of heads.
    """
    batch, length = a_offsets.shape[0] - 1, v.shape[1]
    heads, odd = divmod(v.shape[0], max(batch, 1))
    if odd or a_values.shape[1] % max(heads, 1):
        raise ValueError(
            f"v of shape {v.shape} and a_values of shape {a_values.shape} fit no number of heads "
            f"over a batch of {batch}; expected [batch * H, length] and [capacity, H * D]"
        )
    a = jagged_to_padded_dense(a_values, a_offsets, length).reshape(batch, length, heads, -1)
    lengths = jnp.asarray(a_offsets[1:] - a_offsets[:-1])
    exists = jnp.arange(length)[None, None, :] < lengths[:, None, None]
    # The padding of `a` is zero, but a weight of NaN or infinity there would still make NaN.
    v = jnp.where(exists, v.reshape(batch, heads, length), jnp.zeros((), v.dtype))
    return jnp.einsum("bhl,blhd->bhd", v, a).reshape(v.shape[0] * heads, -1)


def jagged_softmax(
    values: Float[AnyArray, "capacity *element"], offsets: Offsets
) -> Float[Array, "capacity *element"]:
    """Compute the softmax over the elements of each row, column by column.

    FBGEMM's op of that name, exact for rows of any length; computed in float32 or wider.

    Example:
        >>> import numpy as np
        >>> scores = np.array([0, 0, 5, 9], np.float32)
        >>> jagged_softmax(scores, np.array([0, 2, 3])).tolist()
        [0.5, 0.5, 1.0, 0.0]
    """
    rows, segments = offsets.shape[0] - 1, segment_ids(offsets, values.shape[0])
    scores = without_padding(values, offsets)
    # The sum over a long row loses its digits in 16 bits.
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    # One more row takes the padding, so that every element has a row to read its sum from.
    largest = jax.ops.segment_max(scores, segments, rows + 1, indices_are_sorted=True)
    # The maximum cancels in the quotient, so it needs no gradient.
    powers = jnp.exp(scores - jax.lax.stop_gradient(largest)[segments])
    sums = jax.ops.segment_sum(powers, segments, rows + 1, indices_are_sorted=True)
    return without_padding(powers / sums[segments], offsets).astype(values.dtype)


def segment_sum_csr(
    values: Num[AnyArray, "capacity *element"], csr_seg: Offsets, batch_size: int = 1
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
