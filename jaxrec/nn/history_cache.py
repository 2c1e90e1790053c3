"""Keys and values of a history that an HSTU ranker keeps, and attention of new tokens to them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.ragged import complete_cumsum
from jaxrec.ragged.fbgemm import jagged_to_padded_dense


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HistoryCache:
    """Keys and values of the histories of a batch of users, which `HSTURanker.encode` returns.

    Every array of this pytree has one row per user, so `jax.tree.map` stacks and picks users. Keys
    and values after a row's last token are zeros. Over a mesh each array has a first axis more, the
    devices.

    Attributes:
        keys: One array a layer, ``[rows, capacity, heads, qk_dim]``: keys of context and history,
            oldest first, from the start of each row.
        values: The same, ``[rows, capacity, heads, value_dim]``.
        lengths: ``[rows]`` int32, tokens of context and history.
        newest: ``[rows]`` int32, time of the newest event; 0 without times.
        request: ``[rows]`` int32, time of the request that the history was encoded for; the time of
            the newest event if the model needs none.
    """

    keys: tuple[Float[Array, "*devices rows _ heads qk_dim"], ...]
    values: tuple[Float[Array, "*devices rows _ heads value_dim"], ...]
    lengths: Int32[Array, "*devices rows"]
    newest: Int32[Array, "*devices rows"]
    request: Int32[Array, "*devices rows"]


def rows_of(lengths: Array, values: Array, capacity: int) -> Array:
    """Return ragged rows ``[elements, ...]`` as ``[rows, capacity, ...]``, cut or padded."""
    return jagged_to_padded_dense(values, complete_cumsum(lengths), capacity)


def write_rows(starts: Array, counts: Array, cached: Array, new: Array) -> Array:
    """Write ``new`` ``[rows, n, ...]`` behind the tokens that each row of a cache has."""
    within = jnp.arange(new.shape[1], dtype=jnp.int32)
    places = starts[:, None] + within[None, :]
    places = jnp.where(within[None, :] < counts[:, None], places, cached.shape[1])
    rows = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]
    return cached.at[rows, places].set(new, mode="drop")


def attend_rows(
    query: Float[Array, "rows n heads dim"],
    keys: Float[Array, "rows capacity heads dim"],
    values: Float[Array, "rows capacity heads value_dim"],
    mask: Bool[Array, "rows n capacity"],
    *,
    alpha: float,
    scale: float | Array,
) -> Float[Array, "rows n heads value_dim"]:
    """Return the pointwise attention of some tokens of each row to the cached ones they see."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    heads = (query.shape[0], query.shape[2])

    # One batch axis of rows and heads: with two, XLA's products on a CPU take 1.7 times as long.
    def by_head(x: Array) -> Array:
        return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], x.shape[3])

    scores = jnp.einsum("gnd,gcd->gnc", by_head(query), by_head(keys), preferred_element_type=wide)
    weights = (nnx.silu(scores * alpha) * scale).reshape(*heads, *scores.shape[1:])
    weights = jnp.where(mask[:, None], weights, 0).reshape(scores.shape)
    out = jnp.einsum("gnc,gce->gne", weights, by_head(values), preferred_element_type=wide)
    out = jnp.swapaxes(out.reshape(*heads, *out.shape[1:]), 1, 2)
    return out.astype(values.dtype)


def attend_itself(
    query: Float[Array, "rows n heads dim"],
    key: Float[Array, "rows n heads dim"],
    value: Float[Array, "rows n heads value_dim"],
    *,
    alpha: float,
    scale: float | Array,
) -> Float[Array, "rows n heads value_dim"]:
    """Return the part of each token's attention that comes from the token itself."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bnhd,bnhd->bnh", query, key, preferred_element_type=wide) * alpha
    return ((nnx.silu(scores) * scale)[..., None] * value).astype(value.dtype)
