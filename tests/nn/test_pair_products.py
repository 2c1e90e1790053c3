from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.embed.kernels import cpu
from jaxrec.nn import DotInteraction, pairwise_dots
from tests.embed.kernels import oracle

pytestmark = pytest.mark.jax_version


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
    expected, gradient = oracle.pairs(vectors, cotangent)
    out, got = with_gradient(vectors.astype(np.float32), cotangent.astype(np.float32))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got, gradient, rtol=1e-5, atol=1e-5)


def test_backward_has_no_scatter():
    vectors = jnp.ones((4, 5, 3))
    program = jax.jit(jax.grad(lambda x: pairwise_dots(x).sum())).lower(vectors).as_text()
    assert "stablehlo.gather" in program
    assert "stablehlo.scatter" not in program


def test_native_on_one_device(monkeypatch):
    """XLA cannot divide a native call: it has the training step of a process with one device."""
    vectors = jnp.asarray(np.random.default_rng(0).standard_normal((4, 5, 3)), jnp.float32)

    def program(devices):
        monkeypatch.setattr(jax, "device_count", lambda: devices)
        return jax.jit(jax.value_and_grad(lambda x: (pairwise_dots(x) ** 2).sum())).lower(vectors)

    one, eight = program(1), program(8)
    assert "jaxrec_pair_" not in eight.as_text()
    if cpu.missing() is None:
        assert "jaxrec_pair_products" in one.as_text()
        assert "jaxrec_pair_gradients" in one.as_text()
    by_one, by_eight = one.compile()(vectors), eight.compile()(vectors)
    for got, expected in zip(by_one, by_eight, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def plain_dots(vectors):
    first, second = np.triu_indices(vectors.shape[1], 1)
    return (vectors[:, first] * vectors[:, second]).sum(axis=2)


@pytest.mark.parametrize("devices", [1, 8])
def test_the_gradient_of_a_gradient(monkeypatch, devices):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    vectors = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)

    def penalty(products):
        def loss(vectors):
            return (products(vectors) ** 2).sum()

        return jax.jit(jax.grad(lambda vectors: (jax.grad(loss)(vectors) ** 2).sum()))

    got, expected = penalty(pairwise_dots)(vectors), penalty(plain_dots)(vectors)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("devices", [1, 8])
def test_gradients_of_each_sample(monkeypatch, devices):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    vectors = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    cotangent = np.ones((3, 6), np.float32)
    each = jax.vmap(jax.grad(lambda sample: pairwise_dots(sample[None]).sum()))
    np.testing.assert_allclose(
        jax.jit(each)(vectors), oracle.pairs(vectors, cotangent)[1], rtol=1e-5, atol=1e-5
    )


def quartic(dots):
    return lambda vectors: (dots(vectors) ** 2).sum()


MODES = {
    "jvp": lambda dots, x, t: jax.jvp(dots, (x,), (t,)),
    "linearize": lambda dots, x, t: jax.linearize(dots, x)[1](t),
    "jacobian": lambda dots, x, t: jax.jacfwd(dots)(x),
    "hessian": lambda dots, x, t: jax.hessian(quartic(dots))(x),
    "forward_over_forward": lambda dots, x, t: jax.jacfwd(jax.jacfwd(quartic(dots)))(x),
    "reverse_over_forward": lambda dots, x, t: jax.grad(
        lambda x: (jax.jvp(dots, (x,), (t,))[1] ** 2).sum()
    )(x),
    "each_sample": lambda dots, x, t: jax.vmap(
        lambda x, t: jax.jvp(dots, (x[None],), (t[None],))[1]
    )(x, t),
}


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("mode", MODES)
def test_forward_mode(monkeypatch, mode, devices):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    rng = np.random.default_rng(0)
    vectors, tangents = (rng.standard_normal((2, 3, 4), np.float32) for _ in range(2))
    got, expected = (
        jax.jit(functools.partial(MODES[mode], dots))(vectors, tangents)
        for dots in (pairwise_dots, plain_dots)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, expected)


def test_a_batch_over_devices_stays_there():
    mesh = jax.make_mesh((8,), ("data",))
    by_sample = jax.sharding.NamedSharding(mesh, jax.P("data"))
    vectors = jax.device_put(jnp.ones((16, 5, 3)), by_sample)
    step = jax.jit(jax.grad(lambda x: (pairwise_dots(x) ** 2).sum()))
    program = step.lower(vectors).compile()
    assert program.output_shardings.is_equivalent_to(by_sample, 3)
    assert "all-gather" not in program.as_text()


@pytest.mark.parametrize(("features", "dim", "columns"), [(26, 16, 367), (1, 4, 5), (0, 4, 4)])
def test_out_features(features, dim, columns):
    assert DotInteraction.out_features(features, dim) == columns
    vectors = jnp.ones((2, dim)), jnp.ones((2, features, dim))
    out = jax.eval_shape(DotInteraction(), *vectors)
    assert out.shape == (2, columns)
