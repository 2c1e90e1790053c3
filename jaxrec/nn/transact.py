"""TransAct: a transformer over the newest items of a history, each joined with the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection, EmbeddingCollection
from jaxrec.nn.click_model import check_logit_layer
from jaxrec.nn.crossnet import CrossNet
from jaxrec.nn.history_model import HistoryModel, Join
from jaxrec.nn.mlp import MLP
from jaxrec.nn.token_attention import TokenBlock, recent
from jaxrec.ragged import JaggedArray


class TransAct(HistoryModel):
    """Predicts clicks on a target by a transformer over a history's last items.

    Xia et al. 2023, "TransAct: Transformer-based realtime user action model for recommendation at
    Pinterest" (arXiv:2306.00248), section 3.3. A token is an item's embedding beside the target's,
    ``[e_j, t]``; there are no positions. Blocks of attention and ReLU layers, with layer norms
    after the shortcuts, transform the tokens. The newest ``num_newest`` of them, and the largest
    value of each column over all, through a dense layer, join the target and all other features in
    a cross network, then an MLP. The paper also embeds the action of each event, and hides random
    newest events in training.

    For ``d = 2 * item_columns`` and ``l`` tokens, a block has ``4 d^2 + 2 d hidden + 9 d + hidden``
    parameters, and ``2 l (4 d^2 + 2 d hidden + 2 l d)`` FLOPs per sample in its products.

    Args:
        items: Tables of the histories and the targets.
        pairs: From each history feature to its target feature, as for `DIN`.
        profile: Tables of the sample's other features, pooled; None: no such features.
        num_dense: Number of dense features.
        max_length: Number of items that are read, the last ones of each history.
        num_layers: Number of blocks.
        num_heads: Heads of the attention, a divisor of ``d``.
        hidden_dim: Hidden columns of the blocks.
        num_newest: Number of tokens whose states are read by themselves.
        cross_layers: Layers of the `CrossNet` on top.
        top_layer_sizes: Layers of the MLP after it; the last is 1.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: As for `DIN`, ``num_heads`` does not divide ``d``, or ``num_newest`` is above
            ``max_length``.

    Example:
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> items = jaxrec.EmbeddingCollection(
        ...     [jaxrec.EmbeddingConfig("item", 100, 8, feature_names=("history", "target"))],
        ...     rngs=rngs)
        >>> model = TransAct(items, {"history": "target"}, max_length=4, num_newest=2,
        ...                  top_layer_sizes=(16, 1), rngs=rngs)
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
        num_layers: int = 2,
        num_heads: int = 1,
        hidden_dim: int = 32,
        num_newest: int = 10,
        cross_layers: int = 2,
        top_layer_sizes: Sequence[int] = (200, 80, 1),
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if not 0 <= num_newest <= max_length or max_length < 1:
            raise ValueError(
                "num_newest counts some of the max_length items that are read; got "
                f"num_newest={num_newest}, max_length={max_length}"
            )
        check_logit_layer("top_layer_sizes", top_layer_sizes)
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(items, pairs, profile=profile, num_dense=num_dense, dtype=dtype)
        self.max_length = max_length
        self.num_newest = num_newest
        width = 2 * self.item_columns
        self.blocks = nnx.List(
            TokenBlock(width, num_heads, hidden_dim, norm="post", **types)
            for _ in range(num_layers)
        )
        self.pooled = nnx.Linear(width, width, **types)
        columns = width * (1 + num_newest) + self.columns
        self.cross = CrossNet(columns, cross_layers, **types)
        self.top = MLP(columns, top_layer_sizes, activation_on_last=False, **types)

    def logits(self, history: JaggedArray, target: Array, join: Join) -> Float[Array, " batch"]:
        values, exists = recent(history, self.max_length)
        targets = target.reshape(-1, 1, target.shape[-1])
        x = jnp.concatenate([values, jnp.broadcast_to(targets, values.shape)], axis=2)
        # A place before the first item sees itself alone, and is seen by none.
        mask = exists[:, None] | jnp.eye(self.max_length, dtype=bool)[None]
        for block in self.blocks:
            x = block(x, x, mask)
        x = jnp.where(exists[..., None], x, 0)
        # The gradient of `max` compares values with their maximum. XLA may compute the two apart,
        # with other last digits, and the gradient would be lost.
        places = jnp.where(exists[..., None], x, -jnp.inf).argmax(axis=1)
        is_largest = jnp.arange(self.max_length)[None, :, None] == places[:, None]
        largest = jnp.where(is_largest, x, 0).sum(axis=1)
        newest = x[:, self.max_length - self.num_newest :].reshape(x.shape[0], -1)
        return self.top(self.cross(join(newest, self.pooled(largest))))[:, 0]
