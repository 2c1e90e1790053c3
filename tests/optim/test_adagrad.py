from __future__ import annotations

import jax.numpy as jnp
import numpy as np
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
