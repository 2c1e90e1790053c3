"""The deep learning recommendation model (DLRM), and three interactions of its vectors."""

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
from jaxrec.nn.crossnet import LowRankCrossNet
from jaxrec.nn.mlp import MLP
from jaxrec.nn.pair_products import pairwise_dots
from jaxrec.ragged.arrays import AnyArray


class DotInteraction(nnx.Module):
    """Concatenates the dense vector and the dot products of all pairs of vectors.

    The dense vector is one of the vectors. TorchRec's InteractionArch; Naumov et al. 2019, "Deep
    learning recommendation model for personalization and recommendation systems"
    (arXiv:1906.00091), section 2.1.4.

    Example:
        >>> import jax.numpy as jnp
        >>> DotInteraction()(jnp.ones((4, 16)), jnp.ones((4, 26, 16))).shape
        (4, 367)
    """

    def __call__(
        self, dense: Float[Array, "batch dim"], sparse: Float[Array, "batch features dim"]
    ) -> Float[Array, "batch columns"]:
        """Combine a sample's vectors.

        Args:
            dense: ``[batch, dim]``, the embedding of the dense features.
            sparse: ``[batch, features, dim]``, the pooled embeddings.

        Returns:
            ``[batch, dim + features * (features + 1) / 2]``: ``dense``, then `pairwise_dots` of
            ``dense`` and the rows of ``sparse``.
        """
        vectors = jnp.concatenate([dense[:, None], sparse], axis=1)
        return jnp.concatenate([dense, pairwise_dots(vectors)], axis=1)

    @staticmethod
    def out_features(features: int, dim: int) -> int:
        """Return the number of output columns for ``features`` sparse features of width ``dim``."""
        return dim + features * (features + 1) // 2


InteractionArch = DotInteraction  # TorchRec's name


class InteractionDCNArch(nnx.Module):
    """A cross network over all vectors of a sample side by side, the dense one first.

    TorchRec's module of that name; the interaction of MLPerf's DLRM-DCNv2.

    Args:
        num_sparse_features: Number of sparse features.
        dim: Width of the vectors.
        num_layers: Layers of the `LowRankCrossNet`.
        low_rank: Rank of its matrices.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of the kernels' first values.

    Example:
        >>> import jax.numpy as jnp
        >>> arch = InteractionDCNArch(26, 16, num_layers=3, low_rank=8, rngs=nnx.Rngs(0))
        >>> arch(jnp.ones((4, 16)), jnp.ones((4, 26, 16))).shape
        (4, 432)
    """

    def __init__(
        self,
        num_sparse_features: int,
        dim: int,
        *,
        num_layers: int,
        low_rank: int,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.crossnet = LowRankCrossNet(
            (num_sparse_features + 1) * dim,
            num_layers,
            low_rank,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def __call__(
        self, dense: Float[Array, "batch dim"], sparse: Float[Array, "batch features dim"]
    ) -> Float[Array, "batch columns"]:
        """Combine ``[batch, dim]`` and ``[batch, features, dim]``.

        Returns:
            ``[batch, (features + 1) * dim]``.
        """
        return self.crossnet(jnp.concatenate([dense, sparse.reshape(len(sparse), -1)], axis=1))


class InteractionProjectionArch(nnx.Module):
    """Concatenates the dense vector and the dot products of two sets of projections.

    Two MLPs see all vectors side by side. The first gives ``n`` vectors of ``dim``, the second a
    matrix of ``dim`` rows and ``m`` columns. Their product has ``n * m`` numbers; all pairs of 26
    features and the dense vector would have 351. TorchRec's module of that name, a compression of
    the interaction of Naumov et al. 2019 (arXiv:1906.00091), section 2.1.4.

    Args:
        num_sparse_features: Number of sparse features.
        dim: Width of the vectors.
        branch1_layer_sizes: Layers of the first MLP; the last is ``n * dim``.
        branch2_layer_sizes: Layers of the second MLP; the last is ``dim * m``. Its output is the
            matrix row by row, as in TorchRec.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of the kernels' first values.

    Raises:
        ValueError: A last layer's size is not a multiple of ``dim``.

    Example:
        >>> import jax.numpy as jnp
        >>> arch = InteractionProjectionArch(
        ...     26, 16, branch1_layer_sizes=(64, 3 * 16), branch2_layer_sizes=(64, 16 * 2),
        ...     rngs=nnx.Rngs(0))
        >>> arch(jnp.ones((4, 16)), jnp.ones((4, 26, 16))).shape
        (4, 22)
    """

    def __init__(
        self,
        num_sparse_features: int,
        dim: int,
        *,
        branch1_layer_sizes: Sequence[int],
        branch2_layer_sizes: Sequence[int],
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        for name, sizes in (("1", branch1_layer_sizes), ("2", branch2_layer_sizes)):
            if not sizes or sizes[-1] % dim:
                raise ValueError(
                    f"branch {name} of the interaction ends with a multiple of the vectors' width, "
                    f"{dim}; got branch{name}_layer_sizes={tuple(sizes)}"
                )
        # Both branches see the dense vector too, hence one vector more than sparse features.
        columns = (num_sparse_features + 1) * dim
        self.branch1 = MLP(columns, branch1_layer_sizes, **types)
        self.branch2 = MLP(columns, branch2_layer_sizes, **types)
        self.dtype = dtype

    def __call__(
        self, dense: Float[Array, "batch dim"], sparse: Float[Array, "batch features dim"]
    ) -> Float[Array, "batch columns"]:
        """Combine ``[batch, dim]`` and ``[batch, features, dim]``.

        Returns:
            ``[batch, dim + n * m]``.
        """
        batch, dim = dense.shape
        dense, sparse = promote(self.dtype, dense, sparse)
        vectors = jnp.concatenate([dense, sparse.reshape(batch, -1)], axis=1)
        first = self.branch1(vectors).reshape(batch, -1, dim)
        second = self.branch2(vectors).reshape(batch, dim, -1)
        return jnp.concatenate([dense, (first @ second).reshape(batch, -1)], axis=1)


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

    A bottom MLP embeds the dense features as one more vector beside the tables' vectors. The
    vectors interact by dot products of all pairs, and a top MLP computes the logit. Naumov et al.
    2019, "Deep learning recommendation model for personalization and recommendation systems"
    (arXiv:1906.00091), figure 1; TorchRec's DLRM.

    Args:
        embeddings: The tables, all of one width, ``dim``.
        num_dense: Number of dense features.
        bottom_layer_sizes: Layers of the bottom MLP; the last is ``dim``.
        top_layer_sizes: Layers of the top MLP; the last is 1.
        interaction: Function from the dense vector, ``[batch, dim]``, and the pooled embeddings,
            ``[batch, features, dim]``, to ``[batch, columns]``. None: `DotInteraction`.
        dtype: Type that the MLPs and the interaction compute in; None: float32, unless inputs are
            wider.
        logit_dtype: Type of the last layer's arithmetic and of the logits; None: ``dtype``.
        param_dtype: Type of the MLPs' parameters.
        rngs: Gives the random keys of the MLPs' first values.

    Raises:
        ValueError: The tables differ in width, or an MLP does not end with the size given above.

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
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
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
        self.bottom = MLP(num_dense, bottom_layer_sizes, **types)
        self.interaction = DotInteraction() if interaction is None else interaction
        # The interaction may be any function of the user, so its output's width is found by tracing
        # it once; `eval_shape` computes nothing.
        interactions = jax.eval_shape(
            self.interaction, jnp.zeros((1, dim)), jnp.zeros((1, num_features(embeddings), dim))
        )
        self.top = MLP(
            interactions.shape[1],
            top_layer_sizes,
            activation_on_last=False,
            output_dtype=logit_dtype,
            **types,
        )

    def logits(
        self, dense: Float[AnyArray, "batch num_dense"], embedded: Float[Array, "batch columns"]
    ) -> Float[Array, " batch"]:
        check_dense(dense, self.num_dense, embedded.shape[0])
        # All tables have one width, so the pooled columns are the features' vectors side by side.
        sparse = embedded.reshape(embedded.shape[0], -1, self.dim)
        vectors = promote(self.dtype, self.bottom(dense), sparse)
        return self.top(self.interaction(*vectors))[:, 0]


class DLRM_DCN(DLRM):
    """A `DLRM` whose vectors interact in a low-rank cross network.

    TorchRec's model of that name, and MLPerf's DLRM-DCNv2 (3 layers of rank 512, width 128). DLRM
    is by Naumov et al. 2019 (arXiv:1906.00091), the cross network by Wang et al. 2021, "DCN V2"
    (arXiv:2008.13535).

    Args:
        embeddings: The tables, all of one width, ``dim``.
        dcn_num_layers: Layers of the cross network.
        dcn_low_rank_dim: Rank of the cross network.
        options: Arguments of `DLRM` except ``interaction``; types and ``rngs`` are also the cross
            network's.

    Raises:
        ValueError: The tables differ in width, or a size is not as in `DLRM`.

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
    """A `DLRM` in which two sets of projections interact, with fewer products than all pairs.

    TorchRec's model of that name; see `InteractionProjectionArch`.

    Args:
        embeddings: The tables, all of one width, ``dim``.
        interaction_branch1_layer_sizes: Layers of the first projection; the last is a multiple of
            ``dim``.
        interaction_branch2_layer_sizes: Layers of the second projection; the last is a multiple of
            ``dim``.
        options: Arguments of `DLRM` except ``interaction``; types and ``rngs`` are also the
            projections'.

    Raises:
        ValueError: The tables differ in width, or a size is not as above or as in `DLRM`.

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
