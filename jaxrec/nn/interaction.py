"""Interactions of the vectors of a sample: dot products, projections, a cross network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.nn.arithmetic import promote
from jaxrec.nn.crossnet import LowRankCrossNet
from jaxrec.nn.mlp import MLP
from jaxrec.nn.pair_products import pairwise_dots


class DotInteraction(nnx.Module):
    """The dense vector beside the dot products of all pairs of vectors, itself among them.

    TorchRec's InteractionArch; the interaction of Naumov et al. 2019, "Deep learning recommendation
    model for personalization and recommendation systems" (arXiv:1906.00091), section 2.1.4.

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
        """Return the number of output columns for sparse features of a dimension."""
        return dim + features * (features + 1) // 2


InteractionArch = DotInteraction  # TorchRec's name


class InteractionDCNArch(nnx.Module):
    """A cross network over all vectors of a sample side by side, the dense one first.

    TorchRec's module of that name; the interaction of MLPerf's DLRM-DCNv2.

    Args:
        num_sparse_features: Number of sparse features.
        dim: Width of the vectors.
        num_layers: Layers of the `LowRankCrossNet`.
        low_rank: Its rank.
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
    """Dot products of two sets of projections of a sample's vectors, beside the dense vector.

    Two MLPs see all vectors side by side. The first gives ``n`` vectors of ``dim``, the second a
    matrix of ``dim`` rows and ``m`` columns; their product has ``n * m`` numbers, where the dot
    products of all pairs of 26 features would have 351. TorchRec's module of that name; Naumov et
    al. 2019 (arXiv:1906.00091), section 2.1.4, whose pairs it compresses.

    Args:
        num_sparse_features: Number of sparse features.
        dim: Width of the vectors.
        branch1_layer_sizes: Layers of the first MLP; the last is ``n * dim``.
        branch2_layer_sizes: Layers of the second; the last is ``dim * m``. Its output is read row
            by row of the matrix, as in TorchRec.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of the kernels' first values.

    Raises:
        ValueError: The size of a last layer is not a multiple of ``dim``.

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
