"""How the vectors of a sample meet: dot products of all pairs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int


@jax.custom_vjp
def pairwise_dots(vectors: Float[Array, "batch vectors dim"]) -> Float[Array, "batch pairs"]:
    """The dot products of all pairs of a sample's vectors.

    Args:
        vectors: ``[batch, n, dim]``.

    Returns:
        ``[batch, n * (n - 1) / 2]``, the pairs in the order (0, 1), (0, 2), ..., (1, 2), ...

    Example:
        >>> import jax.numpy as jnp
        >>> pairwise_dots(jnp.array([[[1.0, 0.0], [2.0, 3.0], [4.0, 5.0]]])).tolist()
        [[2.0, 4.0, 23.0]]
    """
    batch, n, _ = vectors.shape
    gram = jnp.einsum("bid,bjd->bij", vectors, vectors).reshape(batch, n * n)
    return jnp.take(gram, _positions_of_pairs(n), axis=1, mode="clip")


def _forward(
    vectors: Float[Array, "batch vectors dim"],
) -> tuple[Float[Array, "batch pairs"], Float[Array, "batch vectors dim"]]:
    return pairwise_dots(vectors), vectors


def _backward(
    vectors: Float[Array, "batch vectors dim"], gradient: Float[Array, "batch pairs"]
) -> tuple[Float[Array, "batch vectors dim"]]:
    # What XLA derives scatters the gradients of pairs into a triangle and multiplies it twice, once
    # transposed. Gathering them into the symmetric matrix takes one multiplication and no scatter.
    batch, n, _ = vectors.shape
    padded = jnp.pad(gradient, ((0, 0), (0, 1)))
    symmetric = jnp.take(padded, _pairs_of_positions(n), axis=1, mode="clip").reshape(batch, n, n)
    return (jnp.einsum("bij,bjd->bid", symmetric, vectors),)


pairwise_dots.defvjp(_forward, _backward)


@functools.cache
def _positions_of_pairs(n: int) -> Int[np.ndarray, " pairs"]:
    """Where each pair stands in the flattened ``[n, n]`` matrix."""
    first, second = np.triu_indices(n, 1)
    return (first * n + second).astype(np.int32)


@functools.cache
def _pairs_of_positions(n: int) -> Int[np.ndarray, " positions"]:
    """Which pair stands at each position of the flattened matrix; one past the last: none."""
    pairs = np.full((n, n), n * (n - 1) // 2, np.int32)
    first, second = np.triu_indices(n, 1)
    pairs[first, second] = pairs[second, first] = np.arange(first.size)
    return pairs.reshape(-1)


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
        """Combines a sample's vectors.

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
        """Columns of the output, for that many sparse features of that dimension."""
        return dim + features * (features + 1) // 2
