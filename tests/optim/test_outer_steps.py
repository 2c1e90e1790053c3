"""Changes of rows since the last outer step; tests/mesh/test_replicas.py makes outer steps."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrec import optim


def test_changes_are_those_of_the_rows_with_their_bounds():
    random = np.random.default_rng(0)
    inner = optim.rowwise_adagrad(0.5, max_norm=0.8, clip_value=0.1)
    optimizer = optim.diloco(optimizer=inner)
    assert optimizer.clip_value == 0.1
    first = rows = jnp.asarray(random.normal(size=(5, 3)), jnp.float32)
    plain, plain_state = rows, inner.init(5, 3)
    state = optimizer.init(5, 3)
    for step in range(4):
        gradients = jnp.asarray(random.normal(size=(5, 3)), jnp.float32)
        rows, state = optimizer.update(rows, gradients, state, jnp.int32(step))
        plain, plain_state = inner.update(plain, gradients, plain_state, jnp.int32(step))
    np.testing.assert_array_equal(rows, plain)
    np.testing.assert_allclose(state["moved"], rows - first, atol=1e-6)
    np.testing.assert_array_equal(state["accumulator"], plain_state["accumulator"])
    assert not np.any(state["outer_velocity"])


def test_outer_state_stays_float32():
    optimizer = optim.diloco(optimizer=optim.adam(0.1, state_dtype="bfloat16"))
    assert optimizer.state_dtype == "bfloat16"
    assert {"moved", "outer_velocity"} <= set(optimizer.exact_state)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"optimizer": optax.sgd(0.1)}, TypeError, "diloco: optimizer is a row optimizer"),
        ({"outer_momentum": 1.0}, ValueError, "outer_momentum"),
        ({"outer_learning_rate": -1.0}, ValueError, "outer_learning_rate"),
        ({"learning_rate": 0.3}, ValueError, "give the learning rate to its optimizer"),
        (
            {"optimizer": optim.ema_in_place(optimizer=optim.sgd(0.1))},
            ValueError,
            "ema_in_place changes rows between steps",
        ),
    ],
    ids=["optimizer", "momentum", "outer rate", "rate", "sweeps"],
)
def test_errors(options, error, message, unchecked):
    with pytest.raises(error, match=message):
        optim.diloco(**({"optimizer": optim.sgd(0.1)} | options))
