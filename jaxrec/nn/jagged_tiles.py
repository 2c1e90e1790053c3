"""Pairwise work over ragged rows, tile by tile, in memory that grows with their length alone.

The elements of a ragged array stand one after the other and are cut into blocks of equal size. A
*tile* is a pair of blocks, of queries and of keys, in which some query and some key belong to the
same row. Row lengths decide which tiles there are: about ``sum(length^2) / block^2``, where padding
rows to the longest would have ``rows * longest^2 / block^2``. A loop takes a fixed number of tiles
at once, so nothing of the size of all pairs ever exists, in the forward pass or in the backward
pass, which makes the tiles again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped

from jaxrec.ragged import complete_cumsum, segment_ids

# Number of pairs per trip of the loop, over all heads.
PAIRS_AT_ONCE = 1 << 19


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TilePlan:
    """The tiles of a ragged array, and the order in which they are done.

    In step ``t`` each block of queries meets the block of keys ``t`` positions before the last
    block that it meets. Blocks of queries are ordered by their number of steps, largest first: the
    first ``active[t]`` have work in step ``t``, and are done a few at a time, each once.

    Attributes:
        segments: ``[blocks, block]`` the row of each element; the number of rows at padding.
        order: ``[blocks]`` blocks of queries, by the number of blocks of keys they meet, largest
            first.
        last: ``[blocks]`` the last block of keys that each block of queries meets.
        active: ``[blocks + 1]`` number of blocks of queries with a tile in each step.
        chunks: ``[blocks + 1]`` number of trips of the loop in each step.
        steps: Number of steps.
        marks: What tiles know of each element, such as its time: a pytree of ``[blocks, block]``.
        num_rows: Number of rows.
        at_once: Number of tiles of a trip.
        causal: Whether a query sees only keys up to its own position.
    """

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
    """Tiles of one step.

    Attributes:
        queries: ``[tiles]`` blocks of queries, each once; the number of blocks where there is no
            tile.
        keys: ``[tiles]`` blocks of keys.
        mask: ``[tiles, block, block]`` whether the query (second axis) sees the key (third).
        marks: Marks of the queries and of the keys, pytrees of ``[tiles, block]``.
        distance: ``[tiles or 1, block, block]`` places from key to query.
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
    # Rows lie one behind the other, so the blocks of keys that a block of queries meets are
    # consecutive: those from the start of its first row to its own diagonal, or to the end of its
    # last row. Their number is all that the loop must know of a block.
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
    counts = jnp.where(first < offsets[-1], last - starts + 1, 0)
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
    """Cut an array into blocks, with zeros at its end."""
    missing = num_blocks * block - array.shape[0]
    padded = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
    return padded.reshape(num_blocks, block, *array.shape[1:])


def over_devices(function: Callable[..., Any], plan: TilePlan, shared: Any, *arrays: Any) -> Any:
    """Call ``function(plan, shared, *arrays)`` with one batch, or with that of each device.

    All devices make the trips that the one with most of them makes, so that they stay in step.
    """
    if plan.order.ndim == 1:
        return function(plan, shared, *arrays)
    # A device whose trips are done goes on with tiles that do not exist, which add nothing. Under
    # `jax.vmap` a loop of a length of its own for each device would run all lanes to the longest.
    together = dataclasses.replace(plan, chunks=plan.chunks.max(0), steps=plan.steps.max())
    axes = dataclasses.replace(jax.tree.map(lambda _: 0, together), chunks=None, steps=None)
    in_axes = (axes, None, *(0 for _ in arrays))
    return jax.vmap(function, in_axes)(together, shared, *arrays)


def loop(plan: TilePlan, body: Callable[[Tiles, Any], Any], carry: Any) -> Any:
    """Run ``carry = body(tiles, carry)`` over all tiles, each query block once per trip."""

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
    # In a causal plan all tiles of a step lie equally far from the diagonal.
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
    """Return which queries see which keys: those of their row, in a causal plan not after them."""
    # The only place that decides it element by element. A mask that depends on more than rows and
    # distance brings it as marks; one that empties whole tiles also shortens the plan, in
    # `plan_tiles`, since a masked tile costs as much as another.
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
    """Sum, for each block of queries, the contributions of its tiles.

    Args:
        tile: ``tile(shared, queries, keys, tiles)``, the contributions of blocks of keys to blocks
            ``[tiles, block, ...]`` of queries: arrays of ``[tiles, block, ...]``.
        plan: The tiles.
        shared: Arrays that every tile sees, such as a bias.
        queries: Arrays of ``[blocks, block, ...]``.
        keys: Arrays of ``[blocks, block, ...]``.

    Returns:
        Arrays of ``[blocks, block, ...]``; differentiable in ``shared``, ``queries`` and ``keys``,
        in reverse mode and in forward mode over it.
    """

    def contributions(tiles: Tiles) -> Any:
        return tile(shared, _take(queries, tiles.queries), _take(keys, tiles.keys), tiles)

    one = jax.eval_shape(lambda: contributions(_tiles(plan, plan.steps, plan.steps)))
    zeros = jax.tree.map(lambda x: jnp.zeros((plan.num_blocks, *x.shape[1:]), x.dtype), one)
    return loop(plan, lambda tiles, out: _add(out, tiles.queries, contributions(tiles)), zeros)


# Reverse mode of the loop itself would keep every tile of the forward pass, which is the matrix of
# all pairs again. The backward pass makes a tile anew and differentiates it alone.
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


def _take(arrays: Any, blocks: Int32[Array, " tiles"]) -> Any:
    return jax.tree.map(lambda array: array.at[blocks].get(mode="fill", fill_value=0), arrays)


def _add(arrays: Any, blocks: Int32[Array, " tiles"], parts: Any) -> Any:
    return jax.tree.map(lambda array, part: array.at[blocks].add(part, mode="drop"), arrays, parts)
