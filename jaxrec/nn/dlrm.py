"""The deep learning recommendation model, with three ways in which its vectors interact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.arithmetic import promote
from jaxrec.nn.click_model import (
    ClickModel,
    check_dense,
    check_logit_layer,
    common_width,
    num_features,
)
from jaxrec.nn.interaction import DotInteraction, InteractionDCNArch, InteractionProjectionArch
from jaxrec.nn.mlp import MLP
from jaxrec.ragged.arrays import AnyArray


class DLRMOptions(TypedDict, total=False):
    """Options of `DLRM` that `DLRM_DCN` and `DLRM_Projection` share."""

    num_dense: Required[int]
    bottom_layer_sizes: Required[Sequence[int]]
    top_layer_sizes: Required[Sequence[int]]
    dtype: DTypeLike | None
    logit_dtype: DTypeLike | None
    param_dtype: DTypeLike
    rngs: Required[nnx.Rngs]


class DLRM(ClickModel):
    """Predicts clicks from dense features and bags of ids.

    A bottom MLP embeds the dense features as one more vector beside the tables' vectors, dot
    products of all pairs of vectors let them interact, and a top MLP computes the logit. Naumov et
    al. 2019, "Deep learning recommendation model for personalization and recommendation systems"
    (arXiv:1906.00091), figure 1; TorchRec's DLRM.

    Args:
        embeddings: The tables, all of one width, ``dim``.
        num_dense: Number of dense features.
        bottom_layer_sizes: Layers of the bottom MLP; the last is ``dim``.
        top_layer_sizes: Layers of the top MLP; the last is 1.
        interaction: How the vectors interact: a function of the dense vector, ``[batch, dim]``, and
            the pooled embeddings, ``[batch, features, dim]``, that returns ``[batch, columns]``.
            None: `DotInteraction`.
        dtype: Type that the MLPs and the interaction compute in; None: float32, unless inputs are
            wider.
        logit_dtype: Type that the last layer computes in and the logits have; None: ``dtype``.
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
        interaction: Callable[[Array, Array], Array] | None = None,
        dtype: DTypeLike | None = None,
        logit_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        dim = common_width(type(self).__name__, embeddings.configs)
        if not bottom_layer_sizes or bottom_layer_sizes[-1] != dim:
            raise ValueError(
                f"the bottom MLP ends with the tables' width, {dim}, so that its output is one "
                f"more vector; got bottom_layer_sizes={tuple(bottom_layer_sizes)}"
            )
        check_logit_layer("top_layer_sizes", top_layer_sizes)
        self.dim = dim
        self.num_dense = num_dense
        self.dtype = dtype
        self.embeddings = embeddings
        self.bottom = MLP(
            num_dense, bottom_layer_sizes, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.interaction = DotInteraction() if interaction is None else interaction
        interactions = jax.eval_shape(
            self.interaction, jnp.zeros((1, dim)), jnp.zeros((1, num_features(embeddings), dim))
        )
        self.top = MLP(
            interactions.shape[1],
            top_layer_sizes,
            activation_on_last=False,
            dtype=dtype,
            output_dtype=logit_dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def logits(
        self, dense: Float[AnyArray, "batch num_dense"], embedded: Float[Array, "batch columns"]
    ) -> Float[Array, " batch"]:
        check_dense(dense, self.num_dense, embedded.shape[0])
        sparse = embedded.reshape(embedded.shape[0], -1, self.dim)
        vectors = promote(self.dtype, self.bottom(dense), sparse)
        return self.top(self.interaction(*vectors))[:, 0]


class DLRM_DCN(DLRM):
    """A `DLRM` whose vectors interact in a low-rank cross network.

    MLPerf's DLRM-DCNv2 (3 layers of rank 512, width 128) and TorchRec's model of that name; Wang et
    al. 2021, "DCN V2" (arXiv:2008.13535), over Naumov et al. 2019 (arXiv:1906.00091).

    Args:
        embeddings: The tables, all of one width, ``dim``.
        dcn_num_layers: Layers of the cross network.
        dcn_low_rank_dim: Its rank.
        options: Of `DLRM`, all but the interaction; types and ``rngs`` are the cross network's too.

    Raises:
        ValueError: The tables differ in width, or a size is another than it should be.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> tables = [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in ("user", "item")]
        >>> model = DLRM_DCN(jaxrec.EmbeddingBagCollection(tables, rngs=rngs), num_dense=3,
        ...                  bottom_layer_sizes=(16, 8), top_layer_sizes=(16, 1),
        ...                  dcn_num_layers=2, dcn_low_rank_dim=4, rngs=rngs)
        >>> ids = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2]], "item": [[3, 4], []]})
        >>> model(jnp.ones((2, 3)), ids).shape
        (2,)
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        *,
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        **options: Unpack[DLRMOptions],
    ):
        interaction = InteractionDCNArch(
            num_features(embeddings),
            common_width("DLRM_DCN", embeddings.configs),
            num_layers=dcn_num_layers,
            low_rank=dcn_low_rank_dim,
            **_of_interaction(options),
        )
        super().__init__(embeddings, interaction=interaction, **options)


class DLRM_Projection(DLRM):
    """A `DLRM` in which two sets of projections of the vectors interact, fewer than all pairs.

    TorchRec's model of that name; see `InteractionProjectionArch`.

    Args:
        embeddings: The tables, all of one width, ``dim``.
        interaction_branch1_layer_sizes: Layers of the first projection; the last is a multiple of
            ``dim``.
        interaction_branch2_layer_sizes: Layers of the second; likewise.
        options: Of `DLRM`, all but the interaction; types and ``rngs`` are the projections' too.

    Raises:
        ValueError: The tables differ in width, or a size is another than it should be.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> tables = [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in ("user", "item")]
        >>> model = DLRM_Projection(
        ...     jaxrec.EmbeddingBagCollection(tables, rngs=rngs), num_dense=3,
        ...     bottom_layer_sizes=(16, 8), top_layer_sizes=(16, 1),
        ...     interaction_branch1_layer_sizes=(16, 2 * 8),
        ...     interaction_branch2_layer_sizes=(16, 8 * 3), rngs=rngs)
        >>> ids = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2]], "item": [[3, 4], []]})
        >>> model(jnp.ones((2, 3)), ids).shape
        (2,)
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        *,
        interaction_branch1_layer_sizes: Sequence[int],
        interaction_branch2_layer_sizes: Sequence[int],
        **options: Unpack[DLRMOptions],
    ):
        interaction = InteractionProjectionArch(
            num_features(embeddings),
            common_width("DLRM_Projection", embeddings.configs),
            branch1_layer_sizes=interaction_branch1_layer_sizes,
            branch2_layer_sizes=interaction_branch2_layer_sizes,
            **_of_interaction(options),
        )
        super().__init__(embeddings, interaction=interaction, **options)


def _of_interaction(options: DLRMOptions) -> dict[str, Any]:
    """Return the options that the interaction shares with the MLPs."""
    return {key: options[key] for key in ("dtype", "param_dtype", "rngs") if key in options}
