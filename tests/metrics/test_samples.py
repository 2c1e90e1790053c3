from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.metrics import AUC, AUPRC, RAUC, auc

WINDOW, BATCH = 10, 4
METRIC = AUC(tasks=2, window=WINDOW, groups="g", label_threshold=1.0)
UPDATE, MERGE = jax.jit(METRIC.update), jax.jit(METRIC.merge)


def fill(batches):
    """The state after batches of numbers that stand for samples; 0 is padding."""
    state = METRIC.init()
    for batch in batches:
        x = np.array(batch, np.float32)
        state = UPDATE(state, x, x + 0.25, (x > 0).astype(np.float32), g=x.astype(np.int32))
    return state


def held(state, task):
    samples = METRIC._samples(jax.device_get(state), task)
    np.testing.assert_array_equal(samples.labels, samples.predictions + 0.25)
    np.testing.assert_array_equal(samples.groups, samples.predictions)
    assert (samples.weights == 1).all()
    return samples.predictions.tolist()


def real(batches, task):
    return [x for batch in batches for x in batch[task] if x > 0]


NUMBERS = st.lists(st.integers(0, 50), min_size=BATCH, max_size=BATCH)
BATCHES = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6)


@given(BATCHES)
def test_holds_the_last_samples(batches):
    state = fill(batches)
    for task in range(2):
        assert held(state, task) == real(batches, task)[-WINDOW:]


@settings(max_examples=30)
@given(BATCHES, BATCHES)
def test_merge_keeps_the_newest_of_both(one, other):
    state = MERGE(fill(one), fill(other))
    for task in range(2):
        a, b = real(one, task)[-WINDOW:], real(other, task)[-WINDOW:]
        from_a = min(len(a), max(WINDOW - WINDOW // 2, WINDOW - len(b)))
        from_b = min(len(b), max(WINDOW // 2, WINDOW - len(a)))
        assert held(state, task) == a[len(a) - from_a :] + b[len(b) - from_b :]


def test_batch_larger_than_the_window():
    metric = AUC(window=3)
    x = jnp.arange(8.0)
    state = metric.update(metric.init(), x, x * 0)
    assert metric._samples(jax.device_get(state), 0).predictions.tolist() == [5, 6, 7]


def test_groups_of_one_label_are_left_out():
    groups = jnp.array([0, 0, 0, 1, 1, 2, 2])
    p = jnp.array([0.1, 0.5, 0.3, 0.2, 0.4, 0.15, 0.9])
    y = jnp.array([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    for compat, expected in ((None, (1.0 + 0.0) / 2), ("torchrec", (1.0 + 0.5 + 0.0) / 3)):
        metric = AUC(window=16, groups="groups", compat=compat)
        values = metric.compute(metric.update(metric.init(), p, y, groups=groups))
        assert values["window_grouped_auc"] == pytest.approx(expected)
        assert values["window_auc"] == pytest.approx(auc(np.array(p), np.array(y)))


def test_means_over_users_of_several_batches():
    rng = np.random.default_rng(7)
    columns = rng.random(90), rng.integers(0, 2, 90), rng.random(90), rng.integers(0, 6, 90)
    p, y, w, user = (x.astype(t) for x, t in zip(columns, ("f4", "f4", "f4", "i4"), strict=True))
    metric = AUC(window=60, groups="user")
    update, state = jax.jit(metric.update), metric.init()
    for i in range(0, 90, 30):
        part = slice(i, i + 30)
        state = update(state, p[part], y[part], w[part], user=user[part])
    p, y, w, user = p[30:], y[30:], w[30:], user[30:]
    areas = [auc(p[user == u], y[user == u], w[user == u]) for u in range(6)]
    assert all(len(np.unique(y[user == u])) == 2 for u in range(6))
    weights = [w[user == u].sum() for u in range(6)]
    values = metric.compute(state)
    assert values["window_grouped_auc"] == pytest.approx(np.mean(areas))
    assert values["window_weighted_grouped_auc"] == pytest.approx(
        np.average(areas, weights=weights), rel=1e-6
    )


def test_groups_count_by_the_labels_that_the_threshold_makes():
    metric = AUC(window=4, groups="user", label_threshold=3.0)
    stars, user = jnp.array([5.0, 1.0, 4.0, 5.0]), jnp.array([0, 0, 1, 1])
    state = metric.update(metric.init(), jnp.array([0.9, 0.1, 0.3, 0.2]), stars, user=user)
    assert metric.compute(state)["window_grouped_auc"] == 1.0


@pytest.mark.parametrize("kind", [AUC, AUPRC, RAUC])
def test_no_samples(kind):
    metric = kind(window=4, groups="groups")
    values = metric.compute(metric.init())
    assert np.isnan(values[f"window_grouped_{metric.name}"]).all()
    assert np.isnan(values[f"window_weighted_grouped_{metric.name}"]).all()
    assert values[f"window_{metric.name}"].item() == (0.0 if kind is AUPRC else 0.5)


def test_weight_of_the_window():
    metric = AUPRC(tasks=2, window=2)
    w = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]])
    state = metric.update(metric.init(), w, w * 0, w)
    np.testing.assert_array_equal(metric.weight(state), [5.0, 9.0])
