from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrec import optim


@pytest.mark.parametrize("row_wise", [False, True], ids=["adagrad", "rowwise_adagrad"])
def test_initial_accumulator_value(row_wise):
    kind = optim.rowwise_adagrad if row_wise else optim.adagrad
    optimizer = kind(0.5, initial_accumulator_value=9.0)
    state = optimizer.init(2, 2)
    assert state["accumulator"].tolist() == ([9.0, 9.0] if row_wise else [[9.0, 9.0]] * 2)
    rows, state = optimizer.update(jnp.zeros((2, 2)), jnp.full((2, 2), 4.0), state, jnp.int32(0))
    # The root is 5.
    np.testing.assert_allclose(rows, np.full((2, 2), -0.4), rtol=1e-6)
    np.testing.assert_array_equal(state["accumulator"], np.full_like(state["accumulator"], 25))


def test_weight_decay_needs_a_mode():
    rows, gradients = jnp.ones((1, 2)), jnp.full((1, 2), 0.5)

    def update(**arguments):
        optimizer = optim.rowwise_adagrad(0.5, **arguments)
        return optimizer.update(rows, gradients, optimizer.init(1, 2), jnp.int32(0))[0].tolist()

    # The step is lr g / |g| = 0.5.
    assert update() == update(weight_decay=0.5) == [[0.5, 0.5]]
    # lr wd w = 0.25 comes on top.
    assert update(weight_decay=0.5, weight_decay_mode="decoupled") == [[0.25, 0.25]]
    # g + wd w = 1 takes the place of g, and its size does not matter in the first step.
    assert update(weight_decay=0.5, weight_decay_mode="l2") == [[0.5, 0.5]]


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
