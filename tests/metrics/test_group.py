from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.metrics import (
    AUC,
    RAUC,
    Calibration,
    MetricGroup,
    RecalibratedCalibration,
    SegmentedNormalizedEntropy,
    Task,
    merge_over_processes,
)

CLICK = Task(name="click", prediction="p", label="y", weight="w")
BUY = Task(name="buy", prediction="q", label="z")
OUTPUTS = {
    "p": jnp.array([[0.5], [0.25]]),  # a model's last layer leaves an axis of 1
    "y": jnp.array([1.0, 0.0]),
    "w": jnp.array([1.0, 2.0]),
    "q": jnp.array([0.5, 0.25]),
    "z": jnp.array([1.0, 1.0]),
    "country": jnp.array([0, 1]),
}


def report(metrics, tasks=(CLICK, BUY)):
    group = MetricGroup(tasks=tasks, metrics=metrics)
    return group.compute(jax.jit(group.update)(group.init(), OUTPUTS))


def test_names_and_values():
    got = report({"calibration": Calibration(tasks=2, window=4)})
    assert got == {
        "click/lifetime_calibration": 1.0,
        "click/window_calibration": 1.0,
        "buy/lifetime_calibration": 0.375,
        "buy/window_calibration": 0.375,
    }


def test_one_name_twice():
    got = report(
        {
            "plain": Calibration(window=None),
            "downsampled": RecalibratedCalibration(window=None, coefficient=0.5),
        },
        tasks=(CLICK,),
    )
    assert set(got) == {
        "click/lifetime_calibration",
        "click/downsampled/lifetime_calibration",
    }
    assert got["click/lifetime_calibration"] == 1.0
    assert got["click/downsampled/lifetime_calibration"] == pytest.approx(1 / 3 + 2 / 7)


def test_several_numbers():
    got = report(
        {"by": SegmentedNormalizedEntropy(tasks=2, num_groups=2, window=None, groups="country")}
    )
    assert set(got) == {
        f"{task}/lifetime_segmented_ne_{i}" for task in ("click", "buy") for i in (0, 1)
    }


def test_what_is_missing_is_named():
    group = MetricGroup(tasks=(CLICK, BUY), metrics={"auc": AUC(tasks=2, groups="region")})
    with pytest.raises(ValueError, match="task 'buy' needs the output 'z'; there are country, p"):
        group.update(group.init(), {k: x for k, x in OUTPUTS.items() if k != "z"})
    with pytest.raises(ValueError, match="AUC needs 'region'"):
        group.update(group.init(), OUTPUTS)


def test_outputs_of_other_shapes():
    group = MetricGroup(tasks=(CLICK, BUY), metrics={"calibration": Calibration(tasks=2)})
    with pytest.raises(ValueError, match=r"task 'buy' has the output 'q' of \(3,\), but others"):
        group.update(group.init(), OUTPUTS | {"q": jnp.ones(3)})
    longer = OUTPUTS | {"y": jnp.ones(3), "z": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"task 'click' has the output 'w' of \(2,\), but others"):
        group.update(group.init(), longer)
    with pytest.raises(ValueError, match=r"labels of \[2, batch\] .* got \(2, 3\) and \(2, 2\)"):
        group.update(group.init(), longer | {"w": jnp.ones(3)})
    with pytest.raises(TypeError, match="task 'click': 'p' must be real numbers"):
        group.update(group.init(), OUTPUTS | {"p": np.array(["a", "b"])})
    with pytest.raises(ValueError, match=r"weights must be between 0 and .*, got -1.0 at \[0, 1\]"):
        group.update(group.init(), OUTPUTS | {"w": jnp.array([1.0, -1.0])})


def test_wrong_groups():
    with pytest.raises(ValueError, match="metric 'ne' has tasks=1, but it is computed for 2"):
        MetricGroup(tasks=(CLICK, BUY), metrics={"ne": Calibration()})
    with pytest.raises(ValueError, match="names of their own"):
        MetricGroup(tasks=(CLICK, CLICK), metrics={})


def test_one_process_has_nothing_to_merge():
    metric = Calibration()
    state = metric.init()
    assert merge_over_processes(metric, state) is state
    assert np.isnan(metric.compute(state)["lifetime_calibration"]).all()


class TestTasksOfMetrics:
    def test_values_are_those_of_a_group_of_these_tasks(self):
        metrics = {
            "calibration": Calibration(tasks=2, window=4),
            "auc": AUC(tasks=1, window=4),
            "rauc": RAUC(tasks=2, window=4),
        }
        tasks_of = {"auc": ("buy",), "rauc": ["buy", "click"]}
        group = MetricGroup(tasks=(CLICK, BUY), metrics=metrics, tasks_of=tasks_of)
        got = group.compute(jax.jit(group.update)(group.init(), OUTPUTS))
        expected = report({name: metrics[name] for name in ("calibration", "rauc")})
        assert got == expected | report({"auc": metrics["auc"]}, tasks=(BUY,))
        merged = group.merge(group.init(), group.update(group.init(), OUTPUTS))
        assert group.compute(merged) == got

    def test_only_the_tasks_of_a_metric_need_outputs_of_one_shape(self):
        rating = Task(name="rating", prediction="r", label="s")
        group = MetricGroup(
            tasks=(CLICK, rating),
            metrics={"auc": AUC(window=4), "rauc": RAUC(window=4)},
            tasks_of={"auc": ("click",), "rauc": ("rating",)},
        )
        outputs = {**OUTPUTS, "r": jnp.arange(3.0), "s": jnp.arange(3.0)}
        report = group.compute(group.update(group.init(), outputs))
        assert set(report) == {"click/window_auc", "rating/window_rauc"}

    @pytest.mark.parametrize(
        ("tasks_of", "error", "message"),
        [
            ({"ne": ("click",)}, KeyError, "names the metric 'ne'; there are"),
            ({"auc": ("sale",)}, KeyError, "names the task 'sale'; there are"),
            ({"auc": "click"}, TypeError, "must be a sequence of task names"),
            ({"auc": ()}, ValueError, "one task or more, each once"),
            ({"auc": ("click", "click")}, ValueError, "one task or more, each once"),
            ({"auc": ("click", "buy")}, ValueError, "has tasks=1, but it is computed for 2"),
            ({}, ValueError, "has tasks=1, but it is computed for 2"),
        ],
        ids=str,
    )
    def test_errors(self, tasks_of, error, message):
        with pytest.raises(error, match=message):
            MetricGroup(tasks=(CLICK, BUY), metrics={"auc": AUC()}, tasks_of=tasks_of)
