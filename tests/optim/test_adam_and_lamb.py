from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrec import optim
from jaxrec.optim.adam_and_lamb import adam_direction, moving_average

VALUES = np.random.default_rng(0).normal(size=(4, 3, 2))


@pytest.mark.parametrize(("b1", "b2"), [(0.9, 0.999), (0.0, 0.99999), (0.5, 0.0)])
def test_direction_of_several_steps(b1, b2):
    """In float64 each average is a weighted mean of all values, the weights summing to 1."""
    first = second = jnp.zeros((3, 2))
    for step, value in enumerate(jnp.float32(VALUES), 1):
        first, second = moving_average(first, value, b1), moving_average(second, value**2, b2)
        found = adam_direction(first, second, jnp.int32(step), b1=b1, b2=b2, eps=1e-8)
        seen, ages = VALUES[:step], np.arange(step)[::-1]
        means = [
            np.average(values, axis=0, weights=np.float64(decay) ** ages)
            for values, decay in ((seen, b1), (seen**2, b2))
        ]
        np.testing.assert_allclose(found, means[0] / np.sqrt(means[1]), rtol=2e-5)


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


# The trust ratio where a norm is zero; elsewhere the golden cases hold it.
LAMBS = pytest.mark.parametrize("kind", [optim.lamb, optim.partial_rowwise_lamb])


def first_update(optimizer, rows, gradients):
    rows, gradients = jnp.asarray(rows, jnp.float32), jnp.asarray(gradients, jnp.float32)
    return optimizer.update(rows, gradients, optimizer.init(*rows.shape), jnp.int32(0))[0]


@LAMBS
def test_a_row_of_zeros_takes_the_step_of_adam(kind):
    found = first_update(kind(0.1), [[0.0, 0.0]], [[2.0, -2.0]])
    np.testing.assert_allclose(found, [[-0.1, 0.1]], rtol=1e-6)


@LAMBS
def test_no_gradient_and_no_decay_changes_nothing(kind):
    found = first_update(kind(0.1), [[3.0, 4.0]], [[0.0, 0.0]])
    np.testing.assert_array_equal(found, [[3.0, 4.0]])


@LAMBS
def test_decay_alone_shrinks_by_the_rate(kind):
    # r = wd w, so that |w| / |r| r = w.
    found = first_update(kind(0.1, weight_decay=0.5), [[3.0, 4.0]], [[0.0, 0.0]])
    np.testing.assert_allclose(found, [[2.7, 3.6]], rtol=1e-6)


@LAMBS
def test_rows_are_scaled_each_by_its_own_length(kind):
    found = first_update(kind(0.1), [[4.0, 4.0], [0.5, 0.5]], [[1.0, -1.0], [1.0, -1.0]])
    np.testing.assert_allclose(found, [[3.6, 4.4], [0.45, 0.55]], rtol=1e-6)
