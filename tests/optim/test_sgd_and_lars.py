from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import optim


def momentum_in_numpy(rows, gradients, rate, momentum, nesterov):
    """Sutskever et al. 2013 with the step taken out of the velocity, in float64."""
    velocity = np.zeros_like(rows)
    for gradient in gradients:
        velocity = momentum * velocity + gradient
        rows = rows - rate * (gradient + momentum * velocity if nesterov else velocity)
    return rows, velocity


@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy-ball", "nesterov"])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_momentum_sgd(nesterov, momentum):
    rng = np.random.default_rng(0)
    rows, gradients = rng.normal(size=(5, 4)), rng.normal(size=(6, 5, 4))
    optimizer = optim.momentum_sgd(0.3, momentum=momentum, nesterov=nesterov)
    found, state = jnp.asarray(rows, jnp.float32), optimizer.init(5, 4)
    for step, gradient in enumerate(gradients):
        gradient = jnp.asarray(gradient, jnp.float32)
        found, state = optimizer.update(found, gradient, state, jnp.int32(step))
    expected, velocity = momentum_in_numpy(rows, gradients, 0.3, momentum, nesterov)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state["momentum"], velocity, rtol=1e-5, atol=1e-6)


def test_nesterov_differs_from_heavy_ball():
    rows, gradients = jnp.ones((1, 1)), jnp.ones((1, 1))
    state = {"momentum": jnp.full((1, 1), 2.0)}
    heavy = optim.momentum_sgd(0.5, momentum=0.5)
    nesterov = optim.momentum_sgd(0.5, momentum=0.5, nesterov=True)
    # The momentum becomes 0.5 * 2 + 1 = 2.
    assert heavy.update(rows, gradients, state, jnp.int32(1))[0].item() == 1 - 0.5 * 2
    assert nesterov.update(rows, gradients, state, jnp.int32(1))[0].item() == 1 - 0.5 * (1 + 1)


# The trust ratio where a norm is zero; elsewhere the golden cases hold it.


def first_update(optimizer, rows, gradients, momentum=0.0):
    rows, gradients = jnp.asarray(rows, jnp.float32), jnp.asarray(gradients, jnp.float32)
    state = {"momentum": jnp.full(rows.shape, momentum, jnp.float32)}
    return optimizer.update(rows, gradients, state, jnp.int32(0))[0]


def test_a_row_of_zeros_takes_the_plain_step():
    found = first_update(optim.lars_sgd(0.1, eta=0.5), [[0.0, 0.0]], [[2.0, -2.0]])
    np.testing.assert_allclose(found, [[-0.2, 0.2]], rtol=1e-6)


def test_without_gradient_the_momentum_goes_on():
    found = first_update(
        optim.lars_sgd(0.1, momentum=0.5), [[3.0, 4.0]], [[0.0, 0.0]], momentum=1.0
    )
    np.testing.assert_allclose(found, [[2.5, 3.5]], rtol=1e-6)


def test_decay_alone():
    # a = lr eta |w| / (wd |w|) and m = a wd w = lr eta w.
    optimizer = optim.lars_sgd(0.1, eta=0.5, weight_decay=0.25)
    found = first_update(optimizer, [[3.0, 4.0]], [[0.0, 0.0]])
    np.testing.assert_allclose(found, [[3.0 * 0.95, 4.0 * 0.95]], rtol=1e-6)
