"""Wide & deep learning."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.click_model import num_columns
from jaxrec.nn.dense import check_dense
from jaxrec.nn.dtypes import promote
from jaxrec.nn.linear import LinearPart
from jaxrec.nn.mlp import MLP, check_logit_layer
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.arrays import AnyArray


class WideDeep(nnx.Module):
    """Predicts clicks by a linear model that remembers and a deep network that generalizes.

    ``logit = w . x + b + MLP(embeddings, dense)``: Cheng et al. 2016, "Wide & deep learning for
    recommender systems" (arXiv:1606.07792), equation 3. The wide part's features are ids and
    crosses of ids, hashed when the batch is made; the paper trains it with FTRL, which is
    ``optimizer=jaxrec.optim.ftrl(...)`` of ``wide``.

    Args:
        wide: Tables of width 1: the weight of each id and each cross.
        deep: Tables of the deep network's embeddings, of any widths.
        num_dense: Number of dense features, which the deep network sees.
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
        check_logit_layer("deep_layer_sizes", deep_layer_sizes)
        self.num_dense = num_dense
        self.dtype = dtype
        self.wide = LinearPart(wide, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.embeddings = deep
        self.deep = MLP(
            num_columns(deep) + num_dense,
            deep_layer_sizes,
            activation_on_last=False,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def __call__(
        self, dense: Float[AnyArray, "batch num_dense"] | None, features: KeyedJaggedArray
    ) -> Float[Array, " batch"]:
        """Return the logits of a batch.

        Args:
            dense: ``[batch, num_dense]`` dense features; None if the model has none.
            features: The batch's ids, of every feature that the tables read.

        Returns:
            ``[batch]`` logits: the log-odds of a click.

        Raises:
            ValueError: ``dense`` is missing, or has another number of columns.
        """
        return self.logits(dense, self.look_up(features))

    def look_up(
        self, features: KeyedJaggedArray
    ) -> tuple[Float[Array, "batch tables"], Float[Array, "batch columns"]]:
        """Return the wide tables' weights and the pooled embeddings, which `logits` takes."""
        return self.wide.look_up(features), jnp.asarray(self.embeddings(features).values)

    def logits(
        self,
        dense: Float[AnyArray, "batch num_dense"] | None,
        embedded: tuple[Float[Array, "batch tables"], Float[Array, "batch columns"]],
    ) -> Float[Array, " batch"]:
        """Return the logits of samples whose embeddings are looked up.

        Args:
            dense: ``[batch, num_dense]`` dense features; None if the model has none.
            embedded: Result of `look_up`, or some rows of it (`sum_in_chunks`).

        Raises:
            ValueError: As for calls of the model.
        """
        weights, pooled = embedded
        inputs = with_dense(pooled, dense, self.num_dense, self.dtype)
        return self.wide.logits(None, weights) + self.deep(inputs)[:, 0]


def with_dense(
    pooled: Float[AnyArray, "batch columns"],
    dense: Float[AnyArray, "batch num_dense"] | None,
    num_dense: int,
    dtype: DTypeLike | None,
) -> Float[Array, "batch all_columns"]:
    """Concatenate dense features and pooled embeddings, in one type.

    Raises:
        ValueError: There are not ``num_dense`` dense features, or of other samples.
    """
    check_dense(dense, num_dense, pooled.shape[0])
    if dense is None:
        return jnp.asarray(pooled)
    return jnp.concatenate(promote(dtype, dense, pooled), axis=1)
