"""Residual k-means: each level clusters what the levels before it left of the vectors."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from jaxrec.nn.semantic_ids.clustering import balance, choose_seeds, cluster_step, nearest
from jaxrec.nn.semantic_ids.quantizer import Quantizer, check_sizes, checked_vectors

# Vectors that seeds are chosen from, for each code.
_SEED_SAMPLE = 64

# Iterations of the prices in each step, and after the last one.
_PRICE_STEPS, _LAST_PRICE_STEPS = 8, 200


class ResidualKMeans(Quantizer):
    """Codes of vectors by k-means of residuals, level by level.

    A level's code is the nearest center, and the next level clusters the difference to it, as in
    the tokenizers of OneRec (arXiv:2502.18965) and of QARM (arXiv:2411.11739). Centers begin as
    `k-means++` seeds and move by steps of minibatches (Sculley 2010).

    With ``balanced``, each code of a level gets about equally many of the fitted vectors: every
    code has a price, which is added to the squared distances (see
    `jaxrec.nn.semantic_ids.clustering.balance`). `encode` uses the same prices, so that a vector's
    codes do not depend on the other vectors of a call.

    Args:
        num_levels: Number of levels.
        codebook_size: Number of codes of a level.
        balanced: Whether codes are used equally often.
        batch_size: Vectors of a step; None: all, which are steps of Lloyd's algorithm.
        num_steps: Steps of each level.
        mesh: Devices that share the vectors of each step; None: the default device.
        seed: Seed of the first centers and of the minibatches. Equal seeds, vectors and devices
            give equal codes.

    Attributes:
        codebooks: ``[levels, size, dim]`` float32 centers; None before `fit`.
        prices: ``[levels, size]`` float32; zeros unless ``balanced``. None before `fit`.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> vectors = np.random.default_rng(0).standard_normal((100, 8)).astype(np.float32)
        >>> quantizer = ResidualKMeans(num_levels=2, codebook_size=4).fit(vectors)
        >>> codes = quantizer.encode(vectors)
        >>> codes.shape, int(codes.max())
        ((100, 2), 3)
        >>> bool(((vectors - quantizer.decode(codes)) ** 2).mean() < (vectors**2).mean())
        True
    """

    def __init__(
        self,
        num_levels: int = 3,
        codebook_size: int = 256,
        *,
        balanced: bool = False,
        batch_size: int | None = None,
        num_steps: int = 30,
        mesh: Mesh | None = None,
        seed: int = 0,
    ):
        check_sizes(num_levels, codebook_size)
        if batch_size is not None and batch_size < codebook_size:
            raise ValueError(
                f"batch_size={batch_size} vectors cannot move {codebook_size} centers; give "
                "codebook_size or more"
            )
        if num_steps < 1:
            raise ValueError(f"num_steps is 1 or more, got {num_steps}")
        self.num_levels, self.codebook_size = num_levels, codebook_size
        self.balanced, self.batch_size, self.num_steps = balanced, batch_size, num_steps
        self.mesh, self.seed = mesh, seed
        self.codebooks: Float[np.ndarray, "levels size dim"] | None = None
        self.prices: Float[np.ndarray, "levels size"] | None = None

    @property
    def dim(self) -> int:
        self._require_fitted(self.codebooks is not None)
        assert self.codebooks is not None
        return self.codebooks.shape[2]

    def fit(self, vectors: Any) -> ResidualKMeans:
        """Make the codebooks from vectors, ``[items, dim]``, and return the quantizer.

        Vectors are in the host's memory; a step's minibatch is on the devices.

        Raises:
            ValueError: The vectors have another shape, a number is not finite (the message has its
                row), or there are fewer vectors than codes.
        """
        left = checked_vectors(vectors)
        if len(left) < self.codebook_size:
            raise ValueError(
                f"{len(left)} vectors cannot fill codebooks of {self.codebook_size}; give more "
                "vectors or a smaller codebook_size"
            )
        left = left.copy()  # becomes the residuals
        books, prices = [], []
        for level in range(self.num_levels):
            rng = np.random.default_rng([self.seed, level])
            centers, of_codes = self._fit_level(left, rng)
            books.append(np.asarray(centers))
            prices.append(np.asarray(of_codes))
            codes = _encode_level(left, books[-1], prices[-1])
            left -= books[-1][codes]
        self.codebooks, self.prices = np.stack(books), np.stack(prices)
        return self

    def _fit_level(
        self, vectors: Float[np.ndarray, "n dim"], rng: np.random.Generator
    ) -> tuple[Array, Array]:
        """Return the centers of a level and their prices."""
        count, size = len(vectors), self.codebook_size
        batch = count if self.batch_size is None else min(self.batch_size, count)
        sample = vectors[_drawn(rng, count, min(count, _SEED_SAMPLE * size))]
        key = jax.random.key(int(rng.integers(1 << 31)))
        centers = choose_seeds(key, jnp.asarray(sample), size=size)
        counts = jnp.zeros(size, jnp.float32)
        prices = jnp.zeros(size, jnp.float32)
        order = np.zeros(0, np.int64)
        step = _step_over(self.mesh)
        for _ in range(self.num_steps):
            if batch == count:
                part, counts = vectors, jnp.zeros_like(counts)
            else:
                if len(order) < batch:
                    order = rng.permutation(count)
                chosen, order = order[:batch], order[batch:]
                part = vectors[np.sort(chosen)]
            placed, weights = _place(part, self.mesh)
            if self.balanced:
                prices = balance(jnp.asarray(part), centers, prices, num_steps=_PRICE_STEPS)
            centers, counts = step(placed, weights, centers, counts, prices)
        if self.balanced:
            # The prices of the final centers. A sample keeps the [vectors, codes] array small.
            most = max(batch, _SEED_SAMPLE * size)
            part = vectors if count <= most else vectors[_drawn(rng, count, most)]
            prices = balance(jnp.asarray(part), centers, prices, num_steps=_LAST_PRICE_STEPS)
        return centers, prices

    def _encode(self, vectors: Float[Array, "n dim"]) -> Int32[Array, "n levels"]:
        assert self.codebooks is not None
        assert self.prices is not None
        return _encode_levels(vectors, jnp.asarray(self.codebooks), jnp.asarray(self.prices))

    def _decode(self, codes: Int32[Array, "n levels"]) -> Float[Array, "n dim"]:
        books = jnp.asarray(self.codebooks)
        return books[jnp.arange(self.num_levels)[None], codes].sum(axis=1)


def _drawn(rng: np.random.Generator, count: int, sample: int) -> np.ndarray:
    """Return ``sample`` of ``count`` rows, ascending."""
    return np.sort(rng.choice(count, sample, replace=False))


@jax.jit
def _encode_levels(vectors: Array, books: Array, prices: Array) -> Array:
    codes = []
    for level in range(books.shape[0]):
        codes.append(nearest(vectors, books[level], prices[level]))
        vectors = vectors - books[level][codes[-1]]
    return jnp.stack(codes, axis=1)


def _encode_level(
    vectors: Float[np.ndarray, "n dim"], centers: np.ndarray, prices: np.ndarray
) -> Int32[np.ndarray, " n"]:
    find = jax.jit(nearest)
    part = 1 << 14
    found = [
        np.asarray(find(vectors[start : start + part], centers, prices))
        for start in range(0, len(vectors), part)
    ]
    return np.concatenate(found)


def _place(vectors: np.ndarray, mesh: Mesh | None) -> tuple[Array, Array]:
    """Put a step's vectors on the devices, filled up to equal shares, with weights of 1 and 0."""
    weights = np.ones(len(vectors), np.float32)
    if mesh is None:
        return jnp.asarray(vectors), jnp.asarray(weights)
    missing = -len(vectors) % mesh.size
    split = NamedSharding(_automatic(mesh), PartitionSpec(mesh.axis_names))
    return (
        jax.device_put(np.pad(vectors, [(0, missing), (0, 0)]), split),
        jax.device_put(np.pad(weights, (0, missing)), split),
    )


@functools.cache
def _step_over(mesh: Mesh | None) -> Any:
    """Return the compiled `cluster_step`, whose results are on every device of a mesh."""
    if mesh is None:
        return jax.jit(cluster_step)
    return jax.jit(cluster_step, out_shardings=NamedSharding(_automatic(mesh), PartitionSpec()))


def _automatic(mesh: Mesh) -> Mesh:
    """Return the mesh with Auto axes: XLA splits the sums over vectors and adds them up."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
