"""A batch's bags as a flat list of lookups, in Triton."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from jaxrec.embed.kernels import reference
from jaxrec.embed.kernels.base import BAD_ROW, BagLayout, Ids, Lengths, Lookups, Weights
from jaxrec.embed.kernels.segments import bag_rows, scale_dtype
from jaxrec.embed.kernels.triton.extents import Blocks, bag_extents
from jaxrec.ragged.key_segments import starts_of


def flatten_bags(
    ids: Ids,
    lengths: Lengths,
    weights: Weights,
    layout: BagLayout,
    num_rows: int,
    *,
    interpret: bool = False,
) -> Lookups:
    """Return a batch as flat lookups; see `jaxrec.embed.kernels.reference`."""
    # One lane for each position, which searches its bag among the ends of the feature's bags. One
    # program for each bag would wait for the longest bag.
    if 0 in (layout.num_bags, layout.num_positions):
        return reference.flatten_bags(ids, lengths, weights, layout, num_rows)
    blocks = Blocks(layout.capacities)
    numbers = blocks.numbers(
        layout.id_starts,
        layout.strides,
        starts_of(layout.strides),
        layout.row_offsets,
        layout.row_counts,
        layout.means,
    )
    integers = jax.ShapeDtypeStruct((layout.num_positions,), jnp.int32)
    dtype = scale_dtype(weights, layout)
    scales = None if dtype is None else jax.ShapeDtypeStruct(integers.shape, dtype)
    extents = bag_extents(lengths, layout, interpret=interpret)
    kernel = functools.partial(_flatten, layout=layout, num_rows=num_rows)
    inputs, outputs = (ids, weights, *extents, numbers), (integers, integers, scales)
    return Lookups(*blocks.launch(kernel, inputs, outputs, interpret=interpret))


def _flatten(
    ids: Any,
    weights: Any,
    starts: Any,
    ends: Any,
    numbers: Any,
    out_rows: Any,
    out_bags: Any,
    out_scales: Any,
    *,
    blocks: Blocks,
    layout: BagLayout,
    num_rows: int,
) -> None:
    """Write the lookups of one block of a feature's positions."""
    feature, first, capacity, segment, id_start, stride, bag_start, offset, count, is_mean = (
        blocks.here(numbers)
    )
    place = blocks.places(first)
    position, is_inside = id_start + place, place < capacity
    # A binary search: the bags before a position's own are those that end at it or before.
    before = jnp.zeros_like(place)
    for bits in reversed(range(max(layout.strides).bit_length())):
        further = before + (1 << bits)
        is_bag = further <= stride
        end = pltriton.load(ends.at[bag_start + further - 1], mask=is_bag, other=0)
        before = jnp.where(is_bag & (end <= position), further, before)
    is_used = is_inside & (before < stride)
    bag = bag_start + before

    row = pltriton.load(ids.at[position], mask=is_used, other=0)
    row = jnp.where((row >= 0) & (row < count), row + offset, BAD_ROW)
    target = jnp.where(is_inside, segment + place, layout.num_positions)
    rows = jnp.where(is_used, row, num_rows)
    pltriton.store(out_rows.at[target], rows, mask=is_inside)
    bags = jnp.where(is_used, bag_rows(bag, feature, layout), 0)
    pltriton.store(out_bags.at[target], bags, mask=is_inside)
    if out_scales is None:
        return
    scale = jnp.ones(place.shape, out_scales.dtype)
    if weights is not None:
        scale = pltriton.load(weights.at[position], mask=is_inside, other=0).astype(scale.dtype)
    if any(layout.means):
        extent = (pltriton.load(each.at[bag], mask=is_used, other=0) for each in (ends, starts))
        length = jnp.where(is_used & (is_mean > 0), operator.sub(*extent), 1)
        scale *= (1.0 / length.astype(jnp.float32)).astype(scale.dtype)
    pltriton.store(out_scales.at[target], scale, mask=is_inside)
