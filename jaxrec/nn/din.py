"""Deep interest networks, which weigh a history by its relevance to the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection, EmbeddingCollection
from jaxrec.nn.arithmetic import promote
from jaxrec.nn.click_model import check_logit_layer
from jaxrec.nn.history_model import HistoryModel, Join
from jaxrec.nn.mlp import MLP, Activation
from jaxrec.ragged import JaggedArray, complete_cumsum, segment_ids
from jaxrec.ragged.arrays import AnyArray, each_device
from jaxrec.ragged.offsets import without_padding


class TargetAttention(nnx.Module):
    """Sums a history's elements, each weighed by its relevance to the sample's target.

    ``sum_j a(e_j, t) e_j``, where ``a`` is an MLP of ``[e_j, t, e_j - t, e_j * t]``. Weights are
    not normalised, so the sum keeps the intensity of an interest. Zhou et al. 2018
    (arXiv:1706.06978), equation 3 and figure 2, with the elementwise product in place of the outer
    one, as in the authors' code. Histories are not padded.

    Args:
        dim: Columns of elements and targets.
        layer_sizes: Columns of each layer of ``a``, at least two layers; the last is 1.
        activation: Activation of each layer but the last. It must treat each element of a history
            alone, which `Dice` in training does not.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values.

    Example:
        >>> import jax.numpy as jnp
        >>> history = JaggedArray(jnp.ones((4, 8)), jnp.array([1, 2]))
        >>> TargetAttention(8, rngs=nnx.Rngs(0))(history, jnp.ones((2, 8))).shape
        (2, 8)
    """

    def __init__(
        self,
        dim: int,
        *,
        layer_sizes: Sequence[int] = (80, 40, 1),
        activation: Activation = nnx.sigmoid,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        check_logit_layer("layer_sizes", layer_sizes)
        self.hidden = MLP(4 * dim, layer_sizes[:-1], activation=activation, **types)
        self.score = nnx.Linear(layer_sizes[-2], 1, **types)
        self.dtype = dtype

    def __call__(
        self, history: JaggedArray, target: Float[AnyArray, "*devices rows dim"]
    ) -> Float[Array, "*devices rows dim"]:
        """Return the weighted sum of each row's elements.

        Args:
            history: ``[capacity, dim]`` values; on a mesh one more axis in front, over the devices.
            target: ``[rows, dim]``, the target of each row.

        Returns:
            ``[rows, dim]``; zeros for empty rows.
        """
        lengths = jnp.asarray(history.lengths)
        values = without_padding(history.values, complete_cumsum(lengths))
        values, target = promote(self.dtype, values, target)
        targets = each_device(_spread, lengths, target, values)
        pairs = jnp.concatenate([values, targets, values - targets, values * targets], axis=-1)
        return each_device(_total, lengths, self.score(self.hidden(pairs)) * values)


def _spread(
    lengths: Array, target: Float[Array, "rows dim"], values: Float[Array, "capacity dim"]
) -> Float[Array, "capacity dim"]:
    """Repeat each row's target for each item of its history; zeros at padding."""
    # Histories are not padded, so a row of 3 items costs as much as 3 items, whatever the longest
    # row is. A gather brings targets to items, and a segment sum brings items back to rows.
    rows = segment_ids(complete_cumsum(lengths), values.shape[0])
    return target.at[rows].get(mode="fill", fill_value=0)


def _total(lengths: Array, values: Float[Array, "capacity dim"]) -> Float[Array, "rows dim"]:
    """Return the sum of each history's items; ``lengths`` has the number of items of each."""
    rows = segment_ids(complete_cumsum(lengths), values.shape[0])
    return jax.ops.segment_sum(values, rows, lengths.shape[0], indices_are_sorted=True)


class DIN(HistoryModel):
    """Predicts clicks on a target item from a history of items.

    Zhou et al. 2018, "Deep interest network for click-through rate prediction" (arXiv:1706.06978).
    An item may have several features (its id, its shop, its category). Their embeddings are
    concatenated, both for the target and for each item of the history.

    Args:
        items: Tables of the histories and the targets; a history and its target usually read the
            same table.
        pairs: From each history feature to its target feature, by name. A target has one id per
            sample. All histories of a sample have the same length.
        profile: Tables of the sample's other features, pooled; None: no such features.
        num_dense: Number of dense features.
        attention_layer_sizes: Layers of the `TargetAttention`; the last is 1.
        top_layer_sizes: Layers of the network on top; the last is 1.
        activation: Activation of the hidden layers on top; the paper's is `Dice`.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: ``pairs`` is empty, no table reads one of its features, histories and targets
            differ in width, or a network does not end with 1 or has no hidden layer.

    Example:
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> items = jaxrec.EmbeddingCollection(
        ...     [jaxrec.EmbeddingConfig("item", 100, 8, feature_names=("history", "target"))],
        ...     rngs=rngs)
        >>> profile = jaxrec.EmbeddingBagCollection(
        ...     [jaxrec.EmbeddingBagConfig("user", 100, 4)], rngs=rngs)
        >>> model = DIN(items, {"history": "target"}, profile=profile, top_layer_sizes=(16, 1),
        ...             rngs=rngs)
        >>> batch = jaxrec.KeyedJaggedArray.from_lists(
        ...     {"history": [[1, 2, 3], []], "target": [[4], [5]], "user": [[6], [7]]})
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
        attention_layer_sizes: Sequence[int] = (80, 40, 1),
        top_layer_sizes: Sequence[int] = (200, 80, 1),
        activation: Activation = "dice",
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(items, pairs, profile=profile, num_dense=num_dense, dtype=dtype)
        self.attention = TargetAttention(
            self.item_columns, layer_sizes=attention_layer_sizes, **types
        )
        columns = self.item_columns + self.columns
        check_logit_layer("top_layer_sizes", top_layer_sizes)
        self.hidden = MLP(columns, top_layer_sizes[:-1], activation=activation, **types)
        self.head = nnx.Linear(top_layer_sizes[-2], 1, **types)

    def logits(self, history: JaggedArray, target: Array, join: Join) -> Float[Array, " batch"]:
        return self.head(self.hidden(join(self.attention(history, target))))[:, 0]
