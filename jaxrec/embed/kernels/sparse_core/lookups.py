"""Pooled and plain lookups of rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed.kernels import reference
from jaxrec.embed.kernels.base import BagLayout, BagRows, Ids, Lengths, RowIndices, Table, Weights
from jaxrec.embed.kernels.segments import bag_rows, segment_of
from jaxrec.embed.kernels.sparse_core.subcores import (
    IGNORED,
    LANES,
    Subcores,
    block_size,
    each_row,
    each_vector,
    entries,
    list_buffer,
    rows_buffer,
)
from jaxrec.embed.kernels.sparse_core.sums import SegmentTerms


def row_lookup(table: Table, rows: RowIndices, *, interpret: bool = False) -> Float[Array, "n dim"]:
    """Return the rows; see `jaxrec.embed.kernels.reference`."""
    output = jax.ShapeDtypeStruct((rows.size, table.shape[1]), table.dtype)
    if rows.size == 0:
        return jnp.zeros(output.shape, output.dtype)
    subcores, size = Subcores.of(interpret=interpret), block_size(table.shape[1])
    kernel = functools.partial(_copy_rows, subcores=subcores, count=rows.size)
    padding = -rows.size % size
    inputs = jnp.pad(rows, (0, padding), constant_values=table.shape[0]), table
    scratch = *[list_buffer(size)] * 4, rows_buffer(size, table.shape[1])
    (out,), _ = subcores.launch(kernel, inputs, (output,), scratch=scratch)
    return out


def _copy_rows(
    inputs: Any, _: Any, outputs: Any, own: Any, *, subcores: Subcores, count: int
) -> None:
    rows, table = inputs
    numbers, indices, others, targets, values = own
    size, (num_rows, dim) = values.shape[0], table.shape

    def copy(block: Array) -> None:
        start = block * size
        pltpu.sync_copy(rows.at[pl.ds(start, size)], entries(numbers))

        def split(vector: Any) -> None:
            row = numbers[vector]
            is_row = (row >= 0) & (row < num_rows)
            indices[vector] = jnp.where(is_row, row, IGNORED)
            others[vector] = jnp.where(is_row, IGNORED, jnp.where(row == num_rows, 0, 1))
            target = start + vector.start + jax.lax.iota(jnp.int32, LANES)
            targets[vector] = jnp.where(target < count, target, IGNORED)

        def fill(i: Array, is_bad: Array) -> None:
            number = jnp.where(is_bad == 1, jnp.float32(jnp.nan), jnp.float32(0))
            values[pl.ds(i, 1), :] = jnp.full((1, dim), number)

        each_vector(numbers, split)
        subcores.read_rows(table, indices, values)
        each_row(others, fill)
        subcores.write_rows(values, outputs[0], targets)

    subcores.each_block(pl.cdiv(count, size), copy)


def pooled_lookup(
    table: Table,
    ids: Ids,
    lengths: Lengths,
    weights: Weights,
    layout: BagLayout,
    dtype: DTypeLike,
    *,
    interpret: bool = False,
) -> BagRows:
    """Return the sum or mean of each bag's rows; see `jaxrec.embed.kernels.reference`."""
    output = jax.ShapeDtypeStruct((layout.num_bags, table.shape[1]), dtype)
    if 0 in (layout.num_bags, layout.num_positions):
        return jnp.zeros(output.shape, dtype)
    num_rows = table.shape[0]
    lookups = reference.flatten_bags(ids, lengths, weights, layout, num_rows)
    assert lookups.bags is not None
    is_padding, is_bad = lookups.rows == num_rows, lookups.rows < 0
    # A bad row reads the first one instead, and its factor makes the sum NaN.
    scales = jnp.ones(lookups.rows.shape) if lookups.scales is None else lookups.scales
    scales = jnp.where(is_bad, jnp.nan, scales)
    indices = jnp.where(is_padding, IGNORED, jnp.where(is_bad, 0, lookups.rows))
    # Bags are numbered feature by feature here, as their ids lie. Padding counts to the last bag.
    feature = np.repeat(np.arange(layout.num_features), layout.capacities)
    bags = lookups.bags
    if layout.is_interleaved:
        sample = bags // layout.num_features
        bags = sample + (feature * layout.strides[0]).astype(np.int32)
    last = np.cumsum(layout.strides)[feature] - 1
    segments = jnp.where(is_padding, last.astype(np.int32), bags)
    numbers = jnp.arange(layout.num_bags, dtype=jnp.int32)
    targets = bag_rows(numbers, segment_of(numbers, layout.strides), layout)
    terms = SegmentTerms.of(table, indices, segments, scales, targets)
    subcores = Subcores.of(interpret=interpret)
    kernel = functools.partial(_pool, subcores=subcores)
    (out,), _ = subcores.launch(kernel, terms, (output,), scratch=terms.buffers)
    return out


def _pool(terms: SegmentTerms, _: Any, outputs: Any, own: Any, *, subcores: Subcores) -> None:
    def pool(block: Array) -> None:
        terms.sum_block(subcores, block, own)
        subcores.write_rows(own.sums, outputs[0], own.targets)

    subcores.each_block(terms.num_blocks, pool)
