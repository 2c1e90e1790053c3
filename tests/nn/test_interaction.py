from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.nn import DotInteraction, pairwise_dots


@jax.jit
def with_gradient(vectors, cotangent):
    out, vjp = jax.vjp(pairwise_dots, vectors)
    return out, *vjp(cotangent)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 3), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))
def test_pairwise_dots_and_gradient(batch, n, dim, seed):
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((batch, n, dim))
    cotangent = rng.standard_normal((batch, n * (n - 1) // 2))
    expected, gradient = np.zeros_like(cotangent), np.zeros_like(vectors)
    for pair, (i, j) in enumerate(itertools.combinations(range(n), 2)):
        expected[:, pair] = (vectors[:, i] * vectors[:, j]).sum(axis=1)
        gradient[:, i] += cotangent[:, pair, None] * vectors[:, j]
        gradient[:, j] += cotangent[:, pair, None] * vectors[:, i]
    out, got = with_gradient(vectors.astype(np.float32), cotangent.astype(np.float32))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got, gradient, rtol=1e-5, atol=1e-5)


def test_backward_has_no_scatter():
    vectors = jnp.ones((4, 5, 3))
    program = jax.jit(jax.grad(lambda x: pairwise_dots(x).sum())).lower(vectors).as_text()
    assert "stablehlo.gather" in program
    assert "stablehlo.scatter" not in program


@pytest.mark.parametrize(("features", "dim", "columns"), [(26, 16, 367), (1, 4, 5), (0, 4, 4)])
def test_out_features(features, dim, columns):
    assert DotInteraction.out_features(features, dim) == columns
    vectors = jnp.ones((2, dim)), jnp.ones((2, features, dim))
    out = jax.eval_shape(DotInteraction(), *vectors)
    assert out.shape == (2, columns)
