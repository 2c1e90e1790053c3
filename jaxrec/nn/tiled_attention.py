"""Attention within the rows of ragged arrays, without padding, in memory linear in their length."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from jaxrec.nn.jagged_tiles import (
    TilePlan,
    Tiles,
    blocks_of,
    loop,
    over_devices,
    plan_tiles,
    sum_tiles,
)
from jaxrec.ragged.arrays import AnyArray, on_auto_axes, take

# A compromise: smaller blocks skip more pairs of different rows, larger blocks make faster matrix
# products.
BLOCK = 64


def jagged_attention(
    query: Float[AnyArray, "*devices capacity heads dim"],
    key: Float[AnyArray, "*devices capacity heads dim"],
    value: Float[AnyArray, "*devices capacity heads value_dim"],
    lengths: Int32[AnyArray, "*devices rows"],
    *,
    causal: bool = False,
    block_size: int = BLOCK,
) -> Float[Array, "*devices capacity heads value_dim"]:
    """Compute softmax attention within each row.

    ``softmax(q k^T / sqrt(dim)) v``: Vaswani et al. 2017, "Attention is all you need"
    (arXiv:1706.03762), equation 1; computed tile by tile as in Dao et al. 2022, "FlashAttention"
    (arXiv:2205.14135).

    Args:
        query: ``[capacity, heads, dim]``; elements of one row stand one after the other, rows in
            order, padding at the end. On a mesh one more axis in front, over the devices.
        key: The same.
        value: ``[capacity, heads, value_dim]``.
        lengths: ``[rows]`` elements of each row.
        causal: Whether an element sees only itself and earlier elements.
        block_size: Elements of a block: 16 to 128, about the usual length of a row.

    Returns:
        ``[capacity, heads, value_dim]`` of the type of ``value``; zeros at padding. Sums are taken
        in float32 or wider. Memory is linear in ``capacity``, work in the sum of squared lengths.
        `jax.grad` and `jax.hessian` differentiate it; `jax.jvp` and `jax.linearize` alone raise a
        TypeError.

    Example:
        >>> import jax.numpy as jnp
        >>> ones = jnp.ones((4, 1, 2))
        >>> values = jnp.array([2.0, 4.0, 8.0, 0.0])[:, None, None]
        >>> jagged_attention(ones, ones, values, jnp.array([2, 1]), causal=True)[:, 0, 0].tolist()
        [2.0, 3.0, 8.0, 0.0]
    """
    dim = query.shape[-1]
    attend = functools.partial(_attend, scale=dim**-0.5)
    return _tiled(attend, lengths, None, query, key, value, causal=causal, block_size=block_size)


def _attend(
    plan: TilePlan, _: Any, query: Array, key: Array, value: Array, *, scale: float
) -> Array:
    capacity, dtype = query.shape[0], value.dtype
    q, k, v = (_blocks(array, plan) for array in (query, key, value))
    # The maxima take a pass of their own. Everything else is then a plain sum over tiles, whose
    # derivative needs one tile at a time. A running maximum, as in FlashAttention, would have to be
    # differentiated through.
    shift = _row_maxima(plan, jax.lax.stop_gradient((q, k)), scale)
    tile = functools.partial(_softmax_tile, scale=scale)
    # The shift cancels in the quotient, so the result and its gradient are exact for any shift.
    weighted, total = sum_tiles(tile, plan, (), (q, shift), (k, v))
    out = weighted / jnp.where(total > 0, total, 1)[..., None]
    return out.reshape(-1, *out.shape[2:])[:capacity].astype(dtype)


def _scores(q: Array, k: Array, scale: float) -> Array:
    """Return scores ``[tiles, heads, block, block]`` in float32 or wider."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    return jnp.einsum("pahd,pbhd->phab", q, k, preferred_element_type=wide) * scale


def _softmax_tile(_: Any, queries: Any, keys: Any, tiles: Tiles, *, scale: float) -> Any:
    (q, shift), (k, v) = queries, keys
    scores = _scores(q, k, scale) - jnp.swapaxes(shift, 1, 2)[..., None]
    mask = tiles.mask[:, None]
    # Scores are masked before the exponential too. A masked score may be large, and the gradient
    # would be infinity times zero.
    powers = jnp.where(mask, jnp.exp(jnp.where(mask, scores, 0)), 0)
    weighted = jnp.einsum("phab,pbhe->pahe", powers, v, preferred_element_type=powers.dtype)
    return weighted, jnp.swapaxes(powers.sum(-1), 1, 2)


def _row_maxima(plan: TilePlan, arrays: Any, scale: float) -> Array:
    """Return the largest score of each query, ``[blocks, block, heads]``; 0 at padding."""
    q, k = arrays
    lowest = jnp.finfo(jnp.promote_types(q.dtype, jnp.float32)).min

    def body(tiles: Tiles, maxima: Array) -> Array:
        q_tile = q.at[tiles.queries].get(mode="clip")
        scores = jnp.where(tiles.mask[:, None], _scores(q_tile, k[tiles.keys], scale), lowest)
        return maxima.at[tiles.queries].max(jnp.swapaxes(scores.max(-1), 1, 2), mode="drop")

    start = jnp.full(q.shape[:3], lowest, jnp.promote_types(q.dtype, jnp.float32))
    maxima = loop(plan, body, start)
    return jnp.where(maxima == lowest, 0, maxima)


def hstu_attention(
    query: Float[AnyArray, "*devices capacity heads dim"],
    key: Float[AnyArray, "*devices capacity heads dim"],
    value: Float[AnyArray, "*devices capacity heads value_dim"],
    lengths: Int32[AnyArray, "*devices rows"],
    *,
    scale: float,
    position_bias: Float[AnyArray, "distances heads"] | None = None,
    time_bias: Float[AnyArray, "buckets heads"] | None = None,
    timestamps: Int[AnyArray, "*devices capacity"] | None = None,
    block_size: int = BLOCK,
) -> Float[Array, "*devices capacity heads value_dim"]:
    """Compute HSTU's pointwise attention within each row: an element sees itself and earlier ones.

    ``scale * SiLU(q k^T + bias) v`` without a softmax: Zhai et al. 2024, "Actions speak louder than
    words: Trillion-parameter sequential transducers for generative recommendations"
    (arXiv:2402.17152), equation 2 and section 3.2. The bias depends on the distance in positions
    and on the distance in time.

    Args:
        query: ``[capacity, heads, dim]``; elements of one row stand one after the other, rows in
            order, padding at the end. On a mesh one more axis in front, over the devices.
        key: The same.
        value: ``[capacity, heads, value_dim]``.
        lengths: ``[rows]`` elements of each row.
        scale: Factor after the SiLU; one over the longest length in the paper's code.
        position_bias: ``[distances, heads]`` bias for 0, 1, 2, ... positions from key to query;
            larger distances have the last bias. None: no bias.
        time_bias: ``[buckets, heads]`` bias for the time from key to query, see `time_bucket`.
            None: no bias.
        timestamps: ``[capacity]`` the time of each element, for ``time_bias``.
        block_size: Elements of a block: 16 to 128, about the usual length of a row.

    Returns:
        ``[capacity, heads, value_dim]`` of the type of ``value``; zeros at padding. Memory is
        linear in ``capacity``, work in the sum of squared lengths. `jax.grad` and `jax.hessian`
        differentiate it; `jax.jvp` and `jax.linearize` alone raise a TypeError.

    Raises:
        ValueError: Only one of ``time_bias`` and ``timestamps`` is given.

    Example:
        >>> import jax.numpy as jnp
        >>> zeros, values = jnp.zeros((4, 1, 2)), jnp.array([2.0, 4.0, 8.0, 0.0])[:, None, None]
        >>> bias = jnp.array([[0.0], [1.0]])  # nothing for itself, SiLU(1) = 0.731 for others
        >>> hstu_attention(zeros, zeros, values, jnp.array([2, 1]), scale=1.0,
        ...                position_bias=bias)[:, 0, 0].round(3).tolist()
        [0.0, 1.462..., 0.0, 0.0]
    """
    if (time_bias is None) != (timestamps is None):
        raise ValueError("time_bias and timestamps come together; give both or neither")
    biases = jax.tree.map(jnp.asarray, {"position": position_bias, "time": time_bias})
    attend = functools.partial(_attend_pointwise, tile=functools.partial(_hstu_tile, scale=scale))
    marks = None if timestamps is None else {"time": timestamps}
    return _tiled(
        attend, lengths, marks, query, key, value, biases, causal=True, block_size=block_size
    )


def _attend_pointwise(
    plan: TilePlan, biases: Any, query: Array, key: Array, value: Array, *, tile: Any
) -> Array:
    q, k, v = (_blocks(array, plan) for array in (query, key, value))
    out = sum_tiles(tile, plan, biases, q, (k, v))
    return out.reshape(-1, *out.shape[2:])[: query.shape[0]].astype(value.dtype)


def _hstu_tile(biases: Any, q: Array, keys: Any, tiles: Tiles, *, scale: float) -> Array:
    k, v = keys
    scores = _scores(q, k, 1.0)
    if biases["position"] is not None:
        table = biases["position"].astype(scores.dtype)
        bias = take(table, jnp.clip(tiles.distance, 0, table.shape[0] - 1))
        scores = scores + jnp.moveaxis(bias, -1, 1)
    if biases["time"] is not None:
        table = biases["time"].astype(scores.dtype)
        of_queries, of_keys = (marks["time"] for marks in tiles.marks)
        bucket = time_bucket(of_queries[:, :, None] - of_keys[:, None, :], table.shape[0])
        scores = scores + jnp.moveaxis(take(table, bucket), -1, 1)
    # SiLU needs no maximum and no total, so one pass over the tiles is enough.
    weights = jnp.where(tiles.mask[:, None], nnx.silu(scores) * scale, 0)
    return jnp.einsum("phab,pbhe->pahe", weights, v, preferred_element_type=weights.dtype)


def time_bucket(elapsed: Int[Array, "*axes"], num_buckets: int) -> Int32[Array, "*axes"]:
    """Return the bucket of a time difference: the logarithm of its size to base 1.35, rounded down.

    ``log(max(1, |t|)) / 0.301``, as in the code of Zhai et al. 2024. The last bucket also has all
    larger differences.

    Example:
        >>> import jax.numpy as jnp
        >>> time_bucket(jnp.array([0, 1, 2, 60, 86400]), 64).tolist()
        [0, 0, 2, 13, 37]
    """
    size = jnp.maximum(jnp.abs(elapsed), 1).astype(jnp.float32)
    return jnp.clip(jnp.log(size) / 0.301, 0, num_buckets - 1).astype(jnp.int32)


def _tiled(
    attend: Callable[..., Array],
    lengths: AnyArray,
    marks: Any,
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    shared: Any = None,
    *,
    causal: bool,
    block_size: int,
) -> Array:
    """Call ``attend(plan, shared, query, key, value)`` with one batch, or each device's batch."""
    if block_size < 1:
        raise ValueError(f"block_size is 1 or more, got {block_size}")
    capacity, heads, _ = query.shape[-3:]
    plan_of = functools.partial(
        plan_tiles,
        capacity=capacity,
        block=max(1, min(block_size, capacity)),
        heads=heads,
        causal=causal,
    )

    def call(lengths: Array, marks: Any, shared: Any, *arrays: Array) -> Array:
        plan = (plan_of if lengths.ndim == 1 else jax.vmap(plan_of))(lengths, marks)
        return over_devices(attend, plan, shared, *arrays)

    arrays = jax.tree.map(jnp.asarray, (lengths, marks, shared, query, key, value))
    return on_auto_axes(call, *arrays)


def _blocks(array: Array, plan: TilePlan) -> Array:
    """Cut an array into blocks, with zeros at padding."""
    # Padding may be NaN, and a mask that multiplies would keep NaN.
    blocks = blocks_of(array, plan.num_blocks, plan.block)
    exists = (plan.segments < plan.num_rows).reshape(*blocks.shape[:2], *(1,) * (blocks.ndim - 2))
    return jnp.where(exists, blocks, jnp.zeros((), blocks.dtype))
