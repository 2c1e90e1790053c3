"""Dot products of all pairs of a sample's vectors, and their gradients, computed in XLA."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def pair_products(vectors: Float[Array, "batch n dim"]) -> Float[Array, "batch pairs"]:
    """Return the dot products of all pairs of a sample's vectors.

    Args:
        vectors: ``[batch, n, dim]``, on one device.

    Returns:
        ``[batch, n * (n - 1) / 2]``, the pairs in the order (0, 1), (0, 2), ..., (1, 2), ...

    Raises:
        ValueError: The vectors have other than three dimensions.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> kernels.pair_products(jnp.array([[[1.0, 0.0], [2.0, 3.0], [4.0, 5.0]]])).tolist()
        [[2.0, 4.0, 23.0]]
    """
    batch, n, _ = check_vectors(vectors)
    gram = jnp.einsum("bid,bjd->bij", vectors, vectors).reshape(batch, n * n)
    return jnp.take(gram, _positions_of_pairs(n), axis=1, mode="clip")


def pair_gradients(
    vectors: Float[Array, "batch n dim"], gradient: Float[Array, "batch pairs"]
) -> Float[Array, "batch n dim"]:
    """Return the gradients of the vectors, given those of `pair_products`.

    A vector's gradient is the sum of the sample's other vectors, each times the gradient of its
    product with this one.

    Args:
        vectors: ``[batch, n, dim]``, on one device.
        gradient: ``[batch, n * (n - 1) / 2]``.

    Returns:
        ``[batch, n, dim]``.

    Raises:
        ValueError: The vectors have other than three dimensions, or there are gradients of other
            pairs than theirs.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> vectors = jnp.array([[[1.0, 0.0], [2.0, 3.0]]])
        >>> kernels.pair_gradients(vectors, jnp.array([[10.0]])).tolist()
        [[[20.0, 30.0], [10.0, 0.0]]]
    """
    # XLA's own derivative scatters the gradients of pairs into a triangle and multiplies it twice,
    # once transposed. Gathering them into the symmetric matrix takes one multiplication and no
    # scatter.
    batch, n, _ = check_vectors(vectors, gradient)
    padded = jnp.pad(gradient, ((0, 0), (0, 1)))
    symmetric = jnp.take(padded, _pairs_of_positions(n), axis=1, mode="clip").reshape(batch, n, n)
    return jnp.einsum("bij,bjd->bid", symmetric, vectors)


def check_vectors(vectors: Array, gradient: Array | None = None) -> tuple[int, int, int]:
    """Return the number of samples, of vectors of each, and of columns.

    Args:
        vectors: ``[batch, n, dim]``.
        gradient: The gradients of their products, ``[batch, n * (n - 1) / 2]``, if there are any.

    Raises:
        ValueError: An array has another shape.
    """
    if vectors.ndim != 3:
        raise ValueError(
            f"the vectors whose pairs are multiplied are [batch, n, dim]; got {vectors.shape}"
        )
    batch, n, dim = vectors.shape
    pairs = n * (n - 1) // 2
    if gradient is not None and gradient.shape != (batch, pairs):
        raise ValueError(
            f"{batch} samples of {n} vectors have gradients of their pairs [{batch}, {pairs}]; "
            f"got {gradient.shape}"
        )
    return batch, n, dim


@functools.cache
def _positions_of_pairs(n: int) -> Int[np.ndarray, " pairs"]:
    """Return the position of each pair in the flattened ``[n, n]`` matrix."""
    first, second = np.triu_indices(n, 1)
    return (first * n + second).astype(np.int32)


@functools.cache
def _pairs_of_positions(n: int) -> Int[np.ndarray, " positions"]:
    """Return the pair at each position of the flattened matrix; the number of pairs where none."""
    pairs = np.full((n, n), n * (n - 1) // 2, np.int32)
    first, second = np.triu_indices(n, 1)
    pairs[first, second] = pairs[second, first] = np.arange(first.size)
    return pairs.reshape(-1)
