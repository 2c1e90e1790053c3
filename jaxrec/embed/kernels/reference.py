"""The primitives, defined and computed in XLA.

This implementation runs on every device and takes every type. Tests and trials compare the other
implementations with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int, Int32, Shaped

from jaxrec.embed.formats import gather_rows
from jaxrec.embed.kernels.base import (
    BAD_ROW,
    BagLayout,
    BagRows,
    Buckets,
    DroppingFeature,
    Ids,
    KeptIds,
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
    """Return None: the reference takes every call."""
    return None


def new_rows(row: Shaped[Array, "*shape"], num_rows: int) -> Shaped[Array, "num_rows *shape"]:
    """Return a new array of equal rows, in memory that suits random reads (huge pages on CPUs)."""
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
    """Return the sum or mean of each bag's rows, ``[bags, dim]`` in the order of `bag_rows`.

    A bag with an id outside its table is NaN. Packed rows are unpacked as they are read.
    """
    num_rows = table.shape[0]
    lookups = flatten_bags(ids, lengths, weights, layout, num_rows)

    def load(terms: tuple[Array, Array | None]) -> Array:
        row, scale = terms
        values = row_lookup(table, row).astype(jnp.float32)
        return values if scale is None else values * scale[:, None].astype(jnp.float32)

    assert lookups.bags is not None
    # Padding gets a bag past the end, which the sum leaves out. A zero row would not do: weights at
    # padding may be NaN, and NaN times zero is NaN.
    bags = jnp.where(lookups.rows == num_rows, layout.num_bags, lookups.bags)
    terms = (lookups.rows, lookups.scales)
    return sum_stretches(load, terms, bags, layout.num_bags, table.shape[1]).astype(dtype)


def max_lookup(
    table: Table,
    ids: Ids,
    lengths: Lengths,
    layout: BagLayout,
    dtype: DTypeLike,
    has_winners: bool = True,
    *,
    parts_in: int = 1,
) -> tuple[BagRows, Int32[Array, "_bags dim"]]:
    """Return the largest element of each column over each bag's rows, and the lookup that has it.

    Both are ``[bags, dim]`` in the order of `bag_rows`; without ``has_winners`` the second has no
    rows. The first of equal elements counts, and a NaN, any of several, is larger than any number.
    An empty bag is zeros, and a bag with an id outside its table is NaN. Neither has winners (-1),
    nor has a column in which no element is above -infinity.
    """
    num_rows, num_bags, dim = table.shape[0], layout.num_bags, table.shape[1]
    lookups = flatten_bags(ids, lengths, None, layout, num_rows)
    assert lookups.bags is not None
    bags = jnp.where(lookups.rows == num_rows, num_bags, lookups.bags)
    rows = row_lookup(table, lookups.rows).astype(jnp.float32)
    largest = jax.ops.segment_max(rows, bags, num_bags)
    counts = jax.ops.segment_sum(jnp.ones(bags.shape, jnp.int32), bags, num_bags)
    is_empty = (counts == 0)[:, None]
    values = jnp.where(is_empty, 0, largest).astype(dtype)
    if not has_winners:
        return values, jnp.zeros((0, dim), jnp.int32)
    # Padding compares itself with the last bag, whose winners it does not become.
    of_bag = largest.at[bags].get(mode="clip")
    wins = (rows == of_bag) | (jnp.isnan(rows) & jnp.isnan(of_bag))
    positions = jnp.arange(bags.size, dtype=jnp.int32)[:, None]
    first = jnp.where(wins, positions, bags.size)
    winners = jax.ops.segment_min(first, bags, num_bags)
    has_bad_row = jax.ops.segment_max((lookups.rows == BAD_ROW).astype(jnp.int32), bags, num_bags)
    is_none = is_empty | (has_bad_row > 0)[:, None] | (largest == -jnp.inf)
    return values, jnp.where(is_none, -1, winners).astype(jnp.int32)


def max_gradients(
    winners: Int32[Array, "bags dim"],
    gradients: BagRows,
    bags: Int32[Array, " lookups"],
) -> Float[Array, "lookups dim"]:
    """Return the gradient of each lookup's row, given those of bags whose largest elements it has.

    ``winners`` is from `max_lookup`; ``bags`` has the bag of each lookup.
    """
    if not winners.shape[0]:
        return jnp.zeros((bags.size, winners.shape[1]), jnp.float32)
    positions = jnp.arange(bags.size, dtype=jnp.int32)[:, None]
    return jnp.where(winners[bags] == positions, gradients[bags].astype(jnp.float32), 0)


def drop_ids(ids: Ids, lengths: Lengths, features: tuple[DroppingFeature, ...]) -> KeptIds:
    """Drop an id from the bags of some features; the ids of a feature that stay keep their order.

    ``features`` are in the order of the batch. Other features stay as they are.
    """
    if not ids.size:
        return KeptIds(ids, lengths, jnp.zeros(0, jnp.int32))
    capacities = [each.capacity for each in features]
    strides = [each.stride for each in features]
    id_starts = np.array([each.id_start for each in features], np.int32)
    feature = np.repeat(np.arange(len(features)), capacities)
    dropped = np.array([each.dropped for each in features], np.int32)[feature]
    # The features' segments, end to end.
    segments = take_segments(ids, id_starts.tolist(), capacities)
    of_bags = take_segments(lengths, [each.length_start for each in features], strides)
    bag_starts = np.repeat(np.cumsum([0, *strides])[:-1], strides)  # of the bag's feature
    ends = jnp.cumsum(of_bags, dtype=jnp.int32)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    capacity = np.repeat(np.array(capacities, np.int32), strides)
    first = np.repeat(np.cumsum([0, *capacities])[:-1].astype(np.int32), strides)
    # Ends of bags within their feature, then among the joined segments.
    stops = jnp.minimum(ends - before[bag_starts], capacity) + first
    starts = jnp.minimum(before[:-1] - before[bag_starts], capacity) + first
    positions = jnp.arange(segments.size, dtype=jnp.int32)
    in_bags = jnp.zeros(segments.size + 1, jnp.int32).at[starts].add(1).at[stops].add(-1)
    is_kept = (jnp.cumsum(in_bags)[:-1] > 0) & (segments != dropped)
    kept_before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(is_kept, dtype=jnp.int32)])
    new_lengths = kept_before[stops] - kept_before[starts]
    firsts = np.cumsum([0, *capacities])[:-1].astype(np.int32)[feature]
    place = id_starts[feature] + kept_before[:-1] - kept_before[firsts]
    targets = jnp.where(is_kept, place, ids.size)
    own = jnp.arange(ids.size, dtype=jnp.int32)
    sources = own.at[targets].set(id_starts[feature] - firsts + positions, mode="drop")
    places = [
        np.arange(each.id_start, each.id_start + each.capacity, dtype=np.int32) for each in features
    ]
    filled = ids.at[np.concatenate(places)].set(dropped)
    new_ids = filled.at[targets].set(segments, mode="drop")
    bags = [
        np.arange(each.length_start, each.length_start + each.stride, dtype=np.int32)
        for each in features
    ]
    return KeptIds(new_ids, lengths.at[np.concatenate(bags)].set(new_lengths), sources)


def flatten_bags(
    ids: Ids, lengths: Lengths, weights: Weights, layout: BagLayout, num_rows: int
) -> Lookups:
    """Return a batch as flat lookups, one for each position of the features' segments."""
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
    # As unsigned numbers, negative ids are past the end too. A second comparison, with zero, would
    # make XLA keep the zeros of `_repeat` in memory on GPUs.
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
    """Return ``table[rows]``, ``[n, dim]``: zeros at padding, NaN at a bad row."""
    # JAX counts negative indices from the end, so bad rows become one past padding.
    beyond = jnp.where(rows < 0, table.shape[0] + 1, rows)
    values = gather_rows(table, beyond, mode="fill", fill_value=jnp.nan)
    return jnp.where((rows == table.shape[0])[:, None], jnp.zeros((), table.dtype), values)


def bucket(owners: Int32[Array, " n"], num_owners: int) -> Buckets:
    """Group lookups by owner, stably; a number outside ``[0, num_owners)`` means no owner."""
    owners = jnp.where((owners < 0) | (owners > num_owners), num_owners, owners)
    counts = jnp.zeros(num_owners, jnp.int32).at[owners].add(1, mode="drop")
    return Buckets(jnp.argsort(owners, stable=True).astype(jnp.int32), counts)


def shift_rows(
    rows: RowIndices, starts: tuple[int, ...], shifts: tuple[int, ...], num_rows: int, outside: int
) -> RowIndices:
    """Add ``shifts[i]`` to rows in ``[starts[i], starts[i + 1])``, the last up to ``num_rows``.

    Any other number becomes ``outside``. ``starts`` ascend from 0.
    """
    # A binary search, unrolled: as a loop it would take three launches a turn on GPUs.
    stretch = jnp.searchsorted(
        np.asarray(starts, np.int32), rows, side="right", method="scan_unrolled"
    )
    stretch -= 1
    shift = jnp.asarray(shifts, jnp.int32)[jnp.maximum(stretch, 0)]
    is_row = (rows >= 0) & (rows < num_rows)
    return jnp.where(is_row, rows + shift, outside).astype(jnp.int32)


def pair_products(vectors: Float[Array, "batch n dim"]) -> Float[Array, "batch pairs"]:
    """Return the dot products of a sample's pairs of vectors: (0, 1), (0, 2), ..., (1, 2), ..."""
    # The whole matrix of products costs twice the arithmetic, in one matrix multiplication.
    batch, n, _ = check_vectors(vectors)
    gram = jnp.einsum("bid,bjd->bij", vectors, vectors).reshape(batch, n * n)
    return jnp.take(gram, _positions_of_pairs(n), axis=1, mode="clip")


def pair_gradients(
    vectors: Float[Array, "batch n dim"], gradient: Float[Array, "batch pairs"]
) -> Float[Array, "batch n dim"]:
    """Return the gradients of the vectors, given those of their `pair_products`.

    A vector's gradient is the sum of the sample's other vectors, each times the gradient of its
    product with this one.
    """
    # XLA's own derivative scatters the gradients of pairs into a triangle and multiplies it twice,
    # once transposed. Gathering them into the symmetric matrix takes one multiplication and no
    # scatter.
    batch, n, _ = check_vectors(vectors, gradient)
    padded = jnp.pad(gradient, ((0, 0), (0, 1)))
    symmetric = jnp.take(padded, _pairs_of_positions(n), axis=1, mode="clip").reshape(batch, n, n)
    return jnp.einsum("bij,bjd->bid", symmetric, vectors)


def attention(
    query: Float[Array, "queries heads dim"],
    key: Float[Array, "keys heads dim"],
    value: Float[Array, "keys heads value_dim"],
    ranges: Int32[Array, "ends queries"],
    offsets: Int32[Array, "2 starts"],
    bias: Float[Array, "distances heads"],
    alpha: float,
    scale: float = 1.0,
) -> Float[Array, "queries heads value_dim"]:
    """Return ``scale * SiLU(alpha q k^T + bias) v``, summed over the keys that each query sees.

    Args:
        query: Queries of all rows, one after the other.
        key: Keys.
        value: Values.
        ranges: The first and the last key that each query sees, and the query's own position among
            the keys. With groups of targets, a fourth line has the first key of the query's group:
            it also sees the keys from there to its own position. No query sees keys of another row.
        offsets: The first query of each row, and the first key of each row.
        bias: Bias by the distance from key to query, the last one for larger distances. Without
            any distance: no bias.
        alpha: Factor of the products.
        scale: Factor of the sums.
    """
    # Memory is quadratic: this defines the primitive. `jaxrec.nn.hstu_attention` computes it tile
    # by tile where no other implementation does.
    first, last, own, *group = ranges[:, :, None]
    place = jnp.arange(key.shape[0], dtype=jnp.int32)[None]
    is_seen = (first <= place) & (place <= last)
    for start in group:
        is_seen = is_seen | ((start <= place) & (place <= own))
    wide = jnp.promote_types(query.dtype, jnp.float32)
    products = jnp.einsum("ahd,bhd->hab", query.astype(wide), key.astype(wide))
    scores = alpha * products
    if bias.shape[0]:
        distance = jnp.clip(own - place, 0, bias.shape[0] - 1)
        scores = scores + jnp.moveaxis(bias[distance], -1, 0)
    weights = jnp.where(is_seen[None], jax.nn.silu(scores), 0)
    out = jnp.einsum("hab,bhe->ahe", weights, value.astype(wide))
    return (scale * out).astype(value.dtype)


def attention_gradients(
    query: Float[Array, "queries heads dim"],
    key: Float[Array, "keys heads dim"],
    value: Float[Array, "keys heads value_dim"],
    ranges: Int32[Array, "ends queries"],
    offsets: Int32[Array, "2 starts"],
    bias: Float[Array, "distances heads"],
    gradient: Float[Array, "queries heads value_dim"],
    alpha: float,
    scale: float = 1.0,
) -> tuple[Array, Array, Array, Array]:
    """Return the gradients of query, key, value and bias, given that of `attention`."""

    def forward(query: Array, key: Array, value: Array, bias: Array) -> Array:
        return attention(query, key, value, ranges, offsets, bias, alpha, scale)

    return jax.vjp(forward, query, key, value, bias)[1](gradient)


def check_vectors(vectors: Array, gradient: Array | None = None) -> tuple[int, int, int]:
    """Check shapes of vectors and of their pairs' gradients; return ``(batch, n, dim)``."""
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
    """Return each pair's position in the flattened ``[n, n]`` matrix."""
    first, second = np.triu_indices(n, 1)
    return (first * n + second).astype(np.int32)


@functools.cache
def _pairs_of_positions(n: int) -> Int[np.ndarray, " positions"]:
    """Return the pair at each position of the flattened ``[n, n]`` matrix.

    It is the number of pairs on the diagonal, where no pair is.
    """
    pairs = np.full((n, n), n * (n - 1) // 2, np.int32)
    first, second = np.triu_indices(n, 1)
    pairs[first, second] = pairs[second, first] = np.arange(first.size)
    return pairs.reshape(-1)


def _sum_features(bag_lengths: Int32[Array, " bags"], layout: BagLayout) -> Int32[Array, " f"]:
    """Return each feature's number of ids, the sum of its bags' lengths."""
    # `jax.ops.segment_sum` would be a scatter, in which all threads of a GPU add to a few numbers,
    # one after the other.
    if len(set(layout.strides)) == 1:
        return jnp.sum(bag_lengths.reshape(layout.num_features, -1), axis=1, dtype=jnp.int32)
    # The sum up to a feature's end, less the sum up to its start. Both may wrap around int32, and
    # the difference is right all the same.
    sums = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(bag_lengths, dtype=jnp.int32)])
    ends = sums[np.cumsum(layout.strides)]
    return jnp.diff(ends, prepend=0)


def _repeat(counts: RowIndices, size: int) -> Callable[[Array], Array]:
    """Return a function that repeats value ``i`` ``counts[i]`` times, to ``size`` in all."""
    # `jax.numpy.repeat` without its checks of positions, which are in bounds here. Several arrays
    # are repeated by one set of counts, so the positions are computed once.
    starts = jnp.cumsum(counts) - counts
    starting = jnp.zeros(size, jnp.int32).at[starts].add(1, mode="drop")
    value = jnp.cumsum(starting) - 1
    return lambda values: values.at[value].get(
        mode="promise_in_bounds", wrap_negative_indices=False
    )


def _insert(array: Array | np.ndarray, positions: np.ndarray, values: Any) -> Array:
    """Insert ``values`` before ``positions`` (static) of ``array``, as `numpy.insert` does."""
    # `jnp.insert` computes the order on the device, and XLA takes seconds to fold it to a constant.
    order = np.insert(np.arange(len(array)), positions, len(array) + np.arange(len(positions)))
    array = jnp.asarray(array)
    values = jnp.broadcast_to(jnp.asarray(values, array.dtype), positions.shape)
    return jnp.concatenate([array, values])[order]


def _output_rows(layout: BagLayout) -> np.ndarray:
    """Return the row of the output that each bag has, for bags feature after feature."""
    rows = np.arange(layout.num_bags)
    if layout.is_interleaved:
        return rows.reshape(-1, layout.num_features).T.ravel()
    return rows
