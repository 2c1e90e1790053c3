"""Moving averages in the second half of rows: when, how, and what is refused."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import optim

INNER = optim.rowwise_adagrad(0.1, clip_value=0.5, clip_norm=2.0, stochastic_rounding=False)


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("start", [0, 3, 10])
def test_due_before_each_multiple_from_the_start_on(every, start):
    optimizer = optim.ema_in_place(optimizer=INNER, every=every, start=start)
    due = [bool(optimizer.is_sweep_due(jnp.int32(step))) for step in range(20)]
    iterations = np.arange(2, 22)  # those that follow the updates
    np.testing.assert_array_equal(due, (iterations % every == 0) & (iterations >= start))


def test_the_other_optimizer_updates_rows():
    optimizer = optim.ema_in_place(optimizer=INNER, every=2)
    assert optimizer.of_batch == INNER
    assert (optimizer.clip_value, optimizer.clip_norm, optimizer.learning_rate) == (0.5, 2.0, 0.1)
    rows, gradients = jnp.ones((3, 4)), jnp.ones((3, 4))
    found = optimizer.update(rows, gradients, optimizer.init(3, 4), jnp.int32(0))
    expected = INNER.update(rows, gradients, INNER.init(3, 4), jnp.int32(0))
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1]["accumulator"], expected[1]["accumulator"])


def test_is_a_value():
    optimizer = optim.ema_in_place(optimizer=INNER, every=2)
    assert optimizer == optim.ema_in_place(optimizer=INNER, every=2)
    assert hash(optimizer) == hash(optim.ema_in_place(optimizer=INNER, every=2))
    without = dataclasses.replace(optimizer, clip_norm=None)
    assert without.of_batch == dataclasses.replace(INNER, clip_norm=None)


def test_frozen_rows_do_not_move():
    assert not optim.ema_in_place(optimizer=optim.frozen()).sweeps


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"optimizer": "sgd"}, TypeError, "optimizer is a row optimizer such as"),
        ({"every": 0}, ValueError, r"every must be an integer in \[1, 2\*\*31\), got 0"),
        ({"every": 1.5}, ValueError, "every must be an integer"),
        ({"start": -1}, ValueError, "start must be an integer"),
        ({"coefficient": 1.5}, ValueError, r"coefficient must be a number in \[0, 1\], got 1.5"),
        ({"learning_rate": 0.2}, ValueError, "give the learning rate to its optimizer"),
        ({"max_norm": 1.0}, ValueError, "give max_norm to its optimizer"),
        ({"optimizer": optim.ema_in_place(optimizer=INNER)}, ValueError, "give one"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=f"^ema_in_place: .*{message}"):
        optim.ema_in_place(**{"optimizer": INNER} | arguments)
