"""The deep learning recommendation model."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.interaction import DotInteraction
from jaxrec.nn.mlp import MLP
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.arrays import AnyArray


class DLRM(nnx.Module):
    """Predicts clicks from dense features and bags of ids.

    A bottom MLP embeds the dense features as one vector beside those of the tables, dot products of
    all pairs of vectors let them interact, and a top MLP makes a logit of it. Naumov et al. 2019,
    "Deep learning recommendation model for personalization and recommendation systems"
    (arXiv:1906.00091), figure 1; TorchRec's DLRM.

    Args:
        embeddings: The tables, all of one width, ``dim``.
        num_dense: Number of dense features.
        bottom_layer_sizes: Sizes of the bottom MLP's layers; the last is ``dim``.
        top_layer_sizes: Sizes of the top MLP's layers; the last is 1 and has no activation.
        dtype: Type that the MLPs compute in; None: float32, unless inputs are wider.
        param_dtype: Type of the MLPs' parameters.
        rngs: Gives the random keys of the MLPs' first values.

    Raises:
        ValueError: The tables differ in width, or an MLP ends with another size than it should.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> tables = [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in ("user", "item")]
        >>> embeddings = jaxrec.EmbeddingBagCollection(tables, rngs=rngs)
        >>> model = DLRM(embeddings, num_dense=3, bottom_layer_sizes=(16, 8),
        ...              top_layer_sizes=(16, 1), rngs=rngs)
        >>> ids = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2]], "item": [[3, 4], []]})
        >>> model(jnp.ones((2, 3)), ids).shape
        (2,)
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        *,
        num_dense: int,
        bottom_layer_sizes: Sequence[int],
        top_layer_sizes: Sequence[int],
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        widths = {table.name: table.embedding_dim for table in embeddings.configs}
        if len(set(widths.values())) != 1:
            raise ValueError(f"DLRM's tables are of one width, embedding_dim; got {widths}")
        dim = next(iter(widths.values()))
        features = sum(len(table.feature_names) for table in embeddings.configs)
        if not bottom_layer_sizes or bottom_layer_sizes[-1] != dim:
            raise ValueError(
                f"the bottom MLP ends with the tables' width, {dim}, so that its output is one "
                f"more vector; got bottom_layer_sizes={tuple(bottom_layer_sizes)}"
            )
        if not top_layer_sizes or top_layer_sizes[-1] != 1:
            raise ValueError(
                "the top MLP ends with one column, the logit; "
                f"got top_layer_sizes={tuple(top_layer_sizes)}"
            )
        self.dim = dim
        self.embeddings = embeddings
        self.bottom = MLP(
            num_dense, bottom_layer_sizes, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.interaction = DotInteraction()
        self.top = MLP(
            self.interaction.out_features(features, dim),
            top_layer_sizes,
            activation_on_last=False,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def __call__(
        self, dense: Float[AnyArray, "batch num_dense"], features: KeyedJaggedArray
    ) -> Float[Array, " batch"]:
        """The logits of a batch.

        Args:
            dense: ``[batch, num_dense]`` dense features.
            features: The batch's ids, of every feature that the tables read.

        Returns:
            ``[batch]`` logits: the log-odds of a click.
        """
        pooled = jnp.asarray(self.embeddings(features).values)
        sparse = pooled.reshape(pooled.shape[0], -1, self.dim)
        interactions = self.interaction(self.bottom(dense), sparse)
        return self.top(interactions)[:, 0]
