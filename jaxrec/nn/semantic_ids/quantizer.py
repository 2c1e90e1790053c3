"""Base class of quantizers: from vectors to codes and back, level by level."""

from __future__ import annotations

import abc
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

# Vectors that are encoded at once.
_PART = 1 << 14


def checked_vectors(vectors: Any, dim: int | None = None) -> Float[np.ndarray, "n dim"]:
    """Return float32 vectors on the host; refuse other shapes and numbers that are not finite."""
    array = np.asarray(vectors)
    wanted = "[items, dim]" if dim is None else f"[items, {dim}]"
    if array.ndim != 2 or not array.shape[1] or dim not in (None, array.shape[1]):
        raise ValueError(f"vectors must have the shape {wanted}, got {list(array.shape)}")
    if not np.issubdtype(array.dtype, np.floating) and array.dtype != jnp.bfloat16:
        raise ValueError(f"vectors must be floating-point numbers, got {array.dtype}")
    array = np.asarray(array, np.float32)
    is_finite = np.isfinite(array).all(axis=1)
    if not is_finite.all():
        raise ValueError(f"vectors, row {int(np.argmin(is_finite))}: a number is not finite")
    return array


def check_sizes(num_levels: int, codebook_size: int) -> None:
    """Refuse numbers of levels and codes that no quantizer has."""
    if num_levels < 1:
        raise ValueError(f"num_levels is 1 or more, got {num_levels}")
    if codebook_size < 2:
        raise ValueError(f"codebook_size is 2 or more, got {codebook_size}")


class Quantizer(abc.ABC):
    """Maps a vector to a code of each level, after `fit` has made the codebooks.

    A subclass implements `fit`, and ``_encode`` and ``_decode`` of one part.
    """

    num_levels: int
    codebook_size: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of codes of each level."""
        return (self.codebook_size,) * self.num_levels

    @abc.abstractmethod
    def fit(self, vectors: Any) -> Any:
        """Make the codebooks from vectors, ``[items, dim]``, and return the quantizer."""

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Columns of a vector; a ValueError before `fit`."""

    @abc.abstractmethod
    def _encode(self, vectors: Float[Array, "n dim"]) -> Int32[Array, "n levels"]:
        """Return the codes of some vectors."""

    @abc.abstractmethod
    def _decode(self, codes: Int32[Array, "n levels"]) -> Float[Array, "n dim"]:
        """Return the vectors that codes stand for."""

    def encode(self, vectors: Any) -> Int32[np.ndarray, "n levels"]:
        """Return the codes of vectors, ``[items, levels]`` int32 from 0.

        Raises:
            ValueError: The quantizer was not fitted, the vectors have another shape, or a number is
                not finite (the message has its row).
        """
        array = checked_vectors(vectors, self.dim)
        found = np.empty((len(array), self.num_levels), np.int32)
        for start in range(0, len(array), _PART):
            part = array[start : start + _PART]
            # Padded to one size, so that one program serves all parts.
            size = min(_PART, 1 << (len(array) - 1).bit_length())
            padded = np.pad(part, [(0, size - len(part)), (0, 0)])
            found[start : start + len(part)] = self._encode(jnp.asarray(padded))[: len(part)]
        return found

    def decode(self, codes: Any) -> Float[np.ndarray, "n dim"]:
        """Return the vectors that codes stand for, ``[items, dim]`` float32.

        Raises:
            ValueError: The quantizer was not fitted, or the codes are not of its levels.
        """
        array = np.asarray(codes)
        dim = self.dim
        if array.ndim != 2 or array.shape[1] != self.num_levels:
            raise ValueError(
                f"codes must have the shape [items, {self.num_levels}], got {list(array.shape)}"
            )
        if array.size and not 0 <= array.min() <= array.max() < self.codebook_size:
            raise ValueError(
                f"codes must be from 0 to {self.codebook_size - 1}, got {array.min()} to "
                f"{array.max()}"
            )
        if not len(array):
            return np.zeros((0, dim), np.float32)
        return np.asarray(self._decode(jnp.asarray(array, jnp.int32)))

    def _require_fitted(self, is_fitted: bool) -> None:
        if not is_fitted:
            raise ValueError(f"{type(self).__name__} has no codebooks yet; call fit(vectors) first")
