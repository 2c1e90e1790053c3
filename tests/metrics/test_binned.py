from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.metrics import (
    BinnedAUC,
    BinnedAUPRC,
    BinnedRAUC,
    auc,
    average_precision,
    regression_auc,
)
from jaxrec.metrics.binned import Bins

ROWS = 24
COARSE = Bins(count=8, low=0.0, high=1.0, spacing="linear")
METRICS = {
    "auc": (BinnedAUC(bins=COARSE), auc),
    "auprc": (BinnedAUPRC(bins=COARSE), average_precision),
    "rauc": (BinnedRAUC(bins=COARSE, label_bins=COARSE), regression_auc),
}
UPDATES = {name: jax.jit(metric.update) for name, (metric, _) in METRICS.items()}
# So coarse bins that many predictions share one.
SAMPLES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10), st.integers(1, 3)), min_size=1, max_size=ROWS
)


@settings(max_examples=60)
@given(SAMPLES)
@pytest.mark.parametrize("name", METRICS)
def test_exact_value_is_within_the_error(name, samples):
    metric, exact = METRICS[name]
    rows = np.zeros((ROWS, 3))
    rows[: len(samples)] = np.array(samples)
    p, y, w = (rows / np.array([40, 10, 1])).astype(np.float32).T
    if name != "rauc":
        y = (y > 0.5).astype(np.float32)
    state = UPDATES[name](metric.init(), p, y, w)
    values = metric.compute(state)
    real = w > 0
    difference = abs(values[f"lifetime_{name}"][0] - exact(p[real], y[real], w[real]))
    assert difference <= values[f"lifetime_{name}_error"][0] + 1e-6


def clicks(rows=20_000, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(-3, 1.5, rows)
    p = 1 / (1 + np.exp(-logits))
    return p.astype(np.float32), (rng.random(rows) < p).astype(np.float32)


@pytest.mark.parametrize(
    ("metric", "exact"),
    [(BinnedAUC(), auc), (BinnedAUPRC(), average_precision)],
    ids=["auc", "auprc"],
)
def test_default_bins_are_fine_enough(metric, exact):
    p, y = clicks()
    values = metric.compute(metric.update(metric.init(), p, y))
    name = f"lifetime_{metric.name}"
    assert values[f"{name}_error"][0] < 2e-3
    assert abs(values[name][0] - exact(p, y)) <= values[f"{name}_error"][0]


def test_ratings_are_exact():
    stars = Bins(count=5, low=0.5, high=5.5, spacing="linear")
    rng = np.random.default_rng(0)
    y = rng.integers(1, 6, 500).astype(np.float32)
    p = np.clip(y + rng.integers(-2, 3, 500), 1, 5).astype(np.float32)
    metric = BinnedRAUC(bins=stars, label_bins=stars, one_label_a_bin=True)
    values = metric.compute(metric.update(metric.init(), p, y))
    assert values["lifetime_rauc"][0] == pytest.approx(regression_auc(p, y), abs=1e-6)


def test_windows_slide():
    p, y = clicks(3000)
    metric = BinnedAUC(window=2000, max_batches=3)
    update, state = jax.jit(metric.update), metric.init()
    for part in range(3):
        state = update(state, *(x[part * 1000 : part * 1000 + 1000] for x in (p, y)))
    values = metric.compute(state)
    assert values["window_auc"][0] == pytest.approx(auc(p[1000:], y[1000:]), abs=2e-4)
    assert values["lifetime_auc"][0] == pytest.approx(auc(p, y), abs=2e-4)


@pytest.mark.parametrize("kind", [BinnedAUC, BinnedAUPRC])
def test_groups(kind):
    p, y = clicks(2000)
    groups = np.random.default_rng(1).integers(0, 4, 2000).astype(np.int32)
    y[groups == 3] = 0  # no positives there: left out of the mean
    metric = kind(groups="g", num_groups=5)
    values = metric.compute(metric.update(metric.init(), p, y, g=groups))
    exact = auc if kind is BinnedAUC else average_precision
    expected = np.mean([exact(p[groups == g], y[groups == g]) for g in range(3)])
    name = f"lifetime_grouped_{metric.name}"
    assert abs(values[name][0] - expected) <= values[f"{name}_error"][0] < 0.05
    stray = metric.update(metric.init(), p[:2], y[:2], g=np.array([0, 5], np.int32))
    with pytest.raises(ValueError, match="1 samples have a number of 'g' that is not in"):
        metric.compute(stray)


def test_one_class_says_nothing():
    p = jnp.array([0.2, 0.7])
    for labels, area, precision in (([0.0, 0.0], 0.5, 0.0), ([1.0, 1.0], 0.5, 1.0)):
        y = jnp.array(labels)
        metric = BinnedAUC()
        values = metric.compute(metric.update(metric.init(), p, y))
        assert (values["lifetime_auc"].item(), values["lifetime_auc_error"].item()) == (area, 0.0)
        metric = BinnedAUPRC()
        values = metric.compute(metric.update(metric.init(), p, y))
        assert values["lifetime_auprc"].item() == precision


@pytest.mark.parametrize("probability", [0.0, 1.0, 1e-30])
def test_ends_fall_into_the_last_bins(probability):
    bins = Bins()
    place = int(bins.of(jnp.array(probability)))
    assert place == (bins.count - 1 if probability == 1 else 0)
