from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrec import optim


def train(optimizer, rows, gradients, steps):
    found, state = jnp.asarray(rows, jnp.float32), optimizer.init(*rows.shape)
    for step, gradient in zip(steps, gradients, strict=True):
        gradient = jnp.asarray(gradient, jnp.float32)
        found, state = optimizer.update(found, gradient, state, jnp.int32(step))
    return np.asarray(found), state


def test_is_optax_adamw_on_rows_that_always_occur():
    rng = np.random.default_rng(0)
    rows, gradients = rng.normal(size=(3, 4)), rng.normal(size=(6, 3, 4))
    found, _ = train(optim.adam(0.05, weight_decay=0.1), rows, gradients, range(6))

    transform = optax.adamw(0.05, weight_decay=0.1)
    expected = jnp.asarray(rows, jnp.float32)
    state = transform.init(expected)
    for gradient in gradients:
        updates, state = transform.update(jnp.asarray(gradient, jnp.float32), state, expected)
        expected = optax.apply_updates(expected, updates)
    # optax takes 1 - b2^t in float32, which costs it digits in the first steps.
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", [0, 1, 999, 10**6])
def test_bias_correction_is_accurate(step):
    optimizer = optim.adam(1.0, b1=0.9, b2=0.9999, eps=1e-30)
    found, _ = train(optimizer, np.zeros((1, 1)), np.ones((1, 1, 1)), [step])
    t = step + 1
    expected = -(0.1 / (1 - 0.9**t)) / np.sqrt((1 - 0.9999) / (1 - 0.9999**t))
    np.testing.assert_allclose(found, [[expected]], rtol=1e-6)


def test_a_rare_row_is_corrected_by_its_own_count():
    rows, gradients = np.zeros((1, 2)), np.ones((2, 1, 2))
    rare, state = train(
        optim.adam(0.1, rowwise_bias_correction=True), rows, gradients, steps=[500, 900]
    )
    fresh, _ = train(optim.adam(0.1), rows, gradients, steps=[0, 1])
    np.testing.assert_allclose(rare, fresh, rtol=1e-6)
    assert state["count"].tolist() == [2]


def test_row_wise_second_moment_is_the_mean():
    rows, gradients = np.zeros((1, 2)), np.array([[[3.0, 4.0]]])
    found, state = train(optim.partial_rowwise_adam(0.1), rows, gradients, steps=[0])
    np.testing.assert_allclose(state["second_moment"], [0.001 * 12.5], rtol=1e-6)
    np.testing.assert_allclose(found, -0.1 * gradients[0] / np.sqrt(12.5), rtol=1e-5)
