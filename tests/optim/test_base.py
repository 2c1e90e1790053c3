"""What holds for every row optimizer."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec import optim

OPTIMIZERS = [
    optim.sgd(0.1),
    optim.momentum_sgd(0.1),
    optim.momentum_sgd(0.1, momentum=0.5, nesterov=True),
    optim.adagrad(0.1),
    optim.adagrad(0.1, initial_accumulator_value=0.5),
    optim.rowwise_adagrad(0.1),
    optim.rowwise_adagrad(0.1, weight_decay=0.1, weight_decay_mode="l2"),
    optim.rowwise_adagrad(0.1, weight_decay=0.1, weight_decay_mode="decoupled"),
    optim.rowwise_adagrad_with_counter(0.1),
    optim.rowwise_adagrad_with_counter(
        0.1, halflife=2, weight_decay=0.1, weight_decay_mode="l2", learning_rate_mode="counter_sgd"
    ),
    optim.rowwise_adagrad_with_counter(
        0.1, weight_decay=0.1, weight_decay_mode="adagradw", learning_rate_mode="sqrt_counter"
    ),
    optim.rowwise_adagrad_cowclip(0.1, clip_ratio=0.5, clip_minimum=0.1),
    optim.rowwise_adagrad_cowclip(
        0.1, halflife=3, clip_ratio=0.5, weight_decay=0.1, weight_decay_mode="l2"
    ),
    optim.adam(0.1),
    optim.adam(0.1, b1=0.0, b2=0.0, weight_decay=0.1, rowwise_bias_correction=True),
    optim.partial_rowwise_adam(0.1, weight_decay=0.1),
    optim.lamb(0.1, weight_decay=0.1),
    optim.partial_rowwise_lamb(0.1),
    optim.lars_sgd(0.1, weight_decay=0.1),
    optim.rmsprop(0.1),
    optim.rowwise_rmsprop(0.1),
    optim.rowwise_rmsprop(0.1, ar_alpha=0.5, min_shrinkage=0.1),
    optim.ftrl(0.1),
    optim.ftrl(0.1, l1=0.01, l2=0.1, beta=0.0, learning_rate_power=-0.3),
]


def _id(optimizer) -> str:
    """The optimizer with the arguments that are not its defaults."""
    fields = [
        f"{field.name}={getattr(optimizer, field.name)}"
        for field in dataclasses.fields(optimizer)
        if getattr(optimizer, field.name) != field.default and field.name != "learning_rate"
    ]
    return "-".join([type(optimizer).__name__, *fields])


ALL = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=_id)


def train(optimizer, rows, gradients, start=0):
    """Updates all rows once for each of the ``gradients``."""
    state = optimizer.init(*rows.shape)
    for step, gradient in enumerate(gradients, start=start):
        rows, state = optimizer.update(rows, jnp.asarray(gradient), state, jnp.int32(step))
    return rows, state


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_the_list_above_is_complete():
    names = {
        name
        for name, value in vars(optim).items()
        if isinstance(value, type)
        and issubclass(value, optim.RowOptimizer)
        and not issubclass(value, optim.OptimizerWrapper)
        and value is not optim.RowOptimizer
    }
    # Frozen rows have no rate; tests/embed/test_hyperparameters.py trains with them.
    assert names - {"frozen"} == {type(optimizer).__name__ for optimizer in OPTIMIZERS}


@ALL
def test_state_is_float32_by_row(optimizer):
    state = optimizer.init(5, 3)
    for array in state.values():
        assert array.dtype == jnp.float32
        assert array.shape in [(5,), (5, 3)]
    _, new_state = train(optimizer, jnp.asarray(random(5, 3)), [random(5, 3)])
    assert jax.tree.map(jnp.shape, new_state) == jax.tree.map(jnp.shape, state)
    assert all(array.dtype == jnp.float32 for array in new_state.values())


@ALL
def test_is_a_value(optimizer):
    again = type(optimizer)(
        **{field.name: getattr(optimizer, field.name) for field in dataclasses.fields(optimizer)}
    )
    assert again == optimizer
    assert hash(again) == hash(optimizer)
    changed = dataclasses.replace(optimizer, learning_rate=0.2)
    assert changed != optimizer
    assert changed.learning_rate == 0.2
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.learning_rate = 0.3


def test_optimizers_differ_pairwise():
    assert len(set(OPTIMIZERS)) == len(OPTIMIZERS)


@ALL
def test_only_the_rate_is_positional(optimizer):
    assert type(optimizer)(0.5).learning_rate == 0.5
    assert type(optimizer)().learning_rate == 0.01
    with pytest.raises(TypeError, match="positional argument"):
        type(optimizer)(0.5, 0.5)


@ALL
def test_jit_changes_nothing(optimizer):
    rows, gradients = jnp.asarray(random(4, 6)), random(3, 4, 6, seed=1)
    expected = train(optimizer, rows, gradients)
    found = jax.jit(train, static_argnums=0)(optimizer, rows, jnp.asarray(gradients))
    # The compiler may contract multiplications and additions.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), found, expected
    )


@ALL
@settings(max_examples=8, deadline=None)
@given(
    num_rows=st.sampled_from([1, 2, 5]), dim=st.sampled_from([1, 3, 8]), seed=st.integers(0, 2**32)
)
def test_rows_do_not_see_each_other(optimizer, num_rows, dim, seed):
    rows, gradients = random(num_rows, dim, seed=seed), random(2, num_rows, dim, seed=seed + 1)
    together = train(optimizer, jnp.asarray(rows), gradients)
    row = seed % num_rows
    alone = train(optimizer, jnp.asarray(rows[row : row + 1]), gradients[:, row : row + 1])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[row : row + 1], b, rtol=2e-6, atol=1e-7),
        together,
        alone,
    )


@ALL
def test_moves_against_the_gradient(optimizer):
    rows, gradients = jnp.full((3, 4), 0.5), np.sign(random(3, 4))
    up, _ = train(optimizer, rows, [-gradients])
    down, _ = train(optimizer, rows, [gradients])
    assert np.all(np.sign(np.asarray(up - down)) == np.sign(gradients))


@ALL
@pytest.mark.parametrize("rows", [np.zeros((2, 3)), random(2, 3)], ids=["zeros", "nonzeros"])
def test_gradients_of_zero_are_harmless(optimizer, rows):
    rows = jnp.asarray(rows, jnp.float32)
    found, state = train(optimizer, rows, np.zeros((2, 2, 3), np.float32))
    assert np.isfinite(found).all()
    assert all(np.isfinite(array).all() for array in state.values())
    assert np.all(np.linalg.norm(found, axis=1) <= np.linalg.norm(rows, axis=1))


@ALL
def test_squares_beyond_float32_show(optimizer):
    """A row never stops for ever with infinite state: it moves, or is NaN as by NaN gradients."""
    large = jnp.full((2, 4), 1e30)
    rows, _ = train(optimizer, jnp.ones((2, 4)), [large])
    assert optimizer.largest_gradient == (2.0**50 if optimizer.squares_gradients else np.inf)
    if optimizer.squares_gradients:
        assert np.isnan(rows).all()
    else:
        assert (np.asarray(rows) < -1e25).all()
    bounded = dataclasses.replace(optimizer, max_norm=1.0)
    assert bounded.largest_gradient == 2.0**50
    assert np.isnan(train(bounded, jnp.ones((2, 4)), [large])[0]).all()
    clipped = dataclasses.replace(optimizer, clip_value=0.5)
    assert clipped.largest_gradient == np.inf


@ALL
def test_rate_is_a_schedule_of_the_step(optimizer):
    schedule = optax.piecewise_constant_schedule(0.5, {2: 0.1})
    scheduled = dataclasses.replace(optimizer, learning_rate=schedule)
    assert hash(scheduled) == hash(dataclasses.replace(optimizer, learning_rate=schedule))
    rows, state = jnp.asarray(random(2, 3)), optimizer.init(2, 3)
    update = jax.jit(scheduled.update)
    for step, rate in enumerate([0.5, 0.5, 0.05, 0.05]):
        gradients = jnp.asarray(random(2, 3, seed=step))
        constant = dataclasses.replace(optimizer, learning_rate=rate)
        expected = constant.update(rows, gradients, state, jnp.int32(step))
        rows, state = update(rows, gradients, state, jnp.int32(step))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7),
            (rows, state),
            expected,
        )


@ALL
def test_a_rate_of_zero_leaves_rows(optimizer):
    rows = jnp.asarray(random(2, 3))
    found, _ = train(dataclasses.replace(optimizer, learning_rate=0.0), rows, [random(2, 3)] * 2)
    np.testing.assert_array_equal(found, rows)


@ALL
def test_max_norm_bounds_the_new_rows(optimizer):
    rows, gradients = jnp.asarray(random(6, 4)), [random(6, 4, seed=1)]
    free, free_state = train(optimizer, rows, gradients)
    norms = np.linalg.norm(free, axis=1)
    bound = float(np.median(norms))
    found, state = train(dataclasses.replace(optimizer, max_norm=bound), rows, gradients)
    expected = np.asarray(free) * np.minimum(1, bound / np.maximum(norms, 1e-30))[:, None]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, state, free_state)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("sgd", {"learning_rate": -0.1}, "learning_rate must be a number >= 0, got -0.1"),
        ("sgd", {"learning_rate": float("nan")}, "learning_rate must be a number >= 0, got nan"),
        ("sgd", {"learning_rate": "0.1"}, "got '0.1' of type str"),
        ("sgd", {"learning_rate": None}, "got None of type NoneType"),
        ("sgd", {"learning_rate": np.ones(2)}, "of type ndarray"),
        ("sgd", {"clip_value": 0.0}, "clip_value must be a number > 0"),
        ("sgd", {"clip_norm": -1.0}, "clip_norm must be a number > 0"),
        ("sgd", {"max_norm": float("inf")}, "max_norm must be a number > 0"),
        ("sgd", {"stochastic_rounding": 1}, "stochastic_rounding must be True or False"),
        ("momentum_sgd", {"momentum": 1.0}, r"momentum must be a number in \[0, 1\), got 1.0"),
        ("momentum_sgd", {"nesterov": "yes"}, "nesterov must be True or False"),
        ("adagrad", {"eps": 0}, "eps must be a number > 0, got 0"),
        ("adagrad", {"eps": 1e-60}, "eps must be a number > 0, got 1e-60"),
        ("adagrad", {"initial_accumulator_value": -1}, "initial_accumulator_value must be"),
        ("rowwise_adagrad", {"eps": -1e-8}, "eps must be a number > 0"),
        ("rowwise_adagrad", {"weight_decay": -0.1}, "weight_decay must be a number >= 0"),
        ("rowwise_adagrad", {"initial_accumulator_value": -1}, "initial_accumulator_value"),
        (
            "rowwise_adagrad",
            {"weight_decay_mode": "L1"},
            "weight_decay_mode must be one of 'none', 'l2', 'decoupled', got 'L1'",
        ),
        ("rowwise_adagrad", {"weight_decay_mode": None}, "weight_decay_mode must be one of"),
        ("rowwise_adagrad_with_counter", {"halflife": -1}, "halflife must be a number >= 0"),
        ("rowwise_adagrad_with_counter", {"eps": 0}, "eps"),
        ("rowwise_adagrad_with_counter", {"weight_decay": -1}, "weight_decay"),
        ("rowwise_adagrad_with_counter", {"weight_decay_mode": "L2"}, "weight_decay_mode must be"),
        (
            "rowwise_adagrad_with_counter",
            {"weight_decay_mode": "decoupled"},
            "got halflife=None; give a halflife in updates of the table",
        ),
        (
            "rowwise_adagrad_with_counter",
            {"learning_rate_mode": 1},
            "learning_rate_mode must be one of 'equal', 'tail_increase'",
        ),
        ("rowwise_adagrad_with_counter", {"adjustment": -1}, "adjustment must be"),
        ("rowwise_adagrad_with_counter", {"tail_threshold": -1}, "tail_threshold must be"),
        (
            "rowwise_adagrad_with_counter",
            {"adjust_after": -1},
            r"adjust_after must be an integer in \[0, 2\*\*31\), got -1",
        ),
        ("rowwise_adagrad_with_counter", {"tail_threshold_is_ratio": 1}, "True or False"),
        ("rowwise_adagrad_with_counter", {"max_counter": 0}, "max_counter must be a number > 0"),
        ("rowwise_adagrad_cowclip", {"weight_decay_mode": "adagradw"}, "weight_decay_mode"),
        ("rowwise_adagrad_cowclip", {"clip_ratio": -1}, "clip_ratio must be"),
        ("rowwise_adagrad_cowclip", {"clip_minimum": -1}, "clip_minimum must be"),
        ("adam", {"b1": 1.0}, r"b1 must be a number in \[0, 1\)"),
        ("adam", {"b2": -0.1}, r"b2 must be a number in \[0, 1\)"),
        ("adam", {"eps": 0.0}, "eps must be a number > 0"),
        ("adam", {"weight_decay": -1}, "weight_decay must be a number >= 0"),
        ("adam", {"rowwise_bias_correction": None}, "must be True or False"),
        ("partial_rowwise_adam", {"b1": 1.5}, "b1"),
        ("partial_rowwise_adam", {"eps": 0}, "eps"),
        ("partial_rowwise_adam", {"weight_decay": True}, "got True of type bool"),
        ("lamb", {"b1": 2}, "b1"),
        ("lamb", {"eps": 0}, "eps"),
        ("lamb", {"weight_decay": -1}, "weight_decay"),
        ("partial_rowwise_lamb", {"b2": 1}, "b2"),
        ("partial_rowwise_lamb", {"eps": 0}, "eps"),
        ("partial_rowwise_lamb", {"weight_decay": -1}, "weight_decay"),
        ("lars_sgd", {"eta": 0}, "eta must be a number > 0"),
        ("lars_sgd", {"momentum": -0.5}, "momentum"),
        ("lars_sgd", {"weight_decay": -1}, "weight_decay"),
        ("rmsprop", {"decay": 1}, r"decay must be a number in \[0, 1\)"),
        ("rmsprop", {"eps": 0}, "eps"),
        ("rowwise_rmsprop", {"decay": -1}, "decay"),
        ("rowwise_rmsprop", {"eps": 0}, "eps"),
        ("rowwise_rmsprop", {"ar_alpha": -1}, "ar_alpha must be a number >= 0"),
        ("rowwise_rmsprop", {"min_shrinkage": 1.1}, r"min_shrinkage must be a number in \[0, 1\]"),
        ("ftrl", {"learning_rate_power": 0.5}, "learning_rate_power must be a number <= 0"),
        ("ftrl", {"l1": -1}, "l1 must be a number >= 0"),
        ("ftrl", {"l2": -1}, "l2 must be a number >= 0"),
        ("ftrl", {"beta": -1}, "beta must be a number >= 0"),
        ("ftrl", {"initial_accumulator_value": -1}, "initial_accumulator_value must be"),
    ],
    ids=lambda value: "=".join(map(str, *value.items())) if isinstance(value, dict) else None,
)
def test_bad_hyperparameters_are_named(name, arguments, message):
    with pytest.raises(ValueError, match=rf"^{name}: .*{message}"):
        getattr(optim, name)(**arguments)


def test_misspelled_hyperparameter():
    with pytest.raises(TypeError, match=re.escape("unexpected keyword argument 'lr'")):
        optim.sgd(lr=0.1)


def test_numpy_numbers_are_numbers():
    assert optim.adam(np.float32(0.5), b1=np.float64(0.5)) == optim.adam(0.5, b1=0.5)
