"""Jagged attention as plain matrices over all pairs of elements, to compare the tiles with."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Int32

from jaxrec.nn.tiled_attention import time_bucket
from jaxrec.ragged import complete_cumsum, segment_ids


def jagged_attention_reference(
    query: Float[Array, "capacity heads dim"],
    key: Float[Array, "capacity heads dim"],
    value: Float[Array, "capacity heads value_dim"],
    lengths: Int32[Array, " rows"],
    *,
    causal: bool = False,
) -> Float[Array, "capacity heads value_dim"]:
    """Compute `jaxrec.nn.jagged_attention` in memory quadratic in ``capacity``."""
    scores = jnp.einsum("ahd,bhd->hab", query, key) * query.shape[-1] ** -0.5
    mask = _of_one_row(lengths, query.shape[0], causal=causal)[None]
    weights = nnx.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.einsum("hab,bhe->ahe", jnp.where(mask, weights, 0), value)


def hstu_attention_reference(
    query: Float[Array, "capacity heads dim"],
    key: Float[Array, "capacity heads dim"],
    value: Float[Array, "capacity heads value_dim"],
    lengths: Int32[Array, " rows"],
    *,
    scale: float,
    position_bias: Float[Array, "distances heads"] | None = None,
    time_bias: Float[Array, "buckets heads"] | None = None,
    timestamps: Int[Array, " capacity"] | None = None,
) -> Float[Array, "capacity heads value_dim"]:
    """What `jaxrec.nn.hstu_attention` computes, in memory quadratic in ``capacity``."""
    scores = jnp.einsum("ahd,bhd->hab", query, key)
    places = jnp.arange(query.shape[0], dtype=jnp.int32)
    if position_bias is not None:
        distance = places[:, None] - places[None, :]
        bias = position_bias[jnp.clip(distance, 0, position_bias.shape[0] - 1)]
        scores = scores + jnp.moveaxis(bias, -1, 0)
    if time_bias is not None and timestamps is not None:
        bucket = time_bucket(timestamps[:, None] - timestamps[None, :], time_bias.shape[0])
        scores = scores + jnp.moveaxis(time_bias[bucket], -1, 0)
    mask = _of_one_row(lengths, query.shape[0], causal=True)[None]
    return jnp.einsum("hab,bhe->ahe", jnp.where(mask, nnx.silu(scores) * scale, 0), value)


def _of_one_row(
    lengths: Int32[Array, " rows"], capacity: int, *, causal: bool
) -> Bool[Array, "capacity capacity"]:
    rows = segment_ids(complete_cumsum(lengths), capacity)
    places = jnp.arange(capacity, dtype=jnp.int32)
    mask = (rows[:, None] == rows[None, :]) & (rows < lengths.shape[0])[:, None]
    return mask & (places[:, None] >= places[None, :]) if causal else mask
