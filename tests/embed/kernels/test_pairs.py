from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.embed import kernels
from jaxrec.embed.kernels.reference import check_vectors
from tests.embed.kernels import oracle

pytestmark = pytest.mark.jax_version

SHAPES = {
    "dlrm": (5, 27, 16),
    "no_samples": (0, 3, 4),
    "no_vectors": (3, 0, 4),
    "one_vector": (3, 1, 4),
    "no_columns": (2, 5, 0),
    "narrow": (7, 2, 3),
    "more_than_a_panel": (3, 35, 7),
    "more_than_the_registers_hold": (2, 102, 33),
    "wide": (2, 6, 83),
    "several_pieces": (1500, 9, 10),
}


def arrays(batch, n, dim):
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((batch, n, dim), np.float32)
    return vectors, rng.standard_normal((batch, n * (n - 1) // 2), np.float32)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_products_and_gradients(implementation, shape):
    vectors, gradient = arrays(*shape)
    products, gradients = oracle.pairs(vectors, gradient)
    np.testing.assert_allclose(kernels.pair_products(vectors), products, rtol=1e-5, atol=2e-5)
    got = kernels.pair_gradients(vectors, gradient)
    np.testing.assert_allclose(got, gradients, rtol=1e-5, atol=2e-5)


def test_samples_apart(implementation):
    """What is not finite in a sample stays there."""
    vectors, gradient = arrays(3, 7, 5)
    vectors[1], gradient[1] = np.nan, np.inf
    products = np.asarray(kernels.pair_products(vectors))
    gradients = np.asarray(kernels.pair_gradients(vectors, gradient))
    for result in products, gradients:
        assert np.isfinite(result[[0, 2]]).all()
        assert np.isnan(result[1]).all()


def test_narrower_vectors_are_left_to_xla():
    vectors, gradient = (jnp.asarray(x, jnp.bfloat16) for x in arrays(3, 4, 8))
    choice = str(kernels.describe("pair_products", vectors))
    assert "reference on cpu" in choice
    expected = oracle.pairs(np.asarray(vectors, np.float32), np.asarray(gradient, np.float32))
    products, gradients = kernels.pair_products(vectors), kernels.pair_gradients(vectors, gradient)
    assert products.dtype == gradients.dtype == jnp.bfloat16
    for got, exact in zip((products, gradients), expected, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2e-2, atol=5e-2)


def test_more_dimensions(implementation):
    """Under `jax.vmap` all samples are one call's."""
    vectors, gradient = arrays(6, 5, 7)
    parts = vectors.reshape(2, 3, 5, 7), gradient.reshape(2, 3, 10)
    products = jax.vmap(kernels.pair_products)(parts[0])
    gradients = jax.vmap(kernels.pair_gradients)(*parts)
    np.testing.assert_array_equal(products.reshape(6, 10), kernels.pair_products(vectors))
    expected = kernels.pair_gradients(vectors, gradient)
    np.testing.assert_array_equal(gradients.reshape(vectors.shape), expected)


@pytest.mark.parametrize(
    ("vectors", "gradient", "message"),
    [
        ((4, 3), (4, 3), r"vectors whose pairs are multiplied are \[batch, n, dim\]; got \(4, 3\)"),
        ((2, 4, 3), (2, 5), r"2 samples of 4 vectors .* \[2, 6\]; got \(2, 5\)"),
        ((2, 4, 3), (1, 6), r"2 samples of 4 vectors .* \[2, 6\]; got \(1, 6\)"),
    ],
    ids=["two_dimensions", "other_pairs", "other_samples"],
)
def test_other_shapes(vectors, gradient, message):
    with pytest.raises(ValueError, match=message):
        check_vectors(jnp.ones(vectors), jnp.ones(gradient))
