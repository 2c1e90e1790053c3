"""Wide & deep learning, and its wide part, logistic regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.arithmetic import promote
from jaxrec.nn.click_model import (
    ClickModel,
    check_dense,
    check_logit_layer,
    num_columns,
    with_dense,
)
from jaxrec.nn.mlp import MLP
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.arrays import AnyArray


class LinearPart(ClickModel):
    """Logistic regression over dense features and bags of ids: ``b + w . x``.

    Args:
        weights: Tables of width 1: the weight of each id.
        num_dense: Number of dense features.
        dtype: Type that it computes in; None: float32, unless inputs are wider.
        param_dtype: Type of the bias and of the dense features' weights.
        rngs: Not drawn from: the dense features' weights and the bias start as zeros.

    Raises:
        ValueError: A table is wider than 1.

    Example:
        >>> import jaxrec
        >>> weights = jaxrec.EmbeddingBagCollection(
        ...     [jaxrec.EmbeddingBagConfig("user", 100, 1)], rngs=nnx.Rngs(0))
        >>> ids = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2, 3]]})
        >>> LinearPart(weights, rngs=nnx.Rngs(0))(None, ids).shape
        (2,)
    """

    def __init__(
        self,
        weights: EmbeddingBagCollection,
        *,
        num_dense: int = 0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if wide := {t.name: t.embedding_dim for t in weights.configs if t.embedding_dim != 1}:
            raise ValueError(
                f"tables of a linear part have embedding_dim=1, one weight an id; got {wide}"
            )
        self.weights = weights
        # Logistic regression is convex, so any start will do; zeros predict 1/2 for everything.
        # Without dense features there is no array: checkpoints hold none of size 0.
        self.dense_weights = nnx.data(
            nnx.Param(jnp.zeros(num_dense, param_dtype)) if num_dense else None
        )
        self.bias = nnx.Param(jnp.zeros((), param_dtype))
        self.dtype = dtype

    def lookup(self, features: KeyedJaggedArray) -> Float[Array, "batch tables"]:
        """Return the sums of the ids' weights, which `logits` takes."""
        return jnp.asarray(self.weights(features).values)

    def logits(
        self,
        dense: Float[AnyArray, "batch num_dense"] | None,
        embedded: Float[Array, "batch tables"],
    ) -> Float[Array, " batch"]:
        num_dense = 0 if self.dense_weights is None else self.dense_weights.shape[0]
        check_dense(dense, num_dense, embedded.shape[0])
        logits, bias = promote(self.dtype, embedded, self.bias[...])
        logits = logits.sum(axis=1) + bias
        if dense is not None and self.dense_weights is not None:
            values, weights = promote(self.dtype, dense, self.dense_weights[...])
            logits = logits + values @ weights
        return logits


class WideDeep(ClickModel):
    """Predicts clicks with a linear model that memorizes and a deep network that generalizes.

    ``logit = w . x + b + MLP(embeddings, dense)``: Cheng et al. 2016, "Wide & deep learning for
    recommender systems" (arXiv:1606.07792), equation 3. The wide part's features are ids and
    crosses of ids, hashed when the batch is made. The paper trains it with FTRL: give the tables of
    ``wide`` ``optimizer=jaxrec.optim.ftrl(...)``.

    Args:
        wide: Tables of width 1: the weight of each id and each cross.
        deep: Tables of the deep network's embeddings, of any widths.
        num_dense: Number of dense features; only the deep network sees them.
        deep_layer_sizes: Layers of the deep network; the last is 1.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: A table of ``wide`` is wider than 1, or the deep network does not end with 1.

    Example:
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> wide = jaxrec.EmbeddingBagCollection(
        ...     [jaxrec.EmbeddingBagConfig("user_x_item", 1000, 1)],
        ...     optimizer=jaxrec.optim.ftrl(0.1), rngs=rngs)
        >>> deep = jaxrec.EmbeddingBagCollection(
        ...     [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in ("user", "item")], rngs=rngs)
        >>> model = WideDeep(wide, deep, deep_layer_sizes=(16, 1), rngs=rngs)
        >>> ids = jaxrec.KeyedJaggedArray.from_lists(
        ...     {"user": [[1], [2]], "item": [[3, 4], []], "user_x_item": [[17, 40], []]})
        >>> model(None, ids).shape
        (2,)
    """

    def __init__(
        self,
        wide: EmbeddingBagCollection,
        deep: EmbeddingBagCollection,
        *,
        num_dense: int = 0,
        deep_layer_sizes: Sequence[int],
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        check_logit_layer("deep_layer_sizes", deep_layer_sizes)
        self.num_dense = num_dense
        self.dtype = dtype
        self.wide = LinearPart(wide, **types)
        self.embeddings = deep
        self.deep = MLP(
            num_columns(deep) + num_dense, deep_layer_sizes, activation_on_last=False, **types
        )

    def lookup(
        self, features: KeyedJaggedArray
    ) -> tuple[Float[Array, "batch tables"], Float[Array, "batch columns"]]:
        """Return the wide tables' weights and the pooled embeddings, which `logits` takes."""
        return self.wide.lookup(features), jnp.asarray(self.embeddings(features).values)

    def logits(
        self,
        dense: Float[AnyArray, "batch num_dense"] | None,
        embedded: tuple[Float[Array, "batch tables"], Float[Array, "batch columns"]],
    ) -> Float[Array, " batch"]:
        weights, pooled = embedded
        inputs = with_dense(pooled, dense, self.num_dense, self.dtype)
        # Dense features go to the deep network only, as in the paper's figure 4.
        return self.wide.logits(None, weights) + self.deep(inputs)[:, 0]
