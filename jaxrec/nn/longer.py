"""LONGER: long histories, merged into fewer tokens, read by a few tokens that stand for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection, EmbeddingCollection
from jaxrec.nn.arithmetic import promote
from jaxrec.nn.click_model import check_logit_layer
from jaxrec.nn.history_model import HistoryModel, Join
from jaxrec.nn.mlp import MLP
from jaxrec.nn.token_attention import TokenBlock, causal, recent
from jaxrec.ragged import JaggedArray

_normal = nnx.initializers.normal(0.02)


class LONGER(HistoryModel):
    """Predicts clicks on a target from a long history.

    Chai et al. 2025, "LONGER: Scaling up long sequence modeling in industrial recommenders"
    (arXiv:2505.04421), section 3:

    * Items get a vector of their position, counted from the newest. Each ``merge`` neighbours
      attend to each other (the paper's InnerTrans) and are merged: their concatenation is
      projected to a token of ``dim`` columns.
    * Global tokens are the target, a learned one, and the profile with the dense features, if
      there are any. They see all tokens; tokens of the history see themselves and earlier ones,
      never a global token, so that a history's keys and values serve every target.
    * In the first block only the global tokens and the newest ``num_queries`` tokens are queries;
      the keys are the whole history. In later blocks these tokens are queries and keys.
    * An MLP reads the global tokens, the target and all other features.

    With ``g`` global tokens, ``q = g + num_queries`` and ``l = max_length / merge``, the first
    block takes ``2 (q (2 dim^2 + 2 dim hidden) + (g + l) (2 dim^2 + 2 q dim))`` FLOPs per sample in
    its products, and a later one the same with ``q`` for ``g + l``. A block has
    ``4 dim^2 + 2 dim hidden + 9 dim + hidden`` parameters, merging
    ``merge * item_columns * dim + dim`` beside its own block of width ``item_columns``.

    Args:
        items: Tables of the histories and the targets.
        pairs: From each history feature to its target feature, as for `DIN`.
        profile: Tables of the sample's other features, pooled; None: no such features.
        num_dense: Number of dense features.
        max_length: Number of items that are read, the last ones of each history; a multiple of
            ``merge``.
        merge: Number of neighbours that become one token.
        dim: Columns of a token.
        num_layers: Number of blocks, the first one included.
        num_heads: Heads of the blocks, a divisor of ``dim``.
        hidden_dim: Hidden columns of the blocks.
        num_queries: Number of the newest tokens that are queries, at most ``max_length / merge``.
        top_layer_sizes: Layers of the MLP on top; the last is 1.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: As for `DIN`, or a size is not as given above.

    Example:
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> items = jaxrec.EmbeddingCollection(
        ...     [jaxrec.EmbeddingConfig("item", 100, 8, feature_names=("history", "target"))],
        ...     rngs=rngs)
        >>> model = LONGER(items, {"history": "target"}, max_length=8, merge=2, dim=16,
        ...                num_queries=2, hidden_dim=16, top_layer_sizes=(16, 1), rngs=rngs)
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
        merge: int = 4,
        dim: int = 32,
        num_layers: int = 2,
        num_heads: int = 1,
        hidden_dim: int = 64,
        num_queries: int,
        top_layer_sizes: Sequence[int] = (200, 80, 1),
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if merge < 1 or max_length < 1 or max_length % merge:
            raise ValueError(
                f"max_length={max_length} items do not divide into groups of merge={merge}"
            )
        if not 0 <= num_queries <= max_length // merge or num_layers < 1:
            raise ValueError(
                f"num_queries counts some of the {max_length // merge} merged tokens, and there is "
                f"a layer or more; got num_queries={num_queries}, num_layers={num_layers}"
            )
        check_logit_layer("top_layer_sizes", top_layer_sizes)
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(items, pairs, profile=profile, num_dense=num_dense, dtype=dtype)
        self.max_length, self.merge, self.num_queries = max_length, merge, num_queries
        self.positions = nnx.Param(
            _normal(rngs.params(), (max_length, self.item_columns), param_dtype)
        )
        self.inner = TokenBlock(self.item_columns, 1, self.item_columns, norm="pre", **types)
        self.merged = nnx.Linear(merge * self.item_columns, dim, **types)
        self.learned = nnx.Param(_normal(rngs.params(), (1, dim), param_dtype))
        self.target = nnx.Linear(self.item_columns, dim, **types)
        self.others = nnx.Linear(self.columns, dim, **types) if self.profile_columns else None
        self.num_globals = 2 + bool(self.profile_columns)
        self.blocks = nnx.List(
            TokenBlock(dim, num_heads, hidden_dim, norm="pre", **types) for _ in range(num_layers)
        )
        self.norm = nnx.LayerNorm(dim, **types)
        columns = self.num_globals * dim + self.columns
        self.top = MLP(columns, top_layer_sizes, activation_on_last=False, **types)

    def logits(self, history: JaggedArray, target: Array, join: Join) -> Float[Array, " batch"]:
        values, exists = recent(history, self.max_length)
        values, positions = promote(self.dtype, values, self.positions[...])
        groups = (values + positions[None]).reshape(-1, self.merge, self.item_columns)
        mask = exists.reshape(-1, 1, self.merge) | jnp.eye(self.merge, dtype=bool)[None]
        groups = jnp.where(exists.reshape(-1, self.merge, 1), self.inner(groups, groups, mask), 0)
        batch = values.shape[0]
        merged = self.merged(groups.reshape(batch, -1, self.merge * self.item_columns))
        exists = exists.reshape(batch, -1, self.merge).any(axis=2)

        tokens = jnp.concatenate([merged, self._globals(merged, target, join)], axis=1)
        # Which tokens see which; the global ones come last, and also see each other.
        is_global = jnp.arange(tokens.shape[1]) >= exists.shape[1]
        mask = causal(exists, self.num_globals) | (is_global[:, None] & is_global[None])[None]
        first = exists.shape[1] - self.num_queries
        x = self.blocks[0](tokens[:, first:], tokens, mask[:, first:])
        for block in self.blocks[1:]:
            x = block(x, x, mask[:, first:, first:])
        globals_ = self.norm(x[:, self.num_queries :]).reshape(batch, -1)
        return self.top(join(globals_))[:, 0]

    def _globals(self, merged: Array, target: Array, join: Join) -> Array:
        """Return the global tokens, ``[batch, num_globals, dim]``."""
        tokens = [self.target(target.reshape(-1, target.shape[-1]))]
        if self.others is not None:
            tokens.append(self.others(join()))
        learned = jnp.broadcast_to(self.learned[...], tokens[0].shape)
        return jnp.stack(promote(merged.dtype, *tokens, learned), axis=1)
