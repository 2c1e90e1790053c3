"""Pairwise work within ragged rows, tile by tile, in memory that is linear in their length.

The elements of a ragged array stand one after the other and are cut into blocks of equal size. A
*tile* is a block of queries and a block of keys of which some query may see some key. Without a
mask there are about ``sum(length^2) / block^2`` tiles; rows padded to the longest would make
``rows * longest^2 / block^2``. A loop computes a fixed number of tiles at once, and the backward
pass computes them again, so no array has the size of all pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped

from jaxrec.nn.attention_mask import NOWHERE, AttentionMask, KeyIntervals, key_intervals
from jaxrec.ragged import complete_cumsum

# Pairs per trip of the loop, over all heads: 2 MiB of float32 scores.
PAIRS_AT_ONCE = 1 << 19


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TilePlan:
    """The tiles of a ragged array, and their order.

    Attributes:
        intervals: Keys of each query, ``[blocks, block]``.
        starts: ``[blocks + 1]`` number of tiles before each block of queries, then the number of
            all tiles.
        end: ``[blocks]`` one past the last block of keys that the queries' intervals reach.
        near: ``[blocks]`` number of blocks of keys that the intervals reach.
        apart: ``[blocks]`` first block of keys that only the second interval reaches: the targets
            of a query's group.
        trips: Number of trips of the loop.
        offsets: First query of each row and the end of the last, then the same for keys,
            ``[2, rows + 1]``.
        marks: Facts of queries and of keys for the tiles, such as times: two pytrees of
            ``[blocks, block]``.
        key_blocks: Number of blocks of keys.
        at_once: Number of tiles in a trip.
        is_aligned: Whether query ``i`` and key ``i`` are the same element.
    """

    # The blocks of keys that a block of queries meets are consecutive, since rows lie one after the
    # other and each query has one interval. Only targets see themselves apart from their interval,
    # which ends with the history; the blocks of other targets between are left out.

    intervals: KeyIntervals
    starts: Int32[Array, "*devices blocks+1"]
    end: Int32[Array, "*devices blocks"]
    near: Int32[Array, "*devices blocks"]
    apart: Int32[Array, "*devices blocks"]
    trips: Int32[Array, ""]
    offsets: Int32[Array, "*devices 2 rows+1"]
    marks: tuple[Any, Any]
    key_blocks: int = dataclasses.field(metadata={"static": True})
    at_once: int = dataclasses.field(metadata={"static": True})
    is_aligned: bool = dataclasses.field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        return self.intervals.own.shape[-2]

    @property
    def block(self) -> int:
        return self.intervals.own.shape[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of one trip of the loop.

    Attributes:
        queries: ``[tiles]`` index of each tile's block of queries, ascending. Entries without a
            tile hold the number of blocks.
        keys: ``[tiles]`` index of each tile's block of keys.
        mask: ``[tiles, block, block]`` whether the query (second axis) sees the key (third).
        marks: Marks of the queries and of the keys, pytrees of ``[tiles, block]``.
        own: ``[tiles, block]`` position of each query among the keys.
        positions: ``[tiles, block]`` position of each key.
        is_aligned: See `TilePlan`.
    """

    queries: Int32[Array, " tiles"]
    keys: Int32[Array, " tiles"]
    mask: Bool[Array, "tiles block block"]
    marks: tuple[Any, Any]
    own: Int32[Array, "tiles block"]
    positions: Int32[Array, "tiles block"]
    is_aligned: bool = dataclasses.field(metadata={"static": True})


def plan_tiles(
    lengths: Int32[Array, " rows"],
    query_lengths: Int32[Array, " rows"] | None,
    mask: AttentionMask,
    marks: tuple[Any, Any] = (None, None),
    *,
    queries: int,
    keys: int,
    block: int,
    heads: int,
) -> TilePlan:
    """Return the tiles of ``queries`` and ``keys`` elements, padding included.

    ``marks`` has an array for the queries and one for the keys. None for the queries: a query has
    the mark of its own key.
    """
    num_blocks, key_blocks = max(1, -(-queries // block)), max(1, -(-keys // block))
    flat = key_intervals(mask, lengths, num_blocks * block, query_lengths)
    intervals = jax.tree.map(lambda x: x.reshape(num_blocks, block), flat)
    begin, end = _blocks_between(
        intervals.first, intervals.last, intervals.first <= intervals.last, block
    )
    end = jnp.minimum(end, key_blocks)
    apart, apart_end = end, end
    if intervals.group is not None:
        is_apart = (intervals.group <= intervals.own) & (intervals.own > intervals.last)
        apart, apart_end = _blocks_between(intervals.group, intervals.own, is_apart, block)
        # Targets of a row without history may come before the interval of the next row.
        is_before = (apart < apart_end) & (apart < begin)
        begin = jnp.where(is_before, apart, begin)
        apart, apart_end = jnp.maximum(apart, end), jnp.minimum(apart_end, key_blocks)
    near = jnp.maximum(end - begin, 0)
    tiles = near + jnp.maximum(apart_end - apart, 0)
    of_queries, of_keys = marks
    if of_queries is None:
        of_queries = jax.tree.map(lambda mark: mark.at[intervals.own].get(mode="clip"), of_keys)
    else:
        of_queries = jax.tree.map(lambda mark: blocks_of(mark, num_blocks, block), of_queries)
    counts = lengths if query_lengths is None else query_lengths
    starts = jnp.pad(jnp.cumsum(tiles, dtype=jnp.int32), (1, 0))
    at_once = max(1, min(num_blocks, PAIRS_AT_ONCE // (block * block * heads)))
    return TilePlan(
        intervals=intervals,
        starts=starts,
        end=end,
        near=near,
        apart=apart,
        trips=-(-starts[-1] // at_once),
        offsets=jnp.stack([complete_cumsum(counts), complete_cumsum(lengths)]),
        marks=(of_queries, jax.tree.map(lambda mark: blocks_of(mark, key_blocks, block), of_keys)),
        key_blocks=key_blocks,
        at_once=at_once,
        is_aligned=query_lengths is None,
    )


def _blocks_between(
    first: Int32[Array, "blocks block"],
    last: Int32[Array, "blocks block"],
    exists: Bool[Array, "blocks block"],
    block: int,
) -> tuple[Int32[Array, " blocks"], Int32[Array, " blocks"]]:
    """Return the first block of keys of each block of queries, and one past its last."""
    # A block of queries without any key begins at 0 and ends there.
    begin = jnp.where(exists, first, NOWHERE).min(1) // block
    end = jnp.where(exists, last, -1).max(1) // block + 1
    return jnp.where(exists.any(1), begin, 0), end


def blocks_of(
    array: Shaped[Array, "capacity *element"], num_blocks: int, block: int
) -> Shaped[Array, "{num_blocks} {block} *element"]:
    """Cut an array into blocks; the last one is padded with zeros."""
    missing = num_blocks * block - array.shape[0]
    padded = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
    return padded.reshape(num_blocks, block, *array.shape[1:])


def over_devices(function: Callable[..., Any], plan: TilePlan, shared: Any, *arrays: Any) -> Any:
    """Call ``function(plan, shared, *arrays)`` with one batch, or with the batch of each device."""
    if plan.end.ndim == 1:
        return function(plan, shared, *arrays)
    # All devices make as many trips as the busiest. A device without tiles left goes on with empty
    # ones, which add nothing. Under `jax.vmap` loops of different lengths would run to the longest
    # too, and select the old or the new carry in every trip.
    together = dataclasses.replace(plan, trips=plan.trips.max())
    axes = dataclasses.replace(jax.tree.map(lambda _: 0, together), trips=None)
    in_axes = (axes, None, *(0 for _ in arrays))
    return jax.vmap(function, in_axes)(together, shared, *arrays)


def loop(plan: TilePlan, body: Callable[[Tiles, Any], Any], carry: Any) -> Any:
    """Run ``carry = body(tiles, carry)`` over all tiles."""
    return jax.lax.fori_loop(0, plan.trips, lambda c, carry: body(_tiles(plan, c), carry), carry)


def _tiles(plan: TilePlan, c: Array) -> Tiles:
    numbers = c * plan.at_once + jnp.arange(plan.at_once, dtype=jnp.int32)
    # The block of queries of a tile is the number of blocks whose tiles end at or before it.
    queries = (plan.starts[None, 1:] <= numbers[:, None]).sum(1, dtype=jnp.int32)

    def of_block(facts: Array, fill_value: int = 0) -> Array:
        return facts.at[queries].get(mode="fill", fill_value=fill_value)

    place = numbers - of_block(plan.starts[:-1])
    near = of_block(plan.near)
    keys = jnp.where(
        place < near, of_block(plan.end) - 1 - place, of_block(plan.apart) + place - near
    )
    # Past the last tile there are blocks of queries that see nothing.
    seen = KeyIntervals(
        first=of_block(plan.intervals.first, NOWHERE),
        last=of_block(plan.intervals.last, -1),
        own=of_block(plan.intervals.own, -1),
        group=None if plan.intervals.group is None else of_block(plan.intervals.group, NOWHERE),
    )
    keys = jnp.clip(keys, 0, plan.key_blocks - 1)
    positions = keys[:, None] * plan.block + jnp.arange(plan.block, dtype=jnp.int32)[None]
    of_queries, of_keys = plan.marks
    marks = jax.tree.map(of_block, of_queries), jax.tree.map(lambda mark: mark[keys], of_keys)
    return Tiles(queries, keys, seen.see(positions), marks, seen.own, positions, plan.is_aligned)


def _sum_tiles(
    tile: Callable[[Any, Any, Any, Tiles], Any],
    plan: TilePlan,
    shared: Any,
    queries: Any,
    keys: Any,
) -> Any:
    """Sum ``tile(shared, queries, keys, tiles)`` over the tiles of each block of queries.

    ``queries``, ``keys`` and results are arrays of ``[blocks, block, ...]``; ``tile`` takes and
    returns ``[tiles, block, ...]``, and gets all of ``shared``. `jax.grad` and `jax.vjp` work, and
    so does `jax.jvp` of a gradient; `jax.jvp` of the sum alone does not.
    """

    def contributions(tiles: Tiles) -> Any:
        return tile(shared, _take(queries, tiles.queries), _take(keys, tiles.keys), tiles)

    one = jax.eval_shape(lambda: contributions(_tiles(plan, plan.trips)))
    zeros = jax.tree.map(lambda x: jnp.zeros((plan.num_blocks, *x.shape[1:]), x.dtype), one)
    return loop(plan, lambda tiles, out: _add(out, tiles.queries, contributions(tiles)), zeros)


# Reverse mode through the loop would keep every tile of the forward pass, and together they are the
# matrix of all pairs. So the backward pass computes each tile again and differentiates it alone.
def _forward(tile, plan, shared, queries, keys):
    return _sum_tiles(tile, plan, shared, queries, keys), (plan, shared, queries, keys)


def _backward(tile, residuals, cotangent):
    plan, shared, queries, keys = residuals

    def body(tiles: Tiles, gradients: Any) -> Any:
        of_shared, of_queries, of_keys = gradients
        _, vjp = jax.vjp(
            lambda *inputs: tile(*inputs, tiles),
            shared,
            _take(queries, tiles.queries),
            _take(keys, tiles.keys),
        )
        shared_part, query_part, key_part = vjp(_take(cotangent, tiles.queries))
        return (
            jax.tree.map(lambda total, part: total + part, of_shared, shared_part),
            _add(of_queries, tiles.queries, query_part),
            _add(of_keys, tiles.keys, key_part),
        )

    # Many tiles add to each gradient, so the sums of 16-bit gradients are float32.
    inputs = shared, queries, keys
    wide = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, "float32")), inputs)
    gradients = loop(plan, body, wide)
    return None, *jax.tree.map(lambda total, x: total.astype(x.dtype), gradients, inputs)


sum_tiles = jax.custom_vjp(_sum_tiles, nondiff_argnums=(0,))
sum_tiles.defvjp(_forward, _backward)


# The block number past the last one stands for no tile: it reads zeros here, and `_add` drops it.
def _take(arrays: Any, blocks: Int32[Array, " tiles"]) -> Any:
    return jax.tree.map(lambda array: array.at[blocks].get(mode="fill", fill_value=0), arrays)


def _add(arrays: Any, blocks: Int32[Array, " tiles"], parts: Any) -> Any:
    return jax.lax.platform_dependent(arrays, blocks, parts, cpu=_scatter, default=_scatter_sums)


def _scatter(arrays: Any, blocks: Array, parts: Any) -> Any:
    return jax.tree.map(
        lambda array, part: array.at[blocks].add(part.astype(array.dtype), mode="drop"),
        arrays,
        parts,
    )


def _scatter_sums(arrays: Any, blocks: Array, parts: Any) -> Any:
    """Add the parts of equal blocks to each other first, and their sums to the arrays."""
    # A GPU would add parts of one block by atomics, in another order on every run.
    count = blocks.shape[0]
    numbers = jnp.arange(count, dtype=jnp.int32)
    are_same = blocks[:, None] == blocks[None, :]
    is_first = jnp.argmax(are_same, axis=1).astype(jnp.int32) == numbers

    def add(array: Array, part: Array) -> Array:
        # Blocks past the last one are dropped, and unlike each other, too.
        is_block = is_first & (blocks < array.shape[0])
        places = jnp.where(is_block, blocks, array.shape[0] + numbers)
        sums = jnp.einsum(
            "ab,bc->ac",
            are_same.astype(array.dtype),
            part.reshape(count, -1).astype(array.dtype),
            precision=jax.lax.Precision.HIGHEST,
        )
        sums = sums.reshape(part.shape)
        return array.at[places].add(sums, mode="drop", unique_indices=True)

    return jax.tree.map(add, arrays, parts)
