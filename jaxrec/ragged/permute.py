"""Permutations of the segments of ragged data, known at run time."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32, Shaped

from jaxrec.ragged.arrays import AnyArray, take
from jaxrec.ragged.offsets import offsets_range, segment_ids
from jaxrec.ragged.select import jagged_index_select


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
        input_offsets: ``[segments + 1]``, ascending from 0.
        output_offsets: ``[selected + 1]``, ascending from 0: of the permuted segments.
        capacity: Length of the result, at least ``output_offsets[-1]``.

    Returns:
        ``[capacity]`` int32: the element of the input at each place of the output; at padding
        ``input_offsets[-1]``, the number of elements.
    """
    starts = jnp.asarray(input_offsets).astype(jnp.int32)
    source = take(take(starts, jnp.asarray(permute)), segment_ids(output_offsets, capacity))
    source = source + offsets_range(output_offsets, capacity)
    return jnp.where(jnp.arange(capacity) < output_offsets[-1], source, starts[-1])


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
        Lengths, values and weights (or None) in the new order, with zeros as padding.

    Raises:
        IndexError, TypeError, ValueError: As `jagged_index_select`.
    """
    totals = lengths.reshape(lengths.shape[0], -1).sum(axis=1)
    out_values, _ = jagged_index_select(values, totals, permute, capacity)
    out_weights = None
    if weights is not None:
        out_weights, _ = jagged_index_select(weights, totals, permute, capacity)
    return take(jnp.asarray(lengths), jnp.asarray(permute)), out_values, out_weights
