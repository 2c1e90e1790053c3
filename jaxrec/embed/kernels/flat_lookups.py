"""A batch's bags as a flat list of lookups, computed in XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxrec.embed.kernels.base import BAD_ROW, BagLayout, Lookups
from jaxrec.ragged.key_segments import take_segments


def flatten_bags(
    ids: Int32[Array, " ids"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " ids"] | None,
    layout: BagLayout,
    num_rows: int,
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


def _repeat(counts: Int32[Array, " n"], size: int) -> Callable[[Array], Array]:
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
