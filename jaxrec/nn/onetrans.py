"""OneTrans: one transformer over a history's items and over tokens of all other features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection, EmbeddingCollection
from jaxrec.nn.arithmetic import promote
from jaxrec.nn.click_model import check_logit_layer
from jaxrec.nn.history_model import HistoryModel, Join
from jaxrec.nn.mlp import MLP
from jaxrec.nn.token_attention import attend, causal, recent
from jaxrec.nn.token_linear import TokenLinear
from jaxrec.ragged import JaggedArray

_normal = nnx.initializers.normal(0.02)


class OneTrans(HistoryModel):
    """Predicts clicks on a target by one causal transformer of histories and features.

    Zhang et al. 2025, "OneTrans: Unified feature interaction and sequence modeling with one
    transformer in industrial recommender" (arXiv:2510.26104), section 3:

    * An item of the history is projected to a token, and gets a vector of its position, counted
      from the newest. The target and all other features side by side are projected to
      ``num_tokens`` tokens, which stand after the history's (the paper's automatic split).
    * A block is ``z = x + attention(rms_norm(x))``, ``y = z + mlp(rms_norm(z))``. Each token sees
      itself and those before it. Tokens of the history share their projections and their MLP; each
      other token has its own.
    * Each block keeps fewer of the history's tokens, the newest ones: after block ``i`` of ``n``,
      ``ceil(max_length (n - i) / n)``; after the last none (the paper's pyramid).
    * An MLP reads the tokens that are left.

    With ``t = num_tokens``, a block has ``(t + 1) (4 dim^2 + 2 dim hidden + hidden + 5 dim) + 2
    dim`` parameters. In the last one no token of the history is a query: it has ``2 dim^2 + 2 dim
    hidden + hidden + 3 dim`` less. A block that reads ``m`` tokens and keeps ``k`` takes ``2 (2 m
    dim^2 + k (2 dim^2 + 2 dim hidden) + 2 m k dim)`` FLOPs per sample in its products.

    Args:
        items: Tables of the histories and the targets.
        pairs: From each history feature to its target feature, as for `DIN`.
        profile: Tables of the sample's other features, pooled; None: no such features.
        num_dense: Number of dense features.
        max_length: Number of items that are read, the last ones of each history.
        num_tokens: Number of tokens of the target and the other features.
        dim: Columns of a token.
        num_layers: Number of blocks.
        num_heads: Heads of the blocks, a divisor of ``dim``.
        hidden_dim: Hidden columns of the blocks.
        top_layer_sizes: Layers of the MLP on top; the last is 1.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: As for `DIN`, a size is below 1, or ``num_heads`` does not divide ``dim``.

    Example:
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> items = jaxrec.EmbeddingCollection(
        ...     [jaxrec.EmbeddingConfig("item", 100, 8, feature_names=("history", "target"))],
        ...     rngs=rngs)
        >>> model = OneTrans(items, {"history": "target"}, max_length=4, num_tokens=3, dim=16,
        ...                  num_layers=2, hidden_dim=16, top_layer_sizes=(1,), rngs=rngs)
        >>> batch = jaxrec.KeyedJaggedArray.from_lists(
        ...     {"history": [[1, 2, 3], []], "target": [[4], [5]]})
        >>> model(None, batch).shape
        (2,)
    """

    def __init__(
        self,
        items: EmbeddingCollection,
        pairs: Mapping[str, str],
        *,
        profile: EmbeddingBagCollection | None = None,
        num_dense: int = 0,
        max_length: int,
        num_tokens: int = 8,
        dim: int = 32,
        num_layers: int = 2,
        num_heads: int = 1,
        hidden_dim: int = 64,
        top_layer_sizes: Sequence[int] = (1,),
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if min(max_length, num_tokens, dim, num_layers, hidden_dim, num_heads) < 1:
            raise ValueError(
                "OneTrans's sizes are 1 or more; got "
                f"max_length={max_length}, num_tokens={num_tokens}, dim={dim}, "
                f"num_layers={num_layers}, num_heads={num_heads}, hidden_dim={hidden_dim}"
            )
        if dim % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide dim={dim}")
        check_logit_layer("top_layer_sizes", top_layer_sizes)
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(items, pairs, profile=profile, num_dense=num_dense, dtype=dtype)
        self.num_tokens, self.dim = num_tokens, dim
        self.kept = tuple(
            -(-max_length * (num_layers - i) // num_layers) for i in range(num_layers + 1)
        )
        self.positions = nnx.Param(_normal(rngs.params(), (max_length, dim), param_dtype))
        self.event = nnx.Linear(self.item_columns, dim, **types)
        self.split = nnx.Linear(self.columns, num_tokens * dim, **types)
        self.blocks = nnx.List(
            OneTransBlock(dim, num_tokens, num_heads, hidden_dim, asks=kept > 0, **types)
            for kept in self.kept[1:]
        )
        self.norm = nnx.RMSNorm(dim, **types)
        self.top = MLP(num_tokens * dim, top_layer_sizes, activation_on_last=False, **types)

    def logits(self, history: JaggedArray, target: Array, join: Join) -> Float[Array, " batch"]:
        values, exists = recent(history, self.kept[0])
        events, positions = promote(self.dtype, self.event(values), self.positions[...])
        others = self.split(join()).reshape(-1, self.num_tokens, self.dim)
        mask = causal(exists, self.num_tokens)
        x = jnp.concatenate([events + positions[None], others], axis=1)
        for block, kept in zip(self.blocks, self.kept[1:], strict=True):
            queries = kept + self.num_tokens
            x = block(x, queries, mask[:, -queries:, -x.shape[1] :])
        return self.top(self.norm(x).reshape(x.shape[0], -1))[:, 0]


class MixedLinear(nnx.Module):
    """A dense layer that the history's tokens share, and one for each of the others."""

    def __init__(
        self, in_features: int, out_features: int, num_tokens: int, is_shared: bool, **types: Any
    ):
        self.shared = nnx.Linear(in_features, out_features, **types) if is_shared else None
        self.own = TokenLinear(num_tokens, in_features, out_features, **types)
        self.num_tokens = num_tokens

    def __call__(self, x: Float[Array, "batch n _"]) -> Float[Array, "batch n out"]:
        own = self.own(x[:, x.shape[1] - self.num_tokens :])
        if self.shared is None:
            return own
        return jnp.concatenate([self.shared(x[:, : -self.num_tokens]), own], axis=1)


class OneTransBlock(nnx.Module):
    """A block of `OneTrans`; ``asks`` says whether tokens of the history are among its queries."""

    def __init__(
        self,
        dim: int,
        num_tokens: int,
        num_heads: int,
        hidden_dim: int,
        *,
        asks: bool,
        **types: Any,
    ):
        def linear(in_features: int, out_features: int, is_shared: bool = asks) -> MixedLinear:
            return MixedLinear(in_features, out_features, num_tokens, is_shared, **types)

        self.key, self.value = linear(dim, dim, True), linear(dim, dim, True)
        self.query, self.out = linear(dim, dim), linear(dim, dim)
        self.hidden, self.last = linear(dim, hidden_dim), linear(hidden_dim, dim)
        self.attention_norm, self.dense_norm = (nnx.RMSNorm(dim, **types) for _ in range(2))
        self.num_heads = num_heads

    def __call__(
        self, x: Float[Array, "batch m dim"], kept: int, mask: Bool[Array, "batch kept m"]
    ) -> Float[Array, "batch kept dim"]:
        """Transform the last ``kept`` tokens, which attend to all."""
        normed = self.attention_norm(x)
        query = self.query(normed[:, -kept:])
        attended = attend(query, self.key(normed), self.value(normed), mask, self.num_heads)
        x = x[:, -kept:] + self.out(attended)
        return x + self.last(nnx.relu(self.hidden(self.dense_norm(x))))
