"""Attention within the rows of ragged arrays, without padding, in memory linear in their length."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int32, Real

from jaxrec.nn import native_attention
from jaxrec.nn.attention_mask import (
    AttentionMask,
    make_mask,
    require_capacity,
    require_counts,
    wrong_queries,
)
from jaxrec.nn.isolation import isolate
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
    query: Float[AnyArray, "*devices queries heads dim"],
    key: Float[AnyArray, "*devices capacity heads dim"],
    value: Float[AnyArray, "*devices capacity heads value_dim"],
    lengths: Int32[AnyArray, "*devices rows"],
    *,
    causal: bool = False,
    num_targets: Int[AnyArray, "*devices rows"] | None = None,
    contextual_length: int | Int[AnyArray, "*devices rows"] = 0,
    max_attention_length: int = 0,
    min_full_attention_length: int = 0,
    target_group_size: int = 1,
    query_lengths: Int[AnyArray, "*devices rows"] | None = None,
    block_size: int = BLOCK,
) -> Float[Array, "*devices queries heads value_dim"]:
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
        num_targets: This and the following ones say which keys a query sees; see `hstu_attention`.
        contextual_length: See `hstu_attention`.
        max_attention_length: See `hstu_attention`.
        min_full_attention_length: See `hstu_attention`.
        target_group_size: See `hstu_attention`.
        query_lengths: See `hstu_attention`.
        block_size: Elements of a block: 16 to 128, about the usual length of a row.

    Returns:
        ``[capacity, heads, value_dim]`` of the type of ``value``; zeros at padding. Sums are taken
        in float32 or wider. Memory is linear in ``capacity``, work in the sum of squared lengths.
        `jax.grad` and `jax.hessian` differentiate it; `jax.jvp` and `jax.linearize` alone raise a
        TypeError. Rows that do not fit, and numbers that are not finite, as in `hstu_attention`.

    Raises:
        ValueError: Shapes, or the mask's arguments, contradict each other or ``lengths``; or
            ``lengths`` sum past the capacity.

    Example:
        >>> import jax.numpy as jnp
        >>> ones = jnp.ones((4, 1, 2))
        >>> values = jnp.array([2.0, 4.0, 8.0, 0.0])[:, None, None]
        >>> jagged_attention(ones, ones, values, jnp.array([2, 1]), causal=True)[:, 0, 0].tolist()
        [2.0, 3.0, 8.0, 0.0]
    """
    mask = make_mask(
        lengths,
        causal=causal,
        num_targets=num_targets,
        contextual_length=contextual_length,
        max_attention_length=max_attention_length,
        min_full_attention_length=min_full_attention_length,
        target_group_size=target_group_size,
    )
    attend = functools.partial(_attend, scale=query.shape[-1] ** -0.5)
    times = (None, None)
    return _tiled(
        attend, lengths, query_lengths, mask, times, None, query, key, value, block_size=block_size
    )


def _attend(
    plan: TilePlan, _: Any, query: Array, key: Array, value: Array, *, scale: float
) -> Array:
    softmax = functools.partial(_softmax, scale=scale)
    return isolate(softmax, plan, (), query, key, value).astype(value.dtype)


def _softmax(
    plan: TilePlan, _: Any, query: Array, key: Array, value: Array, *, scale: float
) -> Array:
    """Return the weighted mean over keys, ``[queries, heads, value_dim]``, in float32 or wider."""
    q, k, v = _blocks(plan, query, key, value)
    # The maxima take a pass of their own. Everything else is then a plain sum over tiles, whose
    # derivative needs one tile at a time. A running maximum, as in FlashAttention, would have to be
    # differentiated through.
    shift = _row_maxima(plan, jax.lax.stop_gradient((q, k)), scale)
    tile = functools.partial(_softmax_tile, scale=scale)
    # The shift cancels in the quotient, so the result and its gradient are exact for any shift.
    weighted, total = sum_tiles(tile, plan, (), (q, shift), (k, v))
    return _flat(plan, weighted / jnp.where(total > 0, total, 1)[..., None], query)


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
    query: Float[AnyArray, "*devices queries heads dim"],
    key: Float[AnyArray, "*devices capacity heads dim"],
    value: Float[AnyArray, "*devices capacity heads value_dim"],
    lengths: Int32[AnyArray, "*devices rows"],
    *,
    causal: bool = True,
    num_targets: Int[AnyArray, "*devices rows"] | None = None,
    contextual_length: int | Int[AnyArray, "*devices rows"] = 0,
    max_attention_length: int = 0,
    alpha: float | None = None,
    scale: float | Real[AnyArray, "*queries"] | None = None,
    min_full_attention_length: int = 0,
    target_group_size: int = 1,
    position_bias: Float[AnyArray, "distances heads"] | None = None,
    time_bias: Float[AnyArray, "buckets heads"] | None = None,
    timestamps: Int[AnyArray, "*devices capacity"] | None = None,
    query_timestamps: Int[AnyArray, "*devices queries"] | None = None,
    query_lengths: Int[AnyArray, "*devices rows"] | None = None,
    block_size: int = BLOCK,
) -> Float[Array, "*devices queries heads value_dim"]:
    """Compute HSTU's pointwise attention within each row.

    ``scale * SiLU(alpha q k^T + bias) v`` without a softmax: Zhai et al. 2024, "Actions speak
    louder than words: Trillion-parameter sequential transducers for generative recommendations"
    (arXiv:2402.17152), equation 2 and section 3.2. The bias depends on the distance in positions
    and on the distance in time. Masks as in the authors' code (meta-recsys/generative-recommenders,
    ``ops/pytorch/pt_hstu_attention.py``); groups of targets as in NVIDIA/recsys-examples.

    A row holds context tokens, then history, then targets. Context sees all context and history.
    History sees context, earlier history and itself. A target sees context, history and itself.

    Args:
        query: ``[capacity, heads, dim]``; elements of one row stand one after the other, rows in
            order, padding at the end. On a mesh one more axis in front, over the devices.
        key: The same.
        value: ``[capacity, heads, value_dim]``.
        lengths: ``[rows]`` elements of each row, context and targets included.
        causal: Whether history sees only earlier history; if not, it sees later history, too.
        num_targets: ``[rows]`` number of targets at the end of each row. None: no targets.
        contextual_length: Number of context tokens at the start of each row, or ``[rows]`` numbers.
            In a row with fewer tokens before its targets, each token sees only itself.
        max_attention_length: Number of places that a history token looks back, beyond itself;
            targets look back from the end of the history. All context counts as one place. 0: no
            limit.
        alpha: Factor of ``q k^T`` before the bias is added. None: 1.
        scale: Factor after the SiLU, one over the longest length in the authors' code; or one
            factor for each query, ``[capacity]``. None: 1.
        min_full_attention_length: Number of last history tokens that ``max_attention_length`` does
            not limit. If it is above 0, targets are not limited either.
        target_group_size: Targets come in groups of this many, such as an item and its action. A
            target sees earlier targets of its group.
        position_bias: ``[distances, heads]`` bias for 0, 1, 2, ... positions from key to query;
            larger distances have the last bias, later keys that of 0. None: no bias.
        time_bias: ``[buckets, heads]`` bias for the time from key to query, see `time_bucket`.
            None: no bias.
        timestamps: ``[capacity]`` the time of each element, for ``time_bias``.
        query_timestamps: ``[capacity]`` the time of each query, for ``time_bias``. None: that of
            the query's element.
        query_lengths: ``[rows]`` number of queries of each row, if ``query`` holds only the last
            elements of each row, ``[queries, heads, dim]``, and keys of the others were computed
            before. The result is that of these elements. None: all elements.
        block_size: Elements of a block: 16 to 128, about the usual length of a row.

    Returns:
        ``[capacity, heads, value_dim]`` of the type of ``value``; zeros at padding. Memory is
        linear in ``capacity``, work in the number of pairs that the mask shows. `jax.grad` and
        `jax.hessian` differentiate it; `jax.jvp` and `jax.linearize` alone raise a TypeError. Under
        jit a row becomes NaN if it has more targets or queries than elements, or exceeds the
        capacity. NaN and infinity stay in their row, but for the kernels of GPUs.

    Raises:
        ValueError: Only one of ``time_bias`` and ``timestamps`` is given; shapes, or the mask's
            arguments, contradict each other or ``lengths``; ``lengths`` sum past the capacity; or
            ``scale`` is neither a number nor one for each query.

    Example:
        >>> import jax.numpy as jnp
        >>> zeros, values = jnp.zeros((4, 1, 2)), jnp.array([2.0, 4.0, 8.0, 0.0])[:, None, None]
        >>> bias = jnp.array([[0.0], [1.0]])  # nothing for itself, SiLU(1) = 0.731 for others
        >>> hstu_attention(zeros, zeros, values, jnp.array([2, 1]), scale=1.0,
        ...                position_bias=bias)[:, 0, 0].round(3).tolist()
        [0.0, 1.462..., 0.0, 0.0]

        One row of a history of one and two targets, which see it but not each other:

        >>> hstu_attention(zeros + 1, zeros + 1, values, jnp.array([3]), alpha=0.5,
        ...                num_targets=jnp.array([2]))[:3, 0, 0].tolist()
        [1.46..., 4.38..., 7.31...]
    """
    if (time_bias is None) != (timestamps is None):
        raise ValueError("time_bias and timestamps come together; give both or neither")
    if query_timestamps is not None and timestamps is None:
        raise ValueError("query_timestamps needs time_bias and timestamps")
    mask = make_mask(
        lengths,
        causal=causal,
        num_targets=num_targets,
        contextual_length=contextual_length,
        max_attention_length=max_attention_length,
        min_full_attention_length=min_full_attention_length,
        target_group_size=target_group_size,
    )
    biases = jax.tree.map(jnp.asarray, {"position": position_bias, "time": time_bias})
    # A number is part of the compiled program, so that kernels apply it for nothing.
    is_number = scale is None or isinstance(scale, (int, float, np.number))
    factors = () if is_number else (_of_queries(scale, query),)
    attend = functools.partial(
        _attend_pointwise,
        alpha=1.0 if alpha is None else float(alpha),
        factor=float(scale) if is_number and scale is not None else 1.0,
    )
    if query_timestamps is None and query_lengths is None:
        query_timestamps = timestamps
    return _tiled(
        attend, lengths, query_lengths, mask, (query_timestamps, timestamps), biases,
        query, key, value, *factors, block_size=block_size,
    )  # fmt: skip


def _of_queries(scale: Any, query: AnyArray) -> Array:
    """Return the factor of each query, in float32 or wider."""
    shape = query.shape[:-2]
    if (scale := jnp.asarray(scale)).ndim and scale.shape != shape:
        raise ValueError(
            f"scale is a number or one for each query, {shape}; its shape is {scale.shape}"
        )
    return jnp.broadcast_to(scale.astype(jnp.promote_types(query.dtype, jnp.float32)), shape)


def _attend_pointwise(
    plan: TilePlan,
    biases: Any,
    query: Array,
    key: Array,
    value: Array,
    *scale: Array,
    alpha: float,
    factor: float,
) -> Array:
    bias, has_times = biases["position"], biases["time"] is not None
    platforms: tuple[str, ...] = ()
    if not has_times:
        platforms = native_attention.platforms(query, key, value, bias, is_scaled=bool(scale))
    if platforms:
        tiled = functools.partial(_sum_without_times, alpha, factor)
        call = native_attention.Call(tiled, alpha, factor, platforms)
        out = native_attention.attend(call, plan, bias, query, key, value)
    else:
        out = _sum_pointwise(alpha, factor, plan, biases, query, key, value)
    # A factor of the query may as well come after the sum, where it costs nothing.
    for each in scale:
        out = jnp.where(_exists(plan, query), out * each[:, None, None], 0)
    return out.astype(value.dtype)


def _sum_pointwise(
    alpha: float, factor: float, plan: TilePlan, biases: Any, query: Array, key: Array, value: Array
) -> Array:
    """Return the sum over keys, ``[queries, heads, value_dim]``, in float32 or wider."""
    pointwise = functools.partial(_pointwise, alpha=alpha)
    return factor * isolate(pointwise, plan, biases, query, key, value)


def _pointwise(
    plan: TilePlan, biases: Any, query: Array, key: Array, value: Array, *, alpha: float
) -> Array:
    q, k, v = _blocks(plan, query, key, value)
    tile = functools.partial(_hstu_tile, alpha=alpha)
    return _flat(plan, sum_tiles(tile, plan, biases, q, (k, v)), query)


def _sum_without_times(
    alpha: float, factor: float, plan: TilePlan, bias: Array | None, *arrays: Array
) -> Array:
    return _sum_pointwise(alpha, factor, plan, {"position": bias, "time": None}, *arrays)


def _hstu_tile(biases: Any, q: Array, keys: Any, tiles: Tiles, *, alpha: float) -> Array:
    k, v = keys
    scores = _scores(q, k, alpha)
    if biases["position"] is not None:
        scores = scores + _position_bias(biases["position"].astype(scores.dtype), tiles)
    if biases["time"] is not None:
        table = biases["time"].astype(scores.dtype)
        of_queries, of_keys = tiles.marks
        bucket = time_bucket(of_queries[:, :, None] - of_keys[:, None, :], table.shape[0])
        scores = scores + jnp.moveaxis(take(table, bucket), -1, 1)
    # SiLU needs no maximum and no total, so one pass over the tiles is enough.
    weights = jnp.where(tiles.mask[:, None], nnx.silu(scores), 0)
    return jnp.einsum("phab,pbhe->pahe", weights, v, preferred_element_type=weights.dtype)


def _position_bias(
    table: Float[Array, "distances heads"], tiles: Tiles
) -> Float[Array, "tiles heads block block"]:
    """Return the bias of each pair's distance."""
    block = tiles.positions.shape[1]
    if not tiles.is_aligned:
        distance = tiles.own[:, :, None] - tiles.positions[:, None, :]
        return jnp.moveaxis(take(table, jnp.clip(distance, 0, table.shape[0] - 1)), -1, 1)
    # Along a diagonal of a tile the distance is the same, so a tile has only 2 * block - 1 of them.
    # Repeating that many and one, and reading rows of one less, moves each row by one place.
    nearest = (tiles.queries - tiles.keys) * block + block - 1
    distance = nearest[:, None] - jnp.arange(2 * block, dtype=jnp.int32)[None]
    diagonals = jnp.moveaxis(take(table, jnp.clip(distance, 0, table.shape[0] - 1)), -1, 1)
    rows = jnp.broadcast_to(diagonals[:, :, None], (*diagonals.shape[:2], block, 2 * block))
    flat = rows.reshape(*rows.shape[:2], -1)[..., : block * (2 * block - 1)]
    return flat.reshape(*rows.shape[:2], block, 2 * block - 1)[..., block - 1 :]


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
    query_lengths: AnyArray | None,
    mask: AttentionMask,
    times: tuple[AnyArray | None, AnyArray | None],
    shared: Any,
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    *of_queries: Array,
    block_size: int,
) -> Array:
    """Call ``attend(plan, shared, query, ...)`` with one batch, or each device's batch."""
    if block_size < 1:
        raise ValueError(f"block_size is 1 or more, got {block_size}")
    _require_shapes(lengths, times, shared, query, key, value)
    if query_lengths is None and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"{query.shape[-3]} queries and {key.shape[-3]} keys: queries that are only the last "
            "elements of rows need query_lengths"
        )
    queries, heads, _ = query.shape[-3:]
    require_capacity("lengths", lengths, key.shape[-3])
    require_counts("num_targets", mask.num_targets, lengths)
    require_counts("query_lengths", query_lengths, lengths)
    if query_lengths is not None:
        require_capacity("query_lengths", query_lengths, queries)
    plan_of = functools.partial(
        plan_tiles,
        queries=queries,
        keys=key.shape[-3],
        block=max(1, min(block_size, queries)),
        heads=heads,
    )
    wrong_of = functools.partial(wrong_queries, queries=queries, keys=key.shape[-3])

    def call(lengths: Array, query_lengths: Any, mask: Any, times: Any, *arrays: Any) -> Array:
        facts = (lengths, query_lengths, mask)
        is_batch = lengths.ndim == 1
        plan = (plan_of if is_batch else jax.vmap(plan_of))(*facts, times)
        out = over_devices(attend, plan, *arrays)
        is_wrong = (wrong_of if is_batch else jax.vmap(wrong_of))(*facts)
        return jnp.where(is_wrong[..., None, None], jnp.nan, out)

    facts = (lengths, query_lengths, mask, times, shared, query, key, value, *of_queries)
    return on_auto_axes(call, *jax.tree.map(jnp.asarray, facts))


def _require_shapes(
    lengths: AnyArray,
    times: tuple[AnyArray | None, AnyArray | None],
    biases: Any,
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
) -> None:
    """Refuse shapes that contradict each other: broadcast or padded, they give wrong numbers."""
    devices = lengths.shape[:-1]
    shapes = tuple(array.shape for array in (query, key, value))
    ndim = len(devices) + 3
    if any(len(shape) != ndim or shape[:-3] != devices for shape in shapes):
        raise ValueError(
            f"query, key and value have {ndim} axes for lengths of shape {lengths.shape}: "
            f"{(*devices, 'elements', 'heads', 'columns')}; got {shapes}"
        )
    (*_, heads, dim), (*_, capacity, _, _), _ = shapes
    if not heads:
        raise ValueError(f"query, key and value have 1 head or more; got shapes {shapes}")
    if shapes[1][-2:] != (heads, dim) or shapes[2][-3:-1] != (capacity, heads):
        raise ValueError(
            "query, key and value have equal heads, query and key equal columns, and key and value "
            f"equal elements; got {shapes}"
        )
    of_queries, of_keys = times
    for name, given, array in (
        ("timestamps", of_keys, key),
        ("query_timestamps", of_queries, query),
    ):
        if given is not None and given.shape != array.shape[:-2]:
            raise ValueError(
                f"{name} has a time for each element, {array.shape[:-2]}; its shape is "
                f"{given.shape}"
            )
    for name, table in (biases or {}).items():
        if table is not None and (table.ndim != 2 or not table.shape[0] or table.shape[1] != heads):
            raise ValueError(
                f"{name}_bias has one row or more, each with a number for each head, here {heads}; "
                f"its shape is {table.shape}"
            )


def _blocks(plan: TilePlan, query: Array, *keys: Array) -> list[Array]:
    """Cut queries and arrays of keys into blocks, with zeros at padding."""
    # Padding may be NaN, and a mask that multiplies would keep NaN.
    is_key = jnp.arange(plan.key_blocks * plan.block, dtype=jnp.int32) < plan.offsets[1, -1]
    is_key = is_key.reshape(plan.key_blocks, plan.block)

    def cut(array: Array, exists: Array) -> Array:
        blocks = blocks_of(array, *exists.shape)
        return jnp.where(exists[:, :, None, None], blocks, jnp.zeros((), blocks.dtype))

    return [cut(query, plan.intervals.own >= 0), *(cut(array, is_key) for array in keys)]


def _flat(plan: TilePlan, blocks: Array, query: Array) -> Array:
    """Join blocks of results, in the order of ``query``, with zeros at padding."""
    flat = blocks.reshape(-1, *blocks.shape[2:])[: query.shape[0]]
    return jnp.where(_exists(plan, query), flat, 0)


def _exists(plan: TilePlan, query: Array) -> Array:
    """Return whether each query is not padding, ``[queries, 1, 1]``."""
    return (plan.intervals.own.reshape(-1)[: query.shape[0]] >= 0)[:, None, None]
