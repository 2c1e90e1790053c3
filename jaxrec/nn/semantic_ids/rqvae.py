"""RQ-VAE: an autoencoder whose middle is quantized level by level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxrec.nn.mlp import MLP
from jaxrec.nn.semantic_ids.clustering import choose_seeds, nearest
from jaxrec.nn.semantic_ids.quantizer import Quantizer, check_sizes, checked_vectors


class _Network(nnx.Module):
    """Encoder, codebooks and decoder."""

    def __init__(
        self,
        dim: int,
        hidden_sizes: Sequence[int],
        code_dim: int,
        num_levels: int,
        codebook_size: int,
        rngs: nnx.Rngs,
    ):
        self.encoder = MLP(dim, (*hidden_sizes, code_dim), activation_on_last=False, rngs=rngs)
        self.decoder = MLP(
            code_dim, (*hidden_sizes[::-1], dim), activation_on_last=False, rngs=rngs
        )
        self.codebooks = nnx.Param(jnp.zeros((num_levels, codebook_size, code_dim)))

    def quantize(self, hidden: Float[Array, "n code_dim"]) -> tuple[Array, Array]:
        """Return codes ``[n, levels]`` and the residuals they encode, ``[levels, n, code_dim]``."""
        codes, left = [], []
        for level in range(self.codebooks.shape[0]):
            book = self.codebooks[level]
            left.append(hidden)
            codes.append(nearest(hidden, book, jnp.zeros(book.shape[0], book.dtype)))
            hidden = hidden - book[codes[-1]]
        return jnp.stack(codes, axis=1), jnp.stack(left)

    def centers(self, codes: Int32[Array, "n levels"]) -> Float[Array, "levels n code_dim"]:
        """Return the center of each code."""
        levels = jnp.arange(codes.shape[1], dtype=jnp.int32)[:, None]
        return self.codebooks[...][levels, codes.T]

    def loss(
        self, vectors: Float[Array, "n dim"], commitment: float
    ) -> tuple[Float[Array, ""], tuple[Array, Array]]:
        """Return the loss, and codes and residuals as `quantize` does."""
        hidden = self.encoder(vectors)
        codes, left = jax.lax.stop_gradient(self.quantize(hidden))
        centers = self.centers(codes)
        # The residual of each level, a function of the encoder. Earlier centers are constants.
        before = jnp.cumsum(centers, axis=0) - centers
        residuals = hidden[None] - jax.lax.stop_gradient(before)
        to_codes = jnp.square(jax.lax.stop_gradient(residuals) - centers).sum(-1)
        to_encoder = jnp.square(residuals - jax.lax.stop_gradient(centers)).sum(-1)
        # Straight through: the decoder reads the centers, its gradient goes to the encoder.
        read = hidden + jax.lax.stop_gradient(centers.sum(axis=0) - hidden)
        error = jnp.square(self.decoder(read) - vectors).sum(-1)
        per_vector = error + (to_codes + commitment * to_encoder).sum(axis=0)
        return per_vector.mean(), (codes, left)


class RQVAE(Quantizer):
    """Codes of vectors by a residual-quantized autoencoder, trained to reconstruct them.

    Lee et al. 2022, "Autoregressive image generation using residual quantization"
    (arXiv:2203.01941), with the losses of TIGER (arXiv:2305.05065), section 3.1:
    ``|x - x'|^2 + sum_l |sg(r_l) - e_l|^2 + commitment |r_l - sg(e_l)|^2``, where ``r_l`` is what
    level ``l`` quantizes and ``e_l`` its center. Centers begin as k-means++ seeds of the first
    encoder's outputs. A code that no vector of ``revive_after`` steps had gets a residual of the
    batch as its center (Dhariwal et al. 2020, arXiv:2005.00341, section 3.1).

    Args:
        num_levels: Number of levels.
        codebook_size: Number of codes of a level.
        code_dim: Columns of a center.
        hidden_sizes: Hidden layers of the encoder; the decoder has them in reverse.
        commitment: Weight of the commitment loss.
        batch_size: Vectors of a step; all, if there are fewer.
        num_steps: Steps.
        learning_rate: Learning rate of Adam.
        revive_after: Steps without a vector after which a code is dead.
        seed: Seed of first values and minibatches. Equal seeds and vectors give equal codes.

    Attributes:
        losses: ``[steps]`` losses of the last `fit`.
        revived: Number of codes that the last `fit` revived.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> vectors = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
        >>> quantizer = RQVAE(2, 4, code_dim=4, hidden_sizes=(8,), num_steps=20).fit(vectors)
        >>> quantizer.encode(vectors).shape
        (64, 2)
    """

    def __init__(
        self,
        num_levels: int = 3,
        codebook_size: int = 256,
        *,
        code_dim: int = 32,
        hidden_sizes: Sequence[int] = (512, 256, 128),
        commitment: float = 0.25,
        batch_size: int = 1024,
        num_steps: int = 2000,
        learning_rate: float = 1e-3,
        revive_after: int = 50,
        seed: int = 0,
    ):
        check_sizes(num_levels, codebook_size)
        numbers = {
            "code_dim": code_dim,
            "batch_size": batch_size,
            "num_steps": num_steps,
            "revive_after": revive_after,
        }
        for name, number in numbers.items():
            if number < 1:
                raise ValueError(f"{name} is 1 or more, got {number}")
        if commitment < 0:
            raise ValueError(f"commitment is 0 or more, got {commitment}")
        self.num_levels, self.codebook_size = num_levels, codebook_size
        self.code_dim, self.hidden_sizes = code_dim, tuple(hidden_sizes)
        self.commitment, self.batch_size, self.num_steps = commitment, batch_size, num_steps
        self.learning_rate, self.revive_after, self.seed = learning_rate, revive_after, seed
        self.losses: Float[np.ndarray, " steps"] = np.zeros(0, np.float32)
        self.revived = 0
        self._network: _Network | None = None
        self._scaling: tuple[np.ndarray, float] | None = None

    @property
    def dim(self) -> int:
        self._require_fitted(self._scaling is not None)
        assert self._scaling is not None
        return len(self._scaling[0])

    @property
    def codebooks(self) -> Float[np.ndarray, "levels size code_dim"]:
        """Centers of all codes; a ValueError before `fit`."""
        self._require_fitted(self._network is not None)
        assert self._network is not None
        return np.asarray(self._network.codebooks[...])

    def fit(self, vectors: Any) -> RQVAE:
        """Train on vectors, ``[items, dim]``, and return the quantizer.

        Raises:
            ValueError: The vectors have another shape, a number is not finite (the message has its
                row), there are fewer vectors than codes, or the training diverges.
        """
        array = checked_vectors(vectors)
        count, dim = array.shape
        if count < self.codebook_size:
            raise ValueError(
                f"{count} vectors cannot fill codebooks of {self.codebook_size}; give more vectors "
                "or a smaller codebook_size"
            )
        # One learning rate for vectors of any scale.
        mean = array.mean(axis=0)
        scale = float(max(np.sqrt(np.square(array - mean).mean()), np.finfo(np.float32).tiny))
        array = (array - mean) / scale
        rng = np.random.default_rng(self.seed)
        size = min(self.batch_size, count)
        network = _Network(
            dim,
            self.hidden_sizes,
            self.code_dim,
            self.num_levels,
            self.codebook_size,
            nnx.Rngs(self.seed),
        )
        sample = array[np.sort(rng.choice(count, min(count, 16 * self.codebook_size), False))]
        _seed_codebooks(network, jnp.asarray(sample), jax.random.key(self.seed))
        optimizer = nnx.Optimizer(network, optax.adam(self.learning_rate), wrt=nnx.Param)
        idle = jnp.zeros((self.num_levels, self.codebook_size), jnp.int32)
        losses, revived, order = [], [], np.zeros(0, np.int64)
        key = jax.random.key(self.seed)
        for number in range(self.num_steps):
            if len(order) < size:
                order = rng.permutation(count)
            chosen, order = order[:size], order[size:]
            loss, idle, dead = _train_step(
                network, optimizer, idle, jnp.asarray(array[chosen]),
                jax.random.fold_in(key, number), self.commitment, self.revive_after,
            )  # fmt: skip
            losses.append(loss)
            revived.append(dead)
        self.losses = np.asarray(jax.device_get(losses), np.float32)
        if not np.isfinite(self.losses).all():
            at = int(np.argmin(np.isfinite(self.losses)))
            raise ValueError(f"the loss is not finite from step {at} on; lower the learning rate")
        self.revived = int(np.sum(jax.device_get(revived)))
        self._network, self._scaling = network, (mean, scale)
        return self

    def _encode(self, vectors: Float[Array, "n dim"]) -> Int32[Array, "n levels"]:
        assert self._network is not None
        assert self._scaling is not None
        mean, scale = self._scaling
        return _encode(self._network, (vectors - mean[None]) / scale)

    def _decode(self, codes: Int32[Array, "n levels"]) -> Float[Array, "n dim"]:
        assert self._network is not None
        assert self._scaling is not None
        mean, scale = self._scaling
        decoded = self._network.decoder(self._network.centers(codes).sum(axis=0))
        return decoded * scale + mean[None]


@nnx.jit
def _encode(network: _Network, vectors: Array) -> Array:
    return network.quantize(network.encoder(vectors))[0]


def _seed_codebooks(network: _Network, vectors: Array, key: Array) -> None:
    """Set each level's centers to k-means++ seeds of the residuals that the levels before leave."""
    left, books = network.encoder(vectors), []
    for level in range(network.codebooks.shape[0]):
        size = network.codebooks.shape[1]
        books.append(choose_seeds(jax.random.fold_in(key, level), left, size=size))
        left = left - books[-1][nearest(left, books[-1], jnp.zeros(size))]
    network.codebooks.set_value(jnp.stack(books))


@nnx.jit(static_argnames=("commitment", "revive_after"))
def _train_step(
    network: _Network,
    optimizer: nnx.Optimizer,
    idle: Int32[Array, "levels size"],
    vectors: Float[Array, "n dim"],
    key: Array,
    commitment: float,
    revive_after: int,
) -> tuple[Array, Array, Array]:
    """Take a step; return the loss, steps since each code was used, and codes that were revived."""
    loss_fn = nnx.value_and_grad(lambda network: network.loss(vectors, commitment), has_aux=True)
    (loss, (codes, left)), gradients = loss_fn(network)
    optimizer.update(network, gradients)
    levels, size = idle.shape
    used = jax.vmap(lambda of_level: jnp.zeros(size, bool).at[of_level].set(True))(codes.T)
    idle = jnp.where(used, 0, idle + 1)
    is_dead = idle >= revive_after
    drawn = jax.random.randint(key, (levels, size), 0, vectors.shape[0])
    residuals = left[jnp.arange(levels)[:, None], drawn]
    books = network.codebooks[...]
    network.codebooks.set_value(jnp.where(is_dead[..., None], residuals, books))
    return loss, jnp.where(is_dead, 0, idle), is_dead.sum()
