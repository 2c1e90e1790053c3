from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec import optim
from jaxrec.optim import WarmupStage, warmup


def rates(schedule, steps) -> np.ndarray:
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.asarray(list(steps), jnp.int32)))


# Worked by hand from the formulas, with a rate of 2.
@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        pytest.param(
            WarmupStage("none", max_iters=4, value=0.5, lr_scale=0.5),
            [1, 1, 1, 1, 1, 2, 2],
            id="none",
        ),
        pytest.param(
            WarmupStage("linear", max_iters=4, value=0.2),
            [0.4, 0.8, 1.2, 1.6, 2, 2, 2],
            id="linear",
        ),
        pytest.param(
            WarmupStage("constant", max_iters=4, value=0.25),
            [0.5, 0.5, 0.5, 0.5, 0.5, 2, 2],
            id="constant",
        ),
        pytest.param(
            WarmupStage("poly", max_iters=4, value=2.0),
            [2, 1.125, 0.5, 0.125, 0, 2, 2],
            id="poly",
        ),
        pytest.param(
            WarmupStage("poly", max_iters=5, value=1.0, decay_iters=4),
            [2, 1.5, 1, 0.5, 0, 0, 2],
            id="poly-decay_iters",
        ),
        pytest.param(
            WarmupStage("step", max_iters=4, value=0.5), [2, 1, 0.5, 0.25, 0.125, 2, 2], id="step"
        ),
        pytest.param(
            WarmupStage("step", max_iters=5, value=0.5, decay_iters=2),
            [2, 2, 1, 1, 0.5, 0.5, 2],
            id="step-decay_iters",
        ),
        pytest.param(
            WarmupStage("inv_sqrt", max_iters=5),
            [2, 2, 2 / 2**0.5, 2 / 3**0.5, 1, 2 / 5**0.5, 2],
            id="inv_sqrt",
        ),
        pytest.param(
            WarmupStage("cosine_annealing_warm_restarts", max_iters=5, value=0.5, sgdr_period=4),
            [2, 1 + (1 + 0.5**0.5) / 2, 1.5, 1 + (1 - 0.5**0.5) / 2, 2, 1 + (1 + 0.5**0.5) / 2, 2],
            id="cosine",
        ),
        pytest.param(
            WarmupStage(
                "interpolate",
                max_iters=4,
                value=1.0,
                lr_scale=0.5,
                start_interpolating_iters=0,
                end_value=0.0,
            ),
            [1, 0.75, 0.5, 0.25, 0, 2, 2],
            id="interpolate",
        ),
    ],
)
def test_policies(stage, expected):
    np.testing.assert_allclose(rates(warmup(2.0, (stage,)), range(7)), expected, rtol=1e-6)


def test_stages_count_from_the_start_of_training():
    schedule = warmup(
        1.0,
        [
            WarmupStage("linear", max_iters=2, value=0.0),
            WarmupStage("step", max_iters=5, value=0.5, decay_iters=2),
            WarmupStage(
                "interpolate",
                max_iters=8,
                value=0.3,
                end_value=0.9,
                start_interpolating_iters=5,
                lr_scale=2.0,
            ),
        ],
    )
    # The step stage is at 0.5 from the outset, since iteration 3 is past one of its periods.
    expected = [0, 0.5, 1, 0.5, 0.25, 0.25, 2 * 0.5, 2 * 0.7, 2 * 0.9, 1, 1]
    np.testing.assert_allclose(rates(schedule, range(11)), expected, rtol=1e-6)


def test_no_stages():
    np.testing.assert_array_equal(rates(warmup(0.5, ()), [0, 1, 10**6]), [0.5] * 3)


def reference_rates(learning_rate, stages, num_steps):
    """A counter and a stage that advance with each update, as TorchRec describes its warmup."""
    stages = [*stages, WarmupStage("none", max_iters=2**31 - 1)]
    stage = 0
    for iteration in range(num_steps):
        yield learning_rate * reference_multiplier(stages[stage], iteration)
        if iteration + 1 > stages[stage].max_iters:
            stage += 1


def reference_multiplier(stage, it):
    decay_iters = stage.decay_iters or (1 if stage.policy == "step" else stage.max_iters)
    start, end = stage.start_interpolating_iters or 0, stage.end_value or 0.0
    phase = (it % stage.sgdr_period) / stage.sgdr_period
    return (
        stage.lr_scale
        * {
            "none": 1.0,
            "linear": stage.value + (1 - stage.value) * it / stage.max_iters,
            "constant": stage.value,
            "poly": max(0.0, 1 - it / decay_iters) ** stage.value,
            "step": stage.value ** (it // decay_iters),
            "inv_sqrt": 1 / math.sqrt(max(it, 1)),
            "cosine_annealing_warm_restarts": stage.value
            + (1 - stage.value) * 0.5 * (1 + math.cos(math.pi * phase)),
            "interpolate": stage.value
            + (end - stage.value) * (it - start) / (stage.max_iters - start),
        }[stage.policy]
    )


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_stages(data):
    policies = [
        "none", "linear", "constant", "poly", "step", "inv_sqrt",
        "cosine_annealing_warm_restarts", "interpolate",
    ]  # fmt: skip
    numbers = st.floats(0, 2, width=32, allow_subnormal=False)
    ends = sorted(data.draw(st.sets(st.integers(2, 40), max_size=4)))
    stages = [
        WarmupStage(
            data.draw(st.sampled_from(policies)),
            max_iters=end,
            value=data.draw(numbers),
            lr_scale=data.draw(numbers),
            decay_iters=data.draw(st.none() | st.integers(1, 50)),
            sgdr_period=data.draw(st.integers(1, 10)),
            start_interpolating_iters=data.draw(st.integers(0, end - 1)),
            end_value=data.draw(numbers),
        )
        for end in ends
    ]
    np.testing.assert_allclose(
        rates(warmup(0.3, stages), range(45)),
        list(reference_rates(0.3, stages, 45)),
        rtol=2e-5,
        atol=1e-6,
    )


def test_is_a_value_and_serves_both_kinds_of_optimizer():
    schedule = warmup(0.5, (WarmupStage("linear", max_iters=4, value=0.0),))
    again = warmup(0.5, [WarmupStage("linear", max_iters=4, value=0.0)])
    assert schedule == again
    assert optim.sgd(schedule) == optim.sgd(again)
    assert hash(optim.sgd(schedule)) == hash(optim.sgd(again))
    assert schedule != warmup(0.25, schedule.stages)

    transform = optax.sgd(schedule)
    dense, dense_state = jnp.ones((1, 1)), transform.init(jnp.ones((1, 1)))
    rows = jnp.ones((1, 1))
    for step in range(6):
        updates, dense_state = transform.update(jnp.ones((1, 1)), dense_state)
        dense = optax.apply_updates(dense, updates)
        rows, _ = optim.sgd(schedule).update(rows, jnp.ones((1, 1)), {}, jnp.int32(step))
    expected = 1 - (0 + 0.125 + 0.25 + 0.375 + 0.5 + 0.5)
    assert rows.item() == dense.item() == expected


def test_late_steps():
    schedule = warmup(
        1.0, (WarmupStage("step", max_iters=2**31 - 1, value=0.5, decay_iters=10**9),)
    )
    np.testing.assert_allclose(rates(schedule, [10**9 - 1, 10**9, 2**31 - 1]), [1, 0.5, 0.25])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WarmupStage("exp"), "policy must be one of 'none', 'linear', .* got 'exp'"),
        (lambda: WarmupStage("linear", max_iters=0), r"max_iters must be an integer in \[1, 2"),
        (lambda: WarmupStage("linear", max_iters=2.5), "max_iters must be an integer"),
        (lambda: WarmupStage("linear", max_iters=2**31), "max_iters must be an integer"),
        (lambda: WarmupStage("linear", value=-1.0), "value must be a number >= 0"),
        (lambda: WarmupStage("linear", lr_scale=-1.0), "lr_scale must be a number >= 0"),
        (lambda: WarmupStage("poly", decay_iters=-1), "decay_iters must be an integer"),
        (lambda: WarmupStage("step", sgdr_period=0), "sgdr_period must be an integer"),
        (
            lambda: WarmupStage("interpolate", max_iters=4, end_value=1.0),
            "needs start_interpolating_iters and end_value, got None and 1.0",
        ),
        (
            lambda: WarmupStage("interpolate", max_iters=4, start_interpolating_iters=1),
            "needs start_interpolating_iters and end_value, got 1 and None",
        ),
        (
            lambda: WarmupStage(
                "interpolate", max_iters=4, start_interpolating_iters=4, end_value=1.0
            ),
            "start_interpolating_iters must be below max_iters, got 4 and 4",
        ),
        (lambda: warmup(-1.0, ()), "warmup: learning_rate must be a number >= 0"),
        (lambda: warmup(1.0, ("linear",)), "stage 0 must be a WarmupStage, got 'linear'"),
        (
            lambda: warmup(1.0, (WarmupStage(max_iters=5), WarmupStage(max_iters=5))),
            "max_iters must grow from stage to stage, got 5 in stage 1 after 5",
        ),
    ],
)
def test_bad_stages_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
