"""Pooled and plain lookups of rows, in Mosaic."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int32, UInt32

from jaxrec.embed.kernels.base import BagLayout, BagRows, Ids, Lengths, RowIndices, Table, Weights
from jaxrec.embed.kernels.mosaic.extents import bag_extents
from jaxrec.embed.kernels.mosaic.flat_lookups import narrowed
from jaxrec.embed.kernels.mosaic.indexing import load, store
from jaxrec.embed.kernels.mosaic.readers import Reader, stored_rows
from jaxrec.embed.kernels.mosaic.tile import Terms, Tile
from jaxrec.embed.kernels.segments import bag_rows, segment_of

# Bags of more rows on average are long: a batch may have few of them, so a program has several
# rows of each on their way at once.
MIDDLING = 32
DEPTH = 8  # of long bags
# Vectors that a thread loads at once of rows that are copied.
COPIES = 4


def pooled_lookup(
    table: Table,
    ids: Ids,
    lengths: Lengths,
    weights: Weights,
    layout: BagLayout,
    dtype: DTypeLike,
    *,
    loads: int | None = None,
    depth: int | None = None,
    interpret: bool = False,
) -> BagRows:
    """Return the sum or mean of each bag's rows; see `jaxrec.embed.kernels.reference`."""
    output = jax.ShapeDtypeStruct((layout.num_bags, table.shape[1]), dtype)
    if 0 in (layout.num_bags, layout.num_positions):
        return jnp.zeros(output.shape, dtype)
    # The tile is static, so it follows from capacities: an upper bound on the mean length of bags.
    mean_length = layout.num_positions / layout.num_bags
    reader = Reader.of(table)
    assert reader is not None  # or `refuse` has an objection
    if depth is None and mean_length > MIDDLING:
        depth = max(DEPTH // reader.lanes.steps, 1)
    tile = Tile.of(reader.lanes, loads, depth)
    features = jnp.array([*layout.row_offsets, *layout.row_counts, *layout.means], jnp.int32)
    kernel = functools.partial(_pool, tile=tile, layout=layout, reader=reader)
    extents = bag_extents(lengths, layout, interpret=interpret)
    inputs = ids, narrowed(weights), *extents, features, stored_rows(table)
    return tile.launch(kernel, inputs, (output,), layout.num_bags, interpret=interpret)[0]


def row_lookup(
    table: Table, rows: RowIndices, *, loads: int | None = None, interpret: bool = False
) -> Float[Array, "n dim"]:
    """Return the rows; see `jaxrec.embed.kernels.reference`."""
    output = jax.ShapeDtypeStruct((rows.size, table.shape[1]), table.dtype)
    if rows.size == 0:
        return jnp.zeros(output.shape, table.dtype)
    reader = Reader.of(table)
    assert reader is not None  # or `refuse` has an objection
    tile = Tile.of(reader.lanes, max((loads or COPIES) // reader.planes, 1))
    kernel = functools.partial(_copy_rows, tile=tile, reader=reader)
    inputs = rows, stored_rows(table)
    return tile.launch(kernel, inputs, (output,), rows.size, interpret=interpret)[0]


def _pool(*refs: Any, tile: Tile, layout: BagLayout, reader: Reader) -> None:
    """Pool one bag per group."""
    ids, weights, starts, ends, features, table, out = refs
    # Bags are taken feature by feature, so that programs that run at once read one table: up to 6 %
    # faster on an H200 by Triton (docs/internals/gpu.md). They are written interleaved, as the
    # output wants them.
    lanes, bags = tile.lanes, tile.group_ids()
    is_bag = bags < layout.num_bags
    start, end = (load(each, bags, is_bag, lanes) for each in (starts, ends))
    feature = segment_of(bags, layout.strides)
    offset, count, is_mean = (
        load(features, feature + i * layout.num_features, is_bag, lanes) for i in range(3)
    )

    def find(position: Array) -> tuple[Array, Array | None]:
        place = start + position
        row = load(ids, place, place < end, lanes)
        return row, None if weights is None else load(weights, place, place < end, lanes)

    def add(position: Array, found: tuple[Array, Array | None]) -> Terms:
        row, weight = found
        weight = None if weight is None else weight.astype(jnp.float32)
        # As unsigned numbers, negative ids are past the end too.
        is_used, unsigned, bound = start + position < end, _unsigned(row), _unsigned(count)
        is_row, is_bad = is_used & (unsigned < bound), is_used & (unsigned >= bound)
        return reader.load(table, row + offset, is_row, is_bad, weight)

    pooled = reader.finish(tile.sum_rows(end - start, find, add, reader.zeros(tile.groups)))
    divisor = jnp.where(is_mean > 0, jnp.maximum(end - start, 1), 1).astype(jnp.float32)
    divisor = lanes.spread(divisor)
    rows = bag_rows(bags, feature, layout)
    store(out, rows, is_bag, tile.output_lanes, *(plane / divisor for plane in pooled))


def _copy_rows(rows: Any, table: Any, out: Any, *, tile: Tile, reader: Reader) -> None:
    """Copy one row per group."""
    positions = tile.group_ids()
    is_used = positions < rows.shape[0]
    row = load(rows, positions, is_used, tile.lanes)
    unsigned, num_rows = _unsigned(row), np.uint32(table.shape[0])
    is_row, is_bad = is_used & (unsigned < num_rows), is_used & (unsigned > num_rows)
    values = reader.finish(reader.load(table, row, is_row, is_bad, None))
    store(out, positions, is_used, tile.output_lanes, *values)


def _unsigned(numbers: Int32[Array, " n"]) -> UInt32[Array, " n"]:
    return numbers.astype(jnp.uint32)
