"""A batch's bags as a flat list of lookups, in Mosaic."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrec.embed.kernels import reference
from jaxrec.embed.kernels.base import BAD_ROW, BagLayout, Ids, Lengths, Lookups, Weights
from jaxrec.embed.kernels.mosaic.extents import Blocks, bag_extents
from jaxrec.embed.kernels.mosaic.indexing import load, store
from jaxrec.embed.kernels.mosaic.lanes import FLAT
from jaxrec.embed.kernels.segments import bag_rows, scale_dtype
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
    # One position a thread, which searches its bag among the ends of the feature's bags. One
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
    dtype, scales = scale_dtype(weights, layout), None
    if dtype is not None:
        # Kernels have numbers of up to 32 bits.
        is_wide = jnp.dtype(dtype).itemsize > 4
        scales = jax.ShapeDtypeStruct(integers.shape, jnp.float32 if is_wide else dtype)
    extents = bag_extents(lengths, layout, interpret=interpret)
    kernel = functools.partial(_flatten, layout=layout, num_rows=num_rows)
    inputs = ids, narrowed(weights), *extents, numbers
    outputs = integers, integers, scales
    rows, bags, found = blocks.launch(kernel, inputs, outputs, interpret=interpret)
    return Lookups(rows, bags, None if scales is None else found.astype(dtype))


def narrowed(weights: Weights) -> Weights:
    """Return weights of 64 bits as float32, and others as they are."""
    if weights is None or weights.dtype.itemsize <= 4:
        return weights
    return weights.astype(jnp.float32)


def _flatten(*refs: Any, blocks: Blocks, layout: BagLayout, num_rows: int) -> None:
    """Write the lookups of one block of a feature's positions."""
    ids, weights, starts, ends, numbers, out_rows, out_bags, out_scales = refs
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
        end = load(ends, bag_start + further - 1, is_bag, FLAT)
        before = jnp.where(is_bag & (end <= position), further, before)
    is_used = is_inside & (before < stride)
    bag = bag_start + before

    row = load(ids, position, is_used, FLAT)
    row = jnp.where((row >= 0) & (row < count), row + offset, BAD_ROW)
    target = segment + place
    store(out_rows, target, is_inside, FLAT, jnp.where(is_used, row, num_rows))
    bags = jnp.where(is_used, bag_rows(bag, feature, layout), 0)
    store(out_bags, target, is_inside, FLAT, bags)
    if out_scales is None:
        return
    scale = FLAT.cast(jnp.ones(place.shape, jnp.float32))
    if weights is not None:
        scale = load(weights, position, is_inside, FLAT).astype(jnp.float32)
    if any(layout.means):
        length = load(ends, bag, is_used, FLAT) - load(starts, bag, is_used, FLAT)
        length = jnp.where(is_used & (is_mean > 0), length, 1)
        scale *= 1.0 / length.astype(jnp.float32)
    store(out_scales, target, is_inside, FLAT, scale)
