"""Random keys of rows: JAX's default generator, in a form that is fast on CPUs."""

# Filling a table with a billion rows draws from a key of its own for each row. JAX computes the
# rounds of Threefry in a loop on CPUs, which stores all bits after each round. Here the rounds are
# written out, and XLA fuses them: drawing takes a third of the time, with the same numbers.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl
from jaxtyping import Array, Key, Shaped, UInt32

# The two words of a key: a `jax.random.key`'s, a table's or a row's.
KeyWords: TypeAlias = UInt32[Array, "2"]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def key_words(key: Key[Array, ""] | Shaped[Array, "_"] | np.ndarray) -> KeyWords:
    """Return the two words of a random key, or of a key's data.

    They are the words of a Threefry key, and two words drawn with any other key.
    """
    if not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape == (2,):
            return jnp.asarray(key, jnp.uint32)
        key = jax.random.wrap_key_data(jnp.asarray(key))
    data = jax.random.key_data(key)
    return data if data.shape == (2,) else jax.random.bits(key, (2,), jnp.uint32)


def fold_words(
    words: UInt32[Array, "*_ 2"], high: UInt32[Array, "*n"], low: UInt32[Array, "*n"]
) -> UInt32[Array, "*n 2"]:
    """Fold numbers of 64 bits, ``high * 2**32 + low``, into keys, and return the new keys' words.

    There is one key for all numbers, or one for each. Numbers below 2**32 give the words that
    `jax.random.fold_in` gives.
    """
    return jnp.stack(_threefry(words, high, low), axis=-1)


def unrolled_key(words: KeyWords) -> Array:
    """Return a key that draws like ``jax.random.wrap_key_data(words, impl="threefry2x32")``."""
    return jax.random.wrap_key_data(words, impl=_UNROLLED)


def draw_with(draw: Callable, words: KeyWords, shape: tuple[int, int]) -> Array:
    """Return ``draw(key, shape, float32)`` with the key that has these words."""
    try:
        return jnp.asarray(draw(unrolled_key(words), shape, jnp.float32))
    except NotImplementedError:  # jax.random.poisson takes keys of JAX's own generator alone
        own = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jnp.asarray(draw(own, shape, jnp.float32))


def _threefry(key: UInt32[Array, "*_ 2"], high: Array, low: Array) -> tuple[Array, Array]:
    """Encrypt 64-bit counters by Threefry-2x32 with 20 rounds (Salmon et al., 2011)."""
    first, second = key[..., 0], key[..., 1]
    words = (first, second, first ^ second ^ _PARITY)
    high, low = high + words[0], low + words[1]
    for i in range(5):
        for distance in _ROTATIONS[i % 2]:
            high = high + low
            low = (low << np.uint32(distance)) | (low >> np.uint32(32 - distance))
            low = high ^ low
        high = high + words[(i + 1) % 3]
        low = low + words[(i + 2) % 3] + np.uint32(i + 1)
    return high, low


def _count(key: UInt32[Array, "2"], shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Encrypt the numbers 0, 1, 2, ... for the elements of an array; return both words of each."""
    low = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    return _threefry(key, jnp.zeros_like(low), low)


def _seed(seed: Shaped[Array, ""]) -> UInt32[Array, "2"]:
    return jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))


def _fold_in(key: UInt32[Array, "2"], data: Any) -> UInt32[Array, "2"]:
    low = jnp.asarray(data).astype(jnp.uint32)
    return jnp.stack(_threefry(key, jnp.zeros_like(low), low))


def _split(key: UInt32[Array, "2"], shape: tuple[int, ...]) -> UInt32[Array, "*shape 2"]:
    return jnp.stack(_count(key, shape), axis=-1)


def _random_bits(key: UInt32[Array, "2"], bit_width: int, shape: tuple[int, ...]) -> Array:
    high, low = _count(key, shape)
    if bit_width == 64:
        wide = jnp.uint64
        return (high.astype(wide) << wide(32)) | low.astype(wide)
    # Without the barrier, XLA fuses the rounds with what is computed from the bits, and the loop is
    # slow.
    bits = jax.lax.optimization_barrier(high ^ low)
    return bits.astype(f"uint{bit_width}")


_UNROLLED = define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="jaxrec_unrolled_threefry2x32",
    tag="jut",
)
