"""Attention among a sample's tokens: the last items of its history, and tokens of all else."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float

from jaxrec.ragged import JaggedArray
from jaxrec.ragged.arrays import each_device, on_auto_axes, take


def recent(
    column: JaggedArray, length: int
) -> tuple[Float[Array, "batch length dim"], Bool[Array, "batch length"]]:
    """Return the last elements of each row, the newest at the end, and which of them exist.

    Elements before the first of a row are zeros. Over a mesh the axes of devices and rows become
    one.
    """

    def of_device(lengths: Array, values: Array) -> tuple[Array, Array]:
        ends = jnp.cumsum(lengths, dtype=jnp.int32)[:, None]
        back = jnp.arange(length, 0, -1, dtype=jnp.int32)[None]
        exists = back <= lengths[:, None]
        return take(values, jnp.where(exists, ends - back, values.shape[0])), exists

    values, exists = each_device(of_device, jnp.asarray(column.lengths), jnp.asarray(column.values))
    return values.reshape(-1, *values.shape[-2:]), exists.reshape(-1, length)


def attend(
    query: Float[Array, "batch n dim"],
    key: Float[Array, "batch m dim"],
    value: Float[Array, "batch m dim"],
    mask: Bool[Array, "batch n m"],
    num_heads: int,
) -> Float[Array, "batch n dim"]:
    """Return softmax attention of several heads; each query must see a key.

    Vaswani et al. 2017 (arXiv:1706.03762), section 3.2. The softmax is in float32 or wider.
    """

    def of_samples(query: Array, key: Array, value: Array, mask: Array) -> Array:
        heads = (num_heads, query.shape[2] // num_heads)

        # One batch axis of samples and heads: with two, XLA's products on a CPU take longer.
        def by_head(x: Array) -> Array:
            return jnp.swapaxes(x.reshape(*x.shape[:2], *heads), 1, 2).reshape(
                -1, x.shape[1], heads[1]
            )

        query, key, value = by_head(query), by_head(key), by_head(value)
        wide = jnp.promote_types(query.dtype, jnp.float32)
        scores = jnp.einsum("gnd,gmd->gnm", query, key, preferred_element_type=wide)
        scores = scores.reshape(-1, num_heads, *scores.shape[1:]) / heads[1] ** 0.5
        weights = nnx.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
        weights = weights.reshape(-1, *weights.shape[2:]).astype(value.dtype)
        out = jnp.einsum("gnm,gmd->gnd", weights, value)
        out = out.reshape(-1, num_heads, *out.shape[1:])
        return jnp.swapaxes(out, 1, 2).reshape(out.shape[0], out.shape[2], -1)

    return on_auto_axes(of_samples, query, key, value, mask)


def causal(
    exists: Bool[Array, "batch length"], num_after: int
) -> Bool[Array, "batch tokens tokens"]:
    """Return which tokens see which: of a history's items, and ``num_after`` tokens after them.

    Each token sees itself and the tokens before it that exist.
    """
    exists = jnp.pad(exists, ((0, 0), (0, num_after)), constant_values=True)
    earlier = jnp.tri(exists.shape[1], k=-1, dtype=bool)
    return earlier[None] & exists[:, None] | jnp.eye(exists.shape[1], dtype=bool)[None]


class TokenBlock(nnx.Module):
    """Attention of some tokens to others, then two dense layers, each with a shortcut.

    With ``norm="pre"`` a layer norm comes before each of the two, with "post" after the shortcut.
    The block has ``4 dim (dim + 1) + (2 hidden + 1) dim + hidden + 4 dim`` parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        hidden_dim: int,
        *,
        norm: Literal["pre", "post"],
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide dim={dim}")
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.query, self.key, self.value, self.out = (
            nnx.Linear(dim, dim, **types) for _ in range(4)
        )
        self.attention_norm, self.dense_norm = (nnx.LayerNorm(dim, **types) for _ in range(2))
        self.hidden = nnx.Linear(dim, hidden_dim, **types)
        self.last = nnx.Linear(hidden_dim, dim, **types)
        self.num_heads = num_heads
        self.norm = norm

    def __call__(
        self,
        tokens: Float[Array, "batch n dim"],
        seen: Float[Array, "batch m dim"],
        mask: Bool[Array, "batch n m"],
    ) -> Float[Array, "batch n dim"]:
        """Transform ``tokens``, which attend to ``seen`` as the mask says."""
        if self.norm == "post":
            x = self.attention_norm(tokens + self._attend(tokens, seen, mask))
            return self.dense_norm(x + self._dense(x))
        normed = self.attention_norm(tokens), self.attention_norm(seen)
        x = tokens + self._attend(*normed, mask)
        return x + self._dense(self.dense_norm(x))

    def _attend(self, tokens: Array, seen: Array, mask: Array) -> Array:
        attended = attend(
            self.query(tokens), self.key(seen), self.value(seen), mask, self.num_heads
        )
        return self.out(attended)

    def _dense(self, x: Array) -> Array:
        return self.last(nnx.relu(self.hidden(x)))
