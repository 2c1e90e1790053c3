"""Transformer blocks over codes: whole ragged rows, or a few new tokens against cached ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

from jaxrec.nn.history_cache import rows_of
from jaxrec.nn.sequence import JaggedSelfAttention
from jaxrec.ragged.arrays import each_device

_HIDDEN_FACTOR = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Keys and values of a batch of histories, which all codes to be generated attend to.

    Attributes:
        keys: By block ``[rows, tokens, heads, dim]``.
        values: The same.
        lengths: ``[rows]`` tokens of each row.
    """

    keys: tuple[Float[Array, "*devices rows tokens heads dim"], ...]
    values: tuple[Float[Array, "*devices rows tokens heads dim"], ...]
    lengths: Int32[Array, "*devices rows"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Suffix:
    """Keys and values of the tokens that each beam has generated, by block.

    Arrays are ``[rows, beams, tokens, heads, dim]``.
    """

    keys: tuple[Float[Array, "rows beams tokens heads dim"], ...]
    values: tuple[Float[Array, "rows beams tokens heads dim"], ...]

    def with_block(self, number: int, key: Array, value: Array) -> Suffix:
        """Return the suffix with one more token of a block, ``[rows, beams, 1, heads, dim]``."""

        def longer(cached: tuple[Array, ...], new: Array) -> tuple[Array, ...]:
            joined = jnp.concatenate([cached[number], new], axis=2)
            return (*cached[:number], joined, *cached[number + 1 :])

        return Suffix(longer(self.keys, key), longer(self.values, value))


def attend(
    query: Float[Array, "*batch n heads dim"],
    key: Float[Array, "... tokens heads dim"],
    value: Float[Array, "... tokens heads dim"],
    mask: Bool[Array, "..."] | None,
) -> Float[Array, "*batch n heads dim"]:
    """Return softmax attention to the keys that ``mask`` ``[..., n, tokens]`` shows; None: to all.

    Batch axes of keys, values and mask are those of the queries, or 1.
    """
    scores = _scores("...nhd,...chd->...hnc", query, key)
    if mask is not None:
        of_heads = mask[..., None, :, :]
        of_heads = of_heads.reshape((1,) * (scores.ndim - of_heads.ndim) + of_heads.shape)
        scores = jnp.where(of_heads, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("...hnc,...chd->...nhd", weights, value, preferred_element_type=weights.dtype)
    return out.astype(query.dtype)


def attend_beams(
    query: Float[Array, "rows beams heads dim"],
    key: Float[Array, "rows beams n heads dim"],
    value: Float[Array, "rows beams n heads dim"],
    history_key: Float[Array, "rows tokens heads dim"],
    history_value: Float[Array, "rows tokens heads dim"],
    seen: Bool[Array, "rows tokens"],
) -> Float[Array, "rows beams heads dim"]:
    """Return the attention of each beam's newest token to its own tokens and to the history."""
    # All beams share the history's keys, which are not repeated for each.
    of_history = _scores("rbhd,rthd->rbht", query, history_key)
    of_history = jnp.where(seen[:, None, None], of_history, -jnp.inf)
    own = _scores("rbhd,rbnhd->rbhn", query, key)
    weights = jax.nn.softmax(jnp.concatenate([of_history, own], axis=-1), axis=-1)
    tokens, wide = history_key.shape[1], weights.dtype
    out = jnp.einsum(
        "rbht,rthd->rbhd", weights[..., :tokens], history_value, preferred_element_type=wide
    ) + jnp.einsum("rbhn,rbnhd->rbhd", weights[..., tokens:], value, preferred_element_type=wide)
    return out.astype(query.dtype)


def _scores(axes: str, query: Array, key: Array) -> Array:
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return jnp.einsum(axes, query, key, preferred_element_type=wide) * query.shape[-1] ** -0.5


class CrossAttention(nnx.Module):
    """Multi-head attention of codes to the tokens of a history (arXiv:1706.03762, section 3.2.3).

    ``keys_of`` makes a history's keys and values, and the call attends to them.
    """

    def __init__(self, dim: int, num_heads: int, *, rngs: nnx.Rngs, **types: Any):
        self.query, self.key, self.value, self.out = (
            nnx.Linear(dim, dim, rngs=rngs, **types) for _ in range(4)
        )
        self.num_heads = num_heads

    def keys_of(self, states: Float[Array, "*axes dim"]) -> tuple[Array, Array]:
        """Return keys and values ``[..., heads, dim]`` of a history's states."""
        heads = (*states.shape[:-1], self.num_heads, -1)
        return self.key(states).reshape(heads), self.value(states).reshape(heads)

    def __call__(
        self,
        states: Float[Array, "*batch n dim"],
        keys: Float[Array, "..."],
        values: Float[Array, "..."],
        mask: Bool[Array, "..."],
    ) -> Float[Array, "*batch n dim"]:
        """Return the attention of each of ``n`` tokens to the history."""
        query = self.query(states).reshape(*states.shape[:-1], self.num_heads, -1)
        return self.out(attend(query, keys, values, mask).reshape(states.shape))


class CodeBlock(nnx.Module):
    """Self-attention, attention to a history if ``has_cross``, and two dense layers.

    Each has a layer norm before it and a shortcut: ``x + dropout(f(layer_norm(x)))``. The dense
    layers are ``4 dim`` wide, with a ReLU between them, as those of T5 (arXiv:1910.10683) and of
    TIGER (arXiv:2305.05065).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        causal: bool,
        has_cross: bool = False,
        dropout_rate: float,
        block_size: int,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.attention = JaggedSelfAttention(
            dim, num_heads, causal=causal, block_size=block_size, **types
        )
        self.attention_norm, self.dense_norm = (nnx.LayerNorm(dim, **types) for _ in range(2))
        self.cross = CrossAttention(dim, num_heads, **types) if has_cross else None
        self.cross_norm = nnx.LayerNorm(dim, **types) if has_cross else None
        self.hidden = nnx.Linear(dim, _HIDDEN_FACTOR * dim, **types)
        self.out = nnx.Linear(_HIDDEN_FACTOR * dim, dim, **types)
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)

    def ragged(
        self, states: Float[Array, "*devices capacity dim"], lengths: Array
    ) -> Float[Array, "*devices capacity dim"]:
        """Transform whole rows, ``[capacity, dim]`` with lengths ``[rows]``."""
        attended = self.attention(self.attention_norm(states), lengths)
        return self._dense(states + self.dropout(attended))

    def keys_of(self, states: Float[Array, "*axes dim"]) -> tuple[Array, Array]:
        """Return keys and values ``[..., heads, dim]`` that `ragged` makes of these states."""
        normed = self.attention_norm(states)
        heads = (*states.shape[:-1], self.attention.num_heads, -1)
        return (
            self.attention.key(normed).reshape(heads),
            self.attention.value(normed).reshape(heads),
        )

    def extend(
        self,
        states: Float[Array, "rows beams 1 dim"],
        key: Array,
        value: Array,
        history_key: Array,
        history_value: Array,
        seen: Bool[Array, "rows tokens"],
    ) -> Float[Array, "rows beams 1 dim"]:
        """Transform each beam's newest token, as `ragged` would behind history and older tokens.

        Keys and values are those of `attend_beams`; ``key`` and ``value`` have the token's own.
        """
        query = self._query(states)[:, :, 0]
        attended = attend_beams(query, key, value, history_key, history_value, seen)
        attended = attended.reshape(*attended.shape[:2], -1)[:, :, None]
        return self._dense(states + self.dropout(self.attention.out(attended)))

    def cross_extend(
        self,
        states: Float[Array, "*batch n dim"],
        key: Float[Array, "..."],
        value: Float[Array, "..."],
        mask: Bool[Array, "..."] | None,
        history_key: Array,
        history_value: Array,
        seen: Bool[Array, "..."],
    ) -> Float[Array, "*batch n dim"]:
        """Transform ``n`` tokens by attention to their own keys, then to those of a history."""
        assert self.cross is not None
        assert self.cross_norm is not None
        attended = attend(self._query(states), key, value, mask).reshape(states.shape)
        states = states + self.dropout(self.attention.out(attended))
        crossed = self.cross(self.cross_norm(states), history_key, history_value, seen)
        return self._dense(states + self.dropout(crossed))

    def _query(self, states: Array) -> Array:
        query = self.attention.query(self.attention_norm(states))
        return query.reshape(*states.shape[:-1], self.attention.num_heads, -1)

    def _dense(self, states: Array) -> Array:
        hidden = self.dropout(nnx.relu(self.hidden(self.dense_norm(states))))
        return states + self.dropout(self.out(hidden))


def padded(lengths: Array, values: Array, size: int) -> Array:
    """Return ragged values ``[capacity, ...]`` as ``[rows, size, ...]``."""
    return each_device(lambda lengths, values: rows_of(lengths, values, size), lengths, values)
