"""Pooled and plain lookups of rows, in Triton."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed.kernels.base import BagLayout, BagRows, Ids, Lengths, RowIndices, Table, Weights
from jaxrec.embed.kernels.segments import bag_rows, segment_of
from jaxrec.embed.kernels.triton.extents import bag_extents
from jaxrec.embed.kernels.triton.readers import Reader, reader_of
from jaxrec.embed.kernels.triton.tile import ELEMENTS, Found, Tile, cdiv


def pooled_lookup(
    table: Table,
    ids: Ids,
    lengths: Lengths,
    weights: Weights,
    layout: BagLayout,
    dtype: DTypeLike,
    *,
    elements: int | None = None,
    warps: int | None = None,
    interpret: bool = False,
) -> BagRows:
    """Return the sum or mean of each bag's rows; see `jaxrec.embed.kernels.reference`."""
    output = jax.ShapeDtypeStruct((layout.num_bags, table.shape[1]), dtype)
    if 0 in (layout.num_bags, layout.num_positions):
        return jnp.zeros(output.shape, dtype)
    # The tile is static, so it follows from capacities: an upper bound on the mean length of bags.
    mean_length = layout.num_positions / layout.num_bags
    stored, reader = reader_of(table)
    tile = reader.tile(mean_length, elements, warps)
    features = jnp.array([layout.row_offsets, layout.row_counts, layout.means], jnp.int32)
    kernel = functools.partial(_pool, tile=tile, layout=layout, reader=reader)
    extents = bag_extents(lengths, layout, interpret=interpret)
    inputs = (ids, weights, *extents, features, stored)
    return tile.launch(kernel, inputs, output, layout.num_bags, interpret=interpret)


def row_lookup(
    table: Table,
    rows: RowIndices,
    *,
    elements: int = ELEMENTS,
    warps: int | None = None,
    interpret: bool = False,
) -> Float[Array, "n dim"]:
    """Return the rows; see `jaxrec.embed.kernels.reference`."""
    output = jax.ShapeDtypeStruct((rows.size, table.shape[1]), table.dtype)
    if rows.size == 0:
        return jnp.zeros(output.shape, table.dtype)
    stored, reader = reader_of(table)
    tile = Tile.of_copies(reader.width, max(elements // reader.planes, 1), warps)
    kernel = functools.partial(_copy_rows, tile=tile, reader=reader)
    return tile.launch(kernel, (rows, stored), output, rows.size, interpret=interpret)


def _pool(
    ids: Any,
    weights: Any,
    starts: Any,
    ends: Any,
    features: Any,
    table: Any,
    out: Any,
    *,
    tile: Tile,
    layout: BagLayout,
    reader: Reader,
) -> None:
    """Pool one bag per group."""
    # Bags are taken feature by feature, so that programs that run at once read one table: up to 6 %
    # faster on an H200 (docs/internals/gpu.md). They are written interleaved, as the output wants
    # them.
    bags = tile.group_ids()
    is_bag = bags < layout.num_bags
    start = pltriton.load(starts.at[bags], mask=is_bag, other=0)
    end = pltriton.load(ends.at[bags], mask=is_bag, other=0)
    feature = segment_of(bags, layout.strides)
    offset, count, is_mean = (
        pltriton.load(features.at[i, feature], mask=is_bag, other=0) for i in range(3)
    )

    def find(turn: Array | int) -> Found:
        positions = start[:, None] + tile.lanes(turn)
        is_used = positions < end[:, None]
        row = pltriton.load(ids.at[positions], mask=is_used, other=0)
        if weights is None:
            return (row, None), is_used
        weight = pltriton.load(weights.at[positions], mask=is_used, other=0)
        return (row, weight.astype(jnp.float32)), is_used

    def load(found: tuple[Array, Array | None], is_used: Array) -> tuple[Array, ...]:
        row, weight = found
        inside = (row >= 0) & (row < count[:, None])
        rows = row + offset[:, None]
        return reader.load(tile, table, rows, is_used & inside, is_used & ~inside, weight)

    # The longest bag of the tile decides; others load nothing in their last turns.
    turns = cdiv(jnp.max(end - start), tile.depth)
    pooled = reader.finish(tile.sum_turns(turns, find, load, reader.zeros(tile)))
    divisor = jnp.where(is_mean > 0, jnp.maximum(end - start, 1), 1).astype(jnp.float32)
    # Masked places must be out of range as well: the interpreter writes back to them what it read.
    rows = jnp.where(is_bag, bag_rows(bags, feature, layout), layout.num_bags)
    tile.store_rows(out, rows, is_bag, pooled / divisor[:, None])


def _copy_rows(rows: Any, table: Any, out: Any, *, tile: Tile, reader: Reader) -> None:
    """Copy one row per group."""
    positions = tile.group_ids()
    is_used = positions < rows.shape[0]
    row = pltriton.load(rows.at[positions], mask=is_used, other=0)
    inside = (row >= 0) & (row < table.shape[0])
    is_bad = is_used & ~inside & (row != table.shape[0])
    values = reader.load(tile, table, row, is_used & inside, is_bad, None)
    tile.store_rows(out, positions, is_used, reader.finish(values))
