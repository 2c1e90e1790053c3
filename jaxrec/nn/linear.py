"""The linear part of a model over ids: one weight for each."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.dense import check_dense
from jaxrec.nn.dtypes import promote
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.arrays import AnyArray


class LinearPart(nnx.Module):
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
        self.dense_weights = nnx.Param(jnp.zeros(num_dense, param_dtype))
        self.bias = nnx.Param(jnp.zeros((), param_dtype))
        self.dtype = dtype

    def __call__(
        self, dense: Float[AnyArray, "batch num_dense"] | None, features: KeyedJaggedArray
    ) -> Float[Array, " batch"]:
        """Return the logits of a batch, ``[batch]``.

        Raises:
            ValueError: ``dense`` is missing, or has another number of columns.
        """
        return self.logits(dense, self.look_up(features))

    def look_up(self, features: KeyedJaggedArray) -> Float[Array, "batch tables"]:
        """Return the sums of the ids' weights, which `logits` takes."""
        return jnp.asarray(self.weights(features).values)

    def logits(
        self,
        dense: Float[AnyArray, "batch num_dense"] | None,
        embedded: Float[Array, "batch tables"],
    ) -> Float[Array, " batch"]:
        """Return the logits of samples whose weights are looked up.

        Args:
            dense: ``[batch, num_dense]`` dense features; None if the model has none.
            embedded: Result of `look_up`, or some rows of it (`sum_in_chunks`).

        Raises:
            ValueError: As for calls of the module.
        """
        check_dense(dense, self.dense_weights.shape[0], embedded.shape[0])
        logits, weights, bias = promote(
            self.dtype, embedded, self.dense_weights[...], self.bias[...]
        )
        logits = logits.sum(axis=1) + bias
        if dense is not None:
            values, weights = promote(self.dtype, dense, weights)
            logits = logits + values @ weights
        return logits
