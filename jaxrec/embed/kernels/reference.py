"""The primitives, defined and computed in XLA.

This implementation runs on every device and takes every type; tests compare the others with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int, Int32, Shaped

from jaxrec.embed.kernels.base import (
    BAD_ROW,
    BagLayout,
    BagRows,
    Buckets,
    Ids,
    Lengths,
    Lookups,
    RowIndices,
    Table,
    Weights,
)
from jaxrec.embed.kernels.stretches import sum_stretches
from jaxrec.embed.kernels.updates import build_runs as build_runs
from jaxrec.embed.kernels.updates import fused_update as fused_update
from jaxrec.embed.kernels.updates import sum_rows as sum_rows
from jaxrec.ragged.key_segments import take_segments


def refuse(primitive: str, arguments: Mapping[str, Any]) -> str | None:
    """Return None: the reference takes every call of every primitive."""
    return None


def new_rows(row: Shaped[Array, "*shape"], num_rows: int) -> Shaped[Array, "num_rows *shape"]:
    """Return a new array of equal rows, in memory that suits reading it at random places.

    Args:
        row: The value of each row.
        num_rows: Number of rows.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> kernels.new_rows(jnp.array([1.0, 2.0]), 2).tolist()
        [[1.0, 2.0], [1.0, 2.0]]
    """
    return jnp.broadcast_to(row, (num_rows, *row.shape))


def pooled_lookup(
    table: Table,
    ids: Ids,
    lengths: Lengths,
    weights: Weights,
    layout: BagLayout,
    dtype: DTypeLike,
    *,
    parts_in: int = 1,
    parts_out: int = 1,
) -> BagRows:
    """Return the sum or mean of each bag's rows.

    Args:
        table: The group's rows; packed ones are unpacked to float32 as they are read.
        ids: The ids of all keys of a batch.
        lengths: The lengths of all its bags.
        weights: The weight of each id; None: 1.
        layout: Where the group's features lie in these arrays.
        dtype: Type of the result.
        parts_in, parts_out: Hints for the table and the result; see `jaxrec.embed.kernels.base`.

    Returns:
        One row for each bag, at `BagLayout.bag_rows`; NaN for a bag with an id outside its table.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> layout = kernels.BagLayout((0,), (4,), (0,), (2,), (0,), (3,), (False,))
        >>> table = jnp.array([[1.0], [10.0], [100.0]])
        >>> ids, lengths = jnp.array([2, 0, 1, 0]), jnp.array([2, 1])
        >>> kernels.pooled_lookup(table, ids, lengths, None, layout, "float32").tolist()
        [[101.0], [10.0]]
    """
    num_rows = table.shape[0]
    lookups = flatten_bags(ids, lengths, weights, layout, num_rows)

    def load(terms: tuple[Array, Array | None]) -> Array:
        row, scale = terms
        values = row_lookup(table, row).astype(jnp.float32)
        return values if scale is None else values * scale[:, None].astype(jnp.float32)

    assert lookups.bags is not None
    # Padding, whose scales may be NaN, belongs to no bag.
    bags = jnp.where(lookups.rows == num_rows, layout.num_bags, lookups.bags)
    terms = (lookups.rows, lookups.scales)
    return sum_stretches(load, terms, bags, layout.num_bags, table.shape[1]).astype(dtype)


def flatten_bags(
    ids: Ids, lengths: Lengths, weights: Weights, layout: BagLayout, num_rows: int
) -> Lookups:
    """Return a batch as flat lookups into a table of ``num_rows`` rows.

    The other arguments are those of `pooled_lookup`.
    """
    positions = take_segments(ids, layout.id_starts, layout.capacities)
    bag_lengths = take_segments(lengths, layout.length_starts, layout.strides)

    # Padding is one more bag at the end of each feature, so that bags tile the positions exactly.
    bag_ends = np.cumsum(layout.strides)
    padding = jnp.asarray(layout.capacities, jnp.int32) - _sum_features(bag_lengths, layout)
    extents = _insert(bag_lengths, bag_ends, padding)
    at_extents = _repeat(extents, layout.num_positions)
    is_padding = at_extents(_insert(np.zeros(layout.num_bags, bool), bag_ends, True))
    bags = at_extents(_insert(_output_rows(layout), bag_ends, 0))

    feature = np.repeat(np.arange(layout.num_features), layout.capacities)
    row_counts = np.asarray(layout.row_counts, np.int32)[feature]
    row_offsets = np.asarray(layout.row_offsets, np.int32)[feature]
    # As unsigned numbers, negative ids are past the end: a comparison with zeros would keep the
    # zeros of `_repeat` in memory on GPUs.
    outside = positions.astype(jnp.uint32) >= row_counts.astype(np.uint32)
    rows = jnp.where(outside, BAD_ROW, positions + row_offsets)
    rows = jnp.where(is_padding, num_rows, rows)

    scales = None
    if weights is not None:
        scales = take_segments(weights, layout.id_starts, layout.capacities)
    if any(layout.means):
        is_mean = np.repeat(np.asarray(layout.means), layout.strides)
        divisors = jnp.where(is_mean, jnp.maximum(bag_lengths, 1), 1)
        shares = 1.0 / at_extents(_insert(divisors, bag_ends, 1)).astype(jnp.float32)
        scales = shares if scales is None else scales * shares
    return Lookups(rows, bags.astype(jnp.int32), scales)


def row_lookup(
    table: Table, rows: RowIndices, *, parts_in: int = 1, parts_out: int = 1
) -> Float[Array, "n dim"]:
    """Return ``table[rows]``: zeros at padding, NaN at a bad row.

    Args:
        table: The rows; packed ones give float32.
        rows: Row of each lookup.
        parts_in, parts_out: Hints for the table and the result; see `jaxrec.embed.kernels.base`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> kernels.row_lookup(jnp.array([[1.0], [2.0]]), jnp.array([1, 2, 3])).tolist()
        [[2.0], [0.0], [nan]]
    """
    # JAX counts negative indices from the end.
    beyond = jnp.where(rows < 0, table.shape[0] + 1, rows)
    values = table.at[beyond].get(mode="fill", fill_value=jnp.nan)
    return jnp.where((rows == table.shape[0])[:, None], jnp.zeros((), table.dtype), values)


def bucket(owners: Int32[Array, " n"], num_owners: int) -> Buckets:
    """Group lookups by the device that owns their row, stably.

    Args:
        owners: Owner of each lookup's row; a number outside ``[0, num_owners)`` means no owner.
        num_owners: Number of devices.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> buckets = kernels.bucket(jnp.array([1, 2, 0, 1]), num_owners=2)
        >>> buckets.order.tolist(), buckets.counts.tolist()
        ([2, 0, 3, 1], [1, 2])
    """
    owners = jnp.where((owners < 0) | (owners > num_owners), num_owners, owners)
    counts = jnp.zeros(num_owners, jnp.int32).at[owners].add(1, mode="drop")
    return Buckets(jnp.argsort(owners, stable=True).astype(jnp.int32), counts)


def shift_rows(
    rows: RowIndices, starts: tuple[int, ...], shifts: tuple[int, ...], num_rows: int, outside: int
) -> RowIndices:
    """Number rows anew: add to each the shift of the stretch of rows that it lies in.

    Args:
        rows: Any numbers.
        starts: First row of each stretch, ascending from 0.
        shifts: Summand of the rows of each stretch.
        num_rows: End of the last stretch.
        outside: Result for numbers outside ``[0, num_rows)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> rows = jnp.array([0, 4, 5, 9, -1])
        >>> kernels.shift_rows(rows, (0, 5), (100, -5), num_rows=8, outside=999).tolist()
        [100, 104, 0, 999, 999]
    """
    # A loop would take three launches a turn on GPUs.
    stretch = jnp.searchsorted(
        np.asarray(starts, np.int32), rows, side="right", method="scan_unrolled"
    )
    stretch -= 1
    shift = jnp.asarray(shifts, jnp.int32)[jnp.maximum(stretch, 0)]
    is_row = (rows >= 0) & (rows < num_rows)
    return jnp.where(is_row, rows + shift, outside).astype(jnp.int32)


def pair_products(vectors: Float[Array, "batch n dim"]) -> Float[Array, "batch pairs"]:
    """Return the dot products of all pairs of a sample's vectors.

    Args:
        vectors: ``[batch, n, dim]``, on one device.

    Returns:
        ``[batch, n * (n - 1) / 2]``, the pairs in the order (0, 1), (0, 2), ..., (1, 2), ...

    Raises:
        ValueError: The vectors have other than three dimensions.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> kernels.pair_products(jnp.array([[[1.0, 0.0], [2.0, 3.0], [4.0, 5.0]]])).tolist()
        [[2.0, 4.0, 23.0]]
    """
    batch, n, _ = check_vectors(vectors)
    gram = jnp.einsum("bid,bjd->bij", vectors, vectors).reshape(batch, n * n)
    return jnp.take(gram, _positions_of_pairs(n), axis=1, mode="clip")


def pair_gradients(
    vectors: Float[Array, "batch n dim"], gradient: Float[Array, "batch pairs"]
) -> Float[Array, "batch n dim"]:
    """Return the gradients of the vectors, given those of `pair_products`.

    A vector's gradient is the sum of the sample's other vectors, each times the gradient of its
    product with this one.

    Args:
        vectors: ``[batch, n, dim]``, on one device.
        gradient: ``[batch, n * (n - 1) / 2]``.

    Returns:
        ``[batch, n, dim]``.

    Raises:
        ValueError: The vectors have other than three dimensions, or there are gradients of other
            pairs than theirs.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> vectors = jnp.array([[[1.0, 0.0], [2.0, 3.0]]])
        >>> kernels.pair_gradients(vectors, jnp.array([[10.0]])).tolist()
        [[[20.0, 30.0], [10.0, 0.0]]]
    """
    # XLA's own derivative scatters the gradients of pairs into a triangle and multiplies it twice,
    # once transposed. Gathering them into the symmetric matrix takes one multiplication and no
    # scatter.
    batch, n, _ = check_vectors(vectors, gradient)
    padded = jnp.pad(gradient, ((0, 0), (0, 1)))
    symmetric = jnp.take(padded, _pairs_of_positions(n), axis=1, mode="clip").reshape(batch, n, n)
    return jnp.einsum("bij,bjd->bid", symmetric, vectors)


def check_vectors(vectors: Array, gradient: Array | None = None) -> tuple[int, int, int]:
    """Return the number of samples, of vectors of each, and of columns.

    Args:
        vectors: ``[batch, n, dim]``.
        gradient: The gradients of their products, ``[batch, n * (n - 1) / 2]``, if there are any.

    Raises:
        ValueError: An array has another shape.
    """
    if vectors.ndim != 3:
        raise ValueError(
            f"the vectors whose pairs are multiplied are [batch, n, dim]; got {vectors.shape}"
        )
    batch, n, dim = vectors.shape
    pairs = n * (n - 1) // 2
    if gradient is not None and gradient.shape != (batch, pairs):
        raise ValueError(
            f"{batch} samples of {n} vectors have gradients of their pairs [{batch}, {pairs}]; "
            f"got {gradient.shape}"
        )
    return batch, n, dim


@functools.cache
def _positions_of_pairs(n: int) -> Int[np.ndarray, " pairs"]:
    """Return the position of each pair in the flattened ``[n, n]`` matrix."""
    first, second = np.triu_indices(n, 1)
    return (first * n + second).astype(np.int32)


@functools.cache
def _pairs_of_positions(n: int) -> Int[np.ndarray, " positions"]:
    """Return the pair at each position of the flattened matrix; the number of pairs where none."""
    pairs = np.full((n, n), n * (n - 1) // 2, np.int32)
    first, second = np.triu_indices(n, 1)
    pairs[first, second] = pairs[second, first] = np.arange(first.size)
    return pairs.reshape(-1)


def _sum_features(bag_lengths: Int32[Array, " bags"], layout: BagLayout) -> Int32[Array, " f"]:
    """Return the sum of each feature's lengths.

    A sum by segment would be a scatter, in which the threads of a GPU add to a few numbers in turn.
    """
    if len(set(layout.strides)) == 1:
        return jnp.sum(bag_lengths.reshape(layout.num_features, -1), axis=1, dtype=jnp.int32)
    # The sum up to a feature's end, less the sum up to its start. Both may wrap around.
    sums = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(bag_lengths, dtype=jnp.int32)])
    ends = sums[np.cumsum(layout.strides)]
    return jnp.diff(ends, prepend=0)


def _repeat(counts: RowIndices, size: int) -> Callable[[Array], Array]:
    """Return a function that repeats each of ``n`` values as often as counted, ``size`` in all.

    It is `jax.numpy.repeat` without its comparisons of positions, which are in bounds.
    """
    starts = jnp.cumsum(counts) - counts
    starting = jnp.zeros(size, jnp.int32).at[starts].add(1, mode="drop")
    value = jnp.cumsum(starting) - 1
    return lambda values: values.at[value].get(
        mode="promise_in_bounds", wrap_negative_indices=False
    )


def _insert(array: Array | np.ndarray, positions: np.ndarray, values: Any) -> Array:
    """Insert ``values`` before ``positions`` (static) of ``array``, as `numpy.insert` does."""
    # jnp.insert computes the order on the device, and XLA takes seconds to fold it.
    order = np.insert(np.arange(len(array)), positions, len(array) + np.arange(len(positions)))
    array = jnp.asarray(array)
    values = jnp.broadcast_to(jnp.asarray(values, array.dtype), positions.shape)
    return jnp.concatenate([array, values])[order]


def _output_rows(layout: BagLayout) -> np.ndarray:
    """Return the output row of each bag, bags in feature order."""
    rows = np.arange(layout.num_bags)
    if layout.is_interleaved:
        return rows.reshape(-1, layout.num_features).T.ravel()
    return rows
