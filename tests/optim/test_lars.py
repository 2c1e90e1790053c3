"""The trust ratio where a norm is zero; elsewhere the golden cases hold it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrec import optim


def update(optimizer, rows, gradients, momentum=0.0):
    rows, gradients = jnp.asarray(rows, jnp.float32), jnp.asarray(gradients, jnp.float32)
    state = {"momentum": jnp.full(rows.shape, momentum, jnp.float32)}
    return optimizer.update(rows, gradients, state, jnp.int32(0))[0]


def test_a_row_of_zeros_takes_the_plain_step():
    found = update(optim.lars_sgd(0.1, eta=0.5), [[0.0, 0.0]], [[2.0, -2.0]])
    np.testing.assert_allclose(found, [[-0.2, 0.2]], rtol=1e-6)


def test_without_gradient_the_momentum_goes_on():
    found = update(optim.lars_sgd(0.1, momentum=0.5), [[3.0, 4.0]], [[0.0, 0.0]], momentum=1.0)
    np.testing.assert_allclose(found, [[2.5, 3.5]], rtol=1e-6)


def test_decay_alone():
    # a = lr eta |w| / (wd |w|) and m = a wd w = lr eta w.
    optimizer = optim.lars_sgd(0.1, eta=0.5, weight_decay=0.25)
    found = update(optimizer, [[3.0, 4.0]], [[0.0, 0.0]])
    np.testing.assert_allclose(found, [[3.0 * 0.95, 4.0 * 0.95]], rtol=1e-6)
