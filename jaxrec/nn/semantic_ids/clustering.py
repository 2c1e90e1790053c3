"""K-means of vectors on one device or over a mesh: seeds, prices of balanced clusters, steps."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

# Temperature of the prices' last step over the mean squared distance to the nearest center.
_LAST_TEMPERATURE = 1e-3


def squared_distances(
    vectors: Float[Array, "n dim"], centers: Float[Array, "size dim"]
) -> Float[Array, "n size"]:
    """Return the squared distance of each vector and each center."""
    # |x - c|^2 by a matrix product, which takes no [n, size, dim] array.
    # Close centers differ in digits that a product of a lower precision loses.
    products = jnp.matmul(vectors, centers.T, precision=jax.lax.Precision.HIGHEST)
    squares = (vectors * vectors).sum(-1)[:, None] + (centers * centers).sum(-1)[None]
    return jnp.maximum(squares - 2 * products, 0)


def nearest(
    vectors: Float[Array, "n dim"],
    centers: Float[Array, "size dim"],
    prices: Float[Array, " size"],
) -> Int32[Array, " n"]:
    """Return the center of each vector with the least squared distance plus price."""
    return jnp.argmin(squared_distances(vectors, centers) + prices[None], axis=1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="size")
def choose_seeds(
    key: Array, vectors: Float[Array, "n dim"], *, size: int
) -> Float[Array, "size dim"]:
    """Choose ``size`` of the vectors as first centers by greedy k-means++.

    Arthur and Vassilvitskii 2007, "k-means++: The advantages of careful seeding" (SODA): each
    center is drawn with a probability proportional to the squared distance to the nearest one so
    far; of a few such draws the one that leaves the smallest sum of squared distances is taken.
    """
    draws = 2 + size.bit_length()
    count = vectors.shape[0]
    first_key, key = jax.random.split(key)
    first = vectors[jax.random.randint(first_key, (), 0, count)]
    centers = jnp.zeros((size, vectors.shape[1]), vectors.dtype).at[0].set(first)
    left = squared_distances(vectors, first[None])[:, 0]

    def add(place: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        centers, left = state
        # All vectors may be centers already: every draw is as good then.
        weights = jnp.where(left.sum() > 0, left, 1.0)
        totals = jnp.cumsum(weights)
        at = jax.random.uniform(jax.random.fold_in(key, place), (draws,)) * totals[-1]
        drawn = vectors[jnp.clip(jnp.searchsorted(totals, at, side="right"), 0, count - 1)]
        remaining = jnp.minimum(left[None], squared_distances(drawn, vectors))
        best = jnp.argmin(remaining.sum(axis=1))
        return centers.at[place].set(drawn[best]), remaining[best]

    return jax.lax.fori_loop(1, size, add, (centers, left))[0]


@functools.partial(jax.jit, static_argnames="num_steps")
def balance(
    vectors: Float[Array, "n dim"],
    centers: Float[Array, "size dim"],
    prices: Float[Array, " size"],
    *,
    num_steps: int,
) -> Float[Array, " size"]:
    """Return prices of centers at which each is nearest for about equally many vectors.

    Clusters of given sizes with the least sum of squared distances are those of some prices added
    to the squared distances (a power diagram): Aurenhammer, Hoffmann and Aronov 1998,
    "Minkowski-type theorems and least-squares clustering". The prices are the potentials of an
    optimal transport, found by Sinkhorn's iterations (Cuturi 2013, arXiv:1306.0895) at a falling
    temperature, from the given ``prices`` on.
    """
    distances = squared_distances(vectors, centers)
    # From a temperature at which all centers are alike to one at which the nearest takes all.
    least = jnp.finfo(distances.dtype).tiny
    first = jnp.log(jnp.maximum(distances.mean(), least))
    last = jnp.log(jnp.maximum(_LAST_TEMPERATURE * distances.min(axis=1).mean(), least))
    share = jnp.log(vectors.shape[0] / centers.shape[0])

    def step(number: Array, prices: Array) -> Array:
        temperature = jnp.exp(first + (last - first) * (number + 1) / num_steps)
        scores = -(distances + prices[None]) / temperature
        scores = scores - jax.nn.logsumexp(scores, axis=1, keepdims=True)
        return prices + temperature * (jax.nn.logsumexp(scores, axis=0) - share)

    prices = jax.lax.fori_loop(0, num_steps, step, prices)
    return prices - prices.min()


def cluster_step(
    vectors: Float[Array, "n dim"],
    weights: Float[Array, " n"],
    centers: Float[Array, "size dim"],
    counts: Float[Array, " size"],
    prices: Float[Array, " size"],
) -> tuple[Float[Array, "size dim"], Float[Array, " size"]]:
    """Move each center to the mean of its new vectors and of the ``counts`` vectors it had before.

    Sculley 2010, "Web-scale k-means clustering" (WWW), with a whole minibatch at once; counts of
    zero make it a step of Lloyd's algorithm. A center without vectors moves to one of the vectors
    that are farthest from their own centers, with a count of 0. Vectors of weight 0 are padding.

    Returns:
        The centers and their new counts.
    """
    distances = squared_distances(vectors, centers) + prices[None]
    codes = jnp.argmin(distances, axis=1)
    size = centers.shape[0]
    added = jax.ops.segment_sum(weights, codes, size)
    sums = jax.ops.segment_sum(vectors * weights[:, None], codes, size)
    total = counts + added
    moved = (centers * counts[:, None] + sums) / jnp.maximum(total, 1)[:, None]
    # The k-th center without vectors takes the k-th farthest vector.
    far = jnp.where(weights > 0, distances.min(axis=1), -1.0)
    _, farthest = jax.lax.top_k(far, min(size, vectors.shape[0]))
    is_empty = total == 0
    place = jnp.clip(jnp.cumsum(is_empty) - 1, 0, farthest.shape[0] - 1)
    centers = jnp.where(is_empty[:, None], vectors[farthest[place]], moved)
    return centers, total
