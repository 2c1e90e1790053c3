from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrec import optim


def train(optimizer, rows, gradients, steps=None):
    found, state = jnp.asarray(rows, jnp.float32), optimizer.init(*rows.shape)
    for step, gradient in zip(steps or range(len(gradients)), gradients, strict=True):
        gradient = jnp.asarray(gradient, jnp.float32)
        found, state = optimizer.update(found, gradient, state, jnp.int32(step))
    return np.asarray(found), state


@pytest.mark.parametrize("row_wise", [False, True], ids=["rmsprop", "rowwise_rmsprop"])
def test_follows_its_formula(row_wise):
    rng = np.random.default_rng(0)
    rows, gradients = rng.normal(size=(5, 4)), rng.normal(size=(6, 5, 4))
    kind = optim.rowwise_rmsprop if row_wise else optim.rmsprop
    found, state = train(kind(0.05, decay=0.8, eps=0.1), rows, gradients)

    second = np.zeros((5, 1) if row_wise else (5, 4))
    for gradient in gradients:
        squares = gradient**2
        if row_wise:
            squares = squares.mean(axis=1, keepdims=True)
        second = 0.8 * second + 0.2 * squares
        rows = rows - 0.05 * gradient / (np.sqrt(second) + 0.1)
    np.testing.assert_allclose(found, rows, rtol=1e-5, atol=1e-6)
    expected = second[:, 0] if row_wise else second
    np.testing.assert_allclose(state["second_moment"], expected, rtol=1e-5)


def test_is_optax_rmsprop_on_rows_that_always_occur():
    rng = np.random.default_rng(1)
    rows, gradients = rng.normal(size=(3, 2)), rng.normal(size=(4, 3, 2))
    found, _ = train(optim.rmsprop(0.05, decay=0.7), rows, gradients)

    transform = optax.rmsprop(0.05, decay=0.7, eps_in_sqrt=False)
    expected = jnp.asarray(rows, jnp.float32)
    state = transform.init(expected)
    for gradient in gradients:
        updates, state = transform.update(jnp.asarray(gradient, jnp.float32), state)
        expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_adaptive_regularization_catches_up():
    optimizer = optim.rowwise_rmsprop(0.5, ar_alpha=0.1, min_shrinkage=0.25)
    rows, gradients = np.ones((1, 2)), np.zeros((4, 1, 2))
    found, state = train(optimizer, rows, gradients, steps=[2, 3, 7, 57])
    # Never seen: as if seen one update ago. Then gaps of 1, of 4, and of 50: past the floor.
    np.testing.assert_allclose(found, np.full((1, 2), 0.95 * 0.95 * 0.8 * 0.25), rtol=1e-6)
    assert state["last_step"].tolist() == [58]
