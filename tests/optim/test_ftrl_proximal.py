from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import optim


def ftrl_in_numpy(rows, gradients, rate, *, power, beta, l1, l2, start):
    """McMahan et al. 2013, Algorithm 1, one coordinate after the other, in float64."""
    rows, n, z = rows.copy(), np.full(rows.shape, float(start)), np.zeros(rows.shape)
    for gradient in gradients:
        for place in np.ndindex(rows.shape):
            g = gradient[place]
            old, n[place] = n[place], n[place] + g * g
            sigma = (n[place] ** power - old**power) / rate
            z[place] += g - sigma * rows[place]
            if abs(z[place]) <= l1:
                rows[place] = 0
            else:
                curvature = (beta + n[place] ** power) / rate + l2
                rows[place] = -(z[place] - np.sign(z[place]) * l1) / curvature
    return rows, n, z


def train(optimizer, rows, gradients):
    found, state = jnp.asarray(rows, jnp.float32), optimizer.init(*rows.shape)
    for step, gradient in enumerate(gradients):
        gradient = jnp.asarray(gradient, jnp.float32)
        found, state = optimizer.update(found, gradient, state, jnp.int32(step))
    return np.asarray(found), state


@pytest.mark.parametrize(
    ("power", "beta", "l1", "l2", "start"),
    [
        pytest.param(0.5, 1.0, 0.0, 0.0, 0.0, id="defaults"),
        pytest.param(0.5, 0.0, 0.0, 0.0, 0.1, id="keras-defaults"),
        pytest.param(0.5, 1.0, 0.5, 0.0, 0.0, id="l1"),
        pytest.param(0.5, 1.0, 0.0, 2.0, 0.0, id="l2"),
        pytest.param(0.5, 0.5, 0.3, 0.7, 0.2, id="all"),
        pytest.param(0.3, 0.5, 0.3, 0.7, 0.2, id="slower-decay"),
        pytest.param(0.0, 0.5, 0.3, 0.7, 0.0, id="no-decay"),
    ],
)
def test_follows_the_paper(power, beta, l1, l2, start):
    rng = np.random.default_rng(0)
    rows, gradients = rng.normal(size=(5, 4)), 0.5 * rng.normal(size=(6, 5, 4))
    optimizer = optim.ftrl(
        0.3,
        learning_rate_power=-power,
        beta=beta,
        l1=l1,
        l2=l2,
        initial_accumulator_value=start,
    )
    found, state = train(optimizer, rows, gradients)
    expected, n, z = ftrl_in_numpy(
        rows, gradients, 0.3, power=power, beta=beta, l1=l1, l2=l2, start=start
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state["accumulator"], n, rtol=1e-5)
    np.testing.assert_allclose(state["linear"], z, rtol=1e-5, atol=1e-5)
    if l1:
        assert np.any(found == 0)
        assert np.any(found != 0)


def test_without_regularization_is_adagrad():
    rng = np.random.default_rng(1)
    rows, gradients = rng.normal(size=(3, 4)), rng.normal(size=(5, 3, 4))
    found, _ = train(optim.ftrl(0.2, beta=0.0), rows, gradients)
    expected, _ = train(optim.adagrad(0.2, eps=1e-30), rows, gradients)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_rate_of_zero_leaves_rows_and_state():
    optimizer = optim.ftrl(lambda step: jnp.where(step == 0, 0.0, 0.1))
    rows = np.full((2, 3), 0.5)
    found, state = train(optimizer, rows, [np.ones((2, 3))])
    np.testing.assert_array_equal(found, rows)
    assert all(not np.any(array) for array in state.values())
    later, _ = train(optimizer, rows, np.ones((2, 2, 3)))
    once, _ = train(optim.ftrl(0.1), rows, np.ones((1, 2, 3)))
    np.testing.assert_allclose(later, once)


def test_gradients_too_small_to_square():
    # Their squares are zero in float32, and so is the curvature.
    found, _ = train(optim.ftrl(0.1, beta=0.0), np.ones((1, 2)), np.full((2, 1, 2), 1e-30))
    np.testing.assert_array_equal(found, 1)


@pytest.mark.parametrize(("power", "gradient"), [(0.5, 0), (0.3, 0), (0.8, 0), (0.3, 1e-12)])
def test_elements_without_a_gradient_keep_their_value(power, gradient):
    """So do those whose gradients add up to zero but for rounding."""
    optimizer = optim.ftrl(0.1, beta=0.0, learning_rate_power=-power)
    rows = np.array([[0.25, -3.0]])
    found, _ = train(optimizer, rows, np.array([[[0.5, gradient]], [[0.5, gradient]]]))
    np.testing.assert_allclose(found[0, 1], -3, rtol=1e-4)
    assert found[0, 0] < 0.25


@pytest.mark.parametrize("gradient", [0.0, 1e-12])
def test_l1_zeroes_elements_without_a_gradient(gradient):
    optimizer = optim.ftrl(0.1, beta=0.0, l1=0.1)
    found, _ = train(optimizer, np.array([[-3.0]]), np.full((1, 1, 1), gradient))
    np.testing.assert_array_equal(found, 0)


@pytest.mark.parametrize("power", [0.5, 0.3, 0.8])
def test_small_gradients_on_a_started_accumulator(power):
    """``n'^p - n^p`` has its digits where they are almost equal."""
    rows, gradients = np.ones((1, 2)), np.full((3, 1, 2), [1e-3, 3e-4])
    optimizer = optim.ftrl(0.01, learning_rate_power=-power, initial_accumulator_value=0.1)
    found, state = train(optimizer, rows, gradients)
    settings = {"power": power, "beta": 1.0, "l1": 0.0, "l2": 0.0, "start": np.float32(0.1)}
    expected, _, z = ftrl_in_numpy(rows, gradients.astype(np.float32), 0.01, **settings)
    # Half of z is made of differences of some 1e-5 of n'^p, which has 24 bits.
    np.testing.assert_allclose(state["linear"], z, rtol=2e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
