"""Row-wise Adagrad with counters against its formulas in NumPy float64."""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec import optim
from tests.optim import oracle

COUNTER = optim.rowwise_adagrad_with_counter(0.1, eps=1e-3, weight_decay=0.2)
MODES = [
    dataclasses.replace(COUNTER, weight_decay_mode=decay, learning_rate_mode=rate, **settings)
    for decay, rate, settings in itertools.product(
        ["none", "l2", "decoupled", "adagradw"],
        [
            "equal",
            "tail_increase",
            "tail_decrease",
            "counter_sgd",
            "sqrt_counter",
            "capped_counter",
        ],
        [
            {"halflife": 2.0, "max_counter": 5.0, "adjustment": 0.7, "tail_threshold": 1.4},
            {
                "halflife": 0,
                "max_counter": 3.0,
                "tail_threshold": 0.5,
                "tail_threshold_is_ratio": True,
                "adjust_after": 2,
            },
        ],
    )
]
COWCLIP = [
    optim.rowwise_adagrad_cowclip(
        0.1, weight_decay=0.2, weight_decay_mode=mode, halflife=halflife, clip_ratio=0.3
    )
    for mode, halflife in itertools.product(["none", "l2", "decoupled"], [None, 3.0])
]


def train(update, optimizer, rows, gradients, touched):
    """Some of the rows in each step, by our update or by the oracle's."""
    state = {name: np.asarray(x, np.float64) for name, x in optimizer.init(*rows.shape).items()}
    for step, (gradient, which) in enumerate(zip(gradients, touched, strict=True)):
        new, new_state = update(rows, gradient, state, step)
        rows = np.where(which[:, None], new, rows)
        state = {name: np.where(which, new_state[name], state[name]) for name in state}
    return rows, state


def ours(optimizer):
    def update(rows, gradients, state, step):
        state = {name: jnp.asarray(array, jnp.float32) for name, array in state.items()}
        rows, gradients = jnp.asarray(rows, jnp.float32), jnp.asarray(gradients, jnp.float32)
        return optimizer.update(rows, gradients, state, jnp.int32(step))

    return update


def exact(optimizer):
    return lambda *arguments: oracle.updated(optimizer, *arguments)


def name_of(optimizer) -> str:
    rate = getattr(optimizer, "learning_rate_mode", "cowclip")
    return f"{rate}-{optimizer.weight_decay_mode}-{optimizer.halflife}"


@pytest.mark.parametrize("optimizer", MODES + COWCLIP, ids=name_of)
def test_rows_that_occur_now_and_then(optimizer):
    random = np.random.default_rng(0)
    rows = random.normal(size=(6, 5))
    gradients, touched = random.normal(size=(6, 6, 5)), random.random((6, 6)) < 0.6
    found = train(ours(optimizer), optimizer, rows, gradients, touched)
    expected = train(exact(optimizer), optimizer, rows, gradients, touched)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5, atol=2e-6)
    for name, array in expected[1].items():
        np.testing.assert_allclose(found[1][name], array, rtol=2e-5, atol=1e-6, err_msg=name)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(MODES + COWCLIP), st.floats(1e-6, 1e6))
def test_any_scale(seed, optimizer, scale):
    random = np.random.default_rng(seed)
    rows, gradients = random.normal(size=(2, 3)), random.normal(size=(2, 2, 3)) * scale
    touched = np.ones((2, 2), bool)
    found = train(ours(optimizer), optimizer, rows, gradients, touched)
    expected = train(exact(optimizer), optimizer, rows, gradients, touched)
    size = 1 + np.abs(expected[0]).max() + 0.1 * np.abs(gradients).max()
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=3e-6 * size)


def test_max_counter_is_set_between_steps():
    setting = optim.hyperparameter("max_counter", 4.0)
    optimizer = optim.rowwise_adagrad_with_counter(
        0.1, learning_rate_mode="tail_increase", max_counter=setting
    )
    fixed = dataclasses.replace(optimizer, max_counter=4.0)
    rows, gradients, state = jnp.ones((2, 3)), jnp.ones((2, 3)), optimizer.init(2, 3)
    found, _ = optimizer.update(rows, gradients, state, jnp.int32(0))
    expected, _ = fixed.update(rows, gradients, state, jnp.int32(0))
    np.testing.assert_array_equal(found, expected)
    assert not np.allclose(
        found,
        dataclasses.replace(optimizer, max_counter=9.0).update(
            rows, gradients, state, jnp.int32(0)
        )[0],
    )


def test_cowclip_keeps_rows_of_zeros_without_a_minimum():
    optimizer = optim.rowwise_adagrad_cowclip(0.1, clip_ratio=1.0)
    rows, _ = optimizer.update(
        jnp.zeros((1, 4)), jnp.ones((1, 4)), optimizer.init(1, 4), jnp.int32(0)
    )
    np.testing.assert_array_equal(rows, np.zeros((1, 4)))
