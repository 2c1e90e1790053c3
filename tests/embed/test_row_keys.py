"""Keys of rows draw what JAX's own draw."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.embed.row_keys import draw_with, key_words, unrolled_key


def keys(seed=3):
    theirs = jax.random.key(seed, impl="threefry2x32")
    return unrolled_key(key_words(theirs)), theirs


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 65), (0, 4)])
def test_bits(dtype, shape):
    ours, theirs = keys()
    with jax.enable_x64(dtype == "uint64"):
        found, expected = (jax.random.bits(key, shape, dtype) for key in (ours, theirs))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "draw",
    [
        lambda key: jax.random.normal(key, (2, 9)),
        lambda key: jax.random.uniform(key, (1, 64), jnp.float32, -1.0, 1.0),
        lambda key: jax.nn.initializers.truncated_normal(0.1)(key, (4, 4)),
        lambda key: jax.nn.initializers.orthogonal()(key, (4, 4)),
        lambda key: jax.random.normal(jax.random.split(key, 3)[2], (5,)),
        lambda key: jax.random.normal(jax.random.fold_in(key, 2**32 - 1), (5,)),
        lambda key: jax.random.permutation(key, 50),
    ],
)
def test_draws(draw):
    ours, theirs = keys()
    np.testing.assert_array_equal(draw(ours), draw(theirs))


def test_draws_for_many_ids():
    ids = np.random.default_rng(0).integers(0, 2**32, 100).astype(np.uint32)

    def rows(key):
        return jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i), (8,)))(ids)

    ours, theirs = keys()
    np.testing.assert_array_equal(jax.jit(rows)(ours), jax.jit(rows)(theirs))


def test_functions_that_want_keys_of_jax():
    """Poisson's numbers are drawn with keys of ``"threefry2x32"`` alone."""

    def poisson(key, shape, dtype):
        return jax.random.poisson(key, 3.0, shape).astype(dtype)

    _, theirs = keys()
    drawn = draw_with(poisson, key_words(theirs), (2, 5))
    np.testing.assert_array_equal(drawn, poisson(theirs, (2, 5), jnp.float32))


def test_seed():
    ours, _ = keys()
    like = jax.random.key(5, impl=jax.random.key_impl(ours))
    np.testing.assert_array_equal(
        jax.random.key_data(like), jax.random.key_data(jax.random.key(5, impl="threefry2x32"))
    )
