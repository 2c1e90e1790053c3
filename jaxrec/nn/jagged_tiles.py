"""Pairwise work within ragged rows, tile by tile, in memory that is linear in their length.

The elements of a ragged array stand one after the other and are cut into blocks of equal size. A
*tile* is a block of queries and a block of keys that share at least one row. There are about
``sum(length^2) / block^2`` tiles; rows padded to the longest would make
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

from jaxrec.ragged import complete_cumsum, segment_ids

# Pairs per trip of the loop, over all heads: 2 MiB of float32 scores.
PAIRS_AT_ONCE = 1 << 19


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TilePlan:
    """The tiles of a ragged array, and their order.

    Attributes:
        segments: ``[blocks, block]`` row of each element; ``num_rows`` at padding.
        order: ``[blocks]`` blocks of queries by their number of tiles, largest first.
        last: ``[blocks]`` last block of keys of each block of queries.
        active: ``[blocks + 1]`` number of blocks of queries with a tile in each step.
        chunks: ``[blocks + 1]`` number of trips of the loop in each step.
        steps: Number of steps.
        marks: Facts of elements for the tiles, such as times: a pytree of ``[blocks, block]``.
        num_rows: Number of rows.
        at_once: Number of tiles in a trip.
        causal: Whether a query sees only keys up to its own position.
    """

    # In step t each block of queries meets the block of keys t places before its last one. As the
    # queries are ordered by their number of tiles, exactly the first active[t] have work in step t.
    # A step visits each of them once, so its trips can add to the queries' results without
    # collisions.

    segments: Int32[Array, "*devices blocks block"]
    order: Int32[Array, "*devices blocks"]
    last: Int32[Array, "*devices blocks"]
    active: Int32[Array, "*devices steps"]
    chunks: Int32[Array, " steps"]
    steps: Int32[Array, ""]
    marks: Any
    num_rows: int = dataclasses.field(metadata={"static": True})
    at_once: int = dataclasses.field(metadata={"static": True})
    causal: bool = dataclasses.field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        return self.segments.shape[-2]

    @property
    def block(self) -> int:
        return self.segments.shape[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of one trip of the loop.

    Attributes:
        queries: ``[tiles]`` index of each tile's block of queries, all different. Entries without a
            tile hold the number of blocks.
        keys: ``[tiles]`` index of each tile's block of keys.
        mask: ``[tiles, block, block]`` whether the query (second axis) sees the key (third).
        marks: Marks of the queries and of the keys, pytrees of ``[tiles, block]``.
        distance: ``[tiles or 1, block, block]`` positions from key to query.
    """

    queries: Int32[Array, " tiles"]
    keys: Int32[Array, " tiles"]
    mask: Bool[Array, "tiles block block"]
    distance: Int32[Array, "_ block block"]
    marks: tuple[Any, Any]


def plan_tiles(
    lengths: Int32[Array, " rows"],
    marks: Any,
    *,
    capacity: int,
    block: int,
    heads: int,
    causal: bool,
) -> TilePlan:
    """Return the tiles of a ragged array of ``capacity`` elements."""
    # Rows lie one after the other, so the blocks of keys that a block of queries meets are
    # consecutive. They begin at the start of its first row, and end at its own diagonal (causal) or
    # at the end of its last row. The loop needs only their last one and their number.
    num_blocks = max(1, -(-capacity // block))
    offsets = jnp.asarray(complete_cumsum(lengths))
    segments = segment_ids(offsets, num_blocks * block)
    first = jnp.arange(num_blocks, dtype=jnp.int32) * block
    final = jnp.minimum(first + block, offsets[-1]) - 1
    starts = offsets[segments[first]] // block
    if causal:
        last = jnp.arange(num_blocks, dtype=jnp.int32)
    else:
        last = (offsets[segments[final] + 1] - 1) // block
    counts = jnp.where(first < offsets[-1], last - starts + 1, 0)  # none in blocks of padding
    order = jnp.argsort(-counts).astype(jnp.int32)
    # active[t] blocks have more than t tiles.
    histogram = jnp.zeros(num_blocks + 2, jnp.int32).at[counts].add(1)
    active = num_blocks - jnp.cumsum(histogram, dtype=jnp.int32)[:-1]
    at_once = max(1, min(num_blocks, PAIRS_AT_ONCE // (block * block * heads)))
    return TilePlan(
        segments=segments.reshape(num_blocks, block),
        order=order,
        last=last,
        active=active,
        chunks=-(-active // at_once),
        steps=counts.max(initial=0),
        marks=jax.tree.map(lambda mark: blocks_of(mark, num_blocks, block), marks),
        num_rows=lengths.shape[0],
        at_once=at_once,
        causal=causal,
    )


def blocks_of(
    array: Shaped[Array, "capacity *element"], num_blocks: int, block: int
) -> Shaped[Array, "{num_blocks} {block} *element"]:
    """Cut an array into blocks; the last one is padded with zeros."""
    missing = num_blocks * block - array.shape[0]
    padded = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
    return padded.reshape(num_blocks, block, *array.shape[1:])


def over_devices(function: Callable[..., Any], plan: TilePlan, shared: Any, *arrays: Any) -> Any:
    """Call ``function(plan, shared, *arrays)`` with one batch, or with the batch of each device."""
    if plan.order.ndim == 1:
        return function(plan, shared, *arrays)
    # All devices make as many trips as the busiest. A device without tiles left goes on with empty
    # ones, which add nothing. Under `jax.vmap` loops of different lengths would run to the longest
    # too, and select the old or the new carry in every trip.
    together = dataclasses.replace(plan, chunks=plan.chunks.max(0), steps=plan.steps.max())
    axes = dataclasses.replace(jax.tree.map(lambda _: 0, together), chunks=None, steps=None)
    in_axes = (axes, None, *(0 for _ in arrays))
    return jax.vmap(function, in_axes)(together, shared, *arrays)


def loop(plan: TilePlan, body: Callable[[Tiles, Any], Any], carry: Any) -> Any:
    """Run ``carry = body(tiles, carry)`` over all tiles; a trip has a block of queries once."""

    def step(t: Array, carry: Any) -> Any:
        def trip(c: Array, carry: Any) -> Any:
            return body(_tiles(plan, t, c), carry)

        return jax.lax.fori_loop(0, plan.chunks[t], trip, carry)

    return jax.lax.fori_loop(0, plan.steps, step, carry)


def _tiles(plan: TilePlan, t: Array, c: Array) -> Tiles:
    slots = c * plan.at_once + jnp.arange(plan.at_once, dtype=jnp.int32)
    exists = slots < plan.active[t]
    queries = plan.order.at[slots].get(mode="clip")
    keys = plan.last[queries] - t
    within = jnp.arange(plan.block, dtype=jnp.int32)
    offset = within[:, None] - within[None, :]
    # In a causal plan each last block is the diagonal's, so all tiles of a step are t blocks away
    # from it, and one distance serves for all.
    apart = t[None] if plan.causal else queries - keys
    distance = (apart * plan.block)[:, None, None] + offset[None]
    mask = _mask(plan, queries, keys, exists, distance)
    marks = _take_marks(plan, queries), _take_marks(plan, keys)
    return Tiles(jnp.where(exists, queries, plan.num_blocks), keys, mask, distance, marks)


def _mask(
    plan: TilePlan,
    queries: Int32[Array, " tiles"],
    keys: Int32[Array, " tiles"],
    exists: Bool[Array, " tiles"],
    distance: Int32[Array, "_ block block"],
) -> Bool[Array, "tiles block block"]:
    """Return which keys each query sees: the keys of its row, in a causal plan up to itself."""
    # This is the only place that decides per element. A mask that needs more than rows and distance
    # gets it through marks. A mask that empties whole tiles should also shorten the plan in
    # `plan_tiles`, since a masked tile costs as much as any other.
    rows, columns = plan.segments[queries][:, :, None], plan.segments[keys][:, None, :]
    mask = (rows == columns) & (rows < plan.num_rows) & exists[:, None, None]
    return mask & (distance >= 0) if plan.causal else mask


def _take_marks(plan: TilePlan, blocks: Int32[Array, " tiles"]) -> Any:
    return jax.tree.map(lambda mark: mark[blocks], plan.marks)


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

    one = jax.eval_shape(lambda: contributions(_tiles(plan, plan.steps, plan.steps)))
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

    zeros = jax.tree.map(jnp.zeros_like, (shared, queries, keys))
    return None, *loop(plan, body, zeros)


sum_tiles = jax.custom_vjp(_sum_tiles, nondiff_argnums=(0,))
sum_tiles.defvjp(_forward, _backward)


# The block number past the last one stands for no tile: it reads zeros here, and `_add` drops it.
def _take(arrays: Any, blocks: Int32[Array, " tiles"]) -> Any:
    return jax.tree.map(lambda array: array.at[blocks].get(mode="fill", fill_value=0), arrays)


def _add(arrays: Any, blocks: Int32[Array, " tiles"], parts: Any) -> Any:
    return jax.tree.map(lambda array, part: array.at[blocks].add(part, mode="drop"), arrays, parts)
