"""A batch's bags as a flat list of lookups, computed in XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxrec.embed.kernels.base import BAD_ROW, BagLayout, Lookups


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
    positions = _segments(ids, layout.id_starts, layout.capacities)
    bag_lengths = _segments(lengths, layout.length_starts, layout.strides)

    # Padding is one more bag at the end of each feature, so that bags tile the positions exactly.
    num_ids = jax.ops.segment_sum(
        bag_lengths, np.repeat(np.arange(layout.num_features), layout.strides), layout.num_features
    )
    padding = jnp.asarray(layout.capacities, jnp.int32) - num_ids
    bag_ends = np.cumsum(layout.strides)
    extents = _insert(bag_lengths, bag_ends, padding)
    extent = jnp.repeat(jnp.arange(extents.size), extents, total_repeat_length=layout.num_positions)
    is_padding = _insert(np.zeros(layout.num_bags, bool), bag_ends, True)[extent]
    bags = _insert(_output_rows(layout), bag_ends, 0)[extent]

    feature = np.repeat(np.arange(layout.num_features), layout.capacities)
    row_counts = np.asarray(layout.row_counts, np.int32)[feature]
    row_offsets = np.asarray(layout.row_offsets, np.int32)[feature]
    outside = (positions < 0) | (positions >= row_counts)
    rows = jnp.where(outside, BAD_ROW, positions + row_offsets)
    rows = jnp.where(is_padding, num_rows, rows)

    scales = None if weights is None else _segments(weights, layout.id_starts, layout.capacities)
    if any(layout.means):
        is_mean = np.repeat(np.asarray(layout.means), layout.strides)
        divisors = jnp.where(is_mean, jnp.maximum(bag_lengths, 1), 1)
        shares = 1.0 / _insert(divisors, bag_ends, 1)[extent].astype(jnp.float32)
        scales = shares if scales is None else scales * shares
    return Lookups(rows, bags.astype(jnp.int32), scales)


def _segments(array: Array, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Array:
    """Concatenate segments of ``array``, without a copy where they already lie end to end."""
    pieces, begin = [], 0
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    for i, end in enumerate(ends):
        if i + 1 == len(ends) or starts[i + 1] != end:
            pieces.append(array[starts[begin] : end])
            begin = i + 1
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


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
