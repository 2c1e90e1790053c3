from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrec.metrics import auc, average_precision, regression_auc
from tests import golden


def auc_by_pairs(scores, labels, weights):
    """Every pair of a positive and a negative sample, one by one."""
    won = total = 0.0
    for i in np.flatnonzero(labels == 1):
        for j in np.flatnonzero(labels == 0):
            pair = weights[i] * weights[j]
            total += pair
            won += pair * ((scores[i] > scores[j]) + 0.5 * (scores[i] == scores[j]))
    return won / total if total else 0.5


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 3)), max_size=20))
def test_ties_and_weights(samples):
    scores, labels, weights = np.array(samples, np.float64).reshape(-1, 3).T
    expected = auc_by_pairs(scores, labels, weights)
    assert auc(scores, labels, weights) == pytest.approx(expected, abs=1e-12)


def test_without_weights_all_are_1():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 9, 50).astype(np.float32), rng.integers(0, 2, 50)
    assert auc(scores, labels) == pytest.approx(auc_by_pairs(scores, labels, np.ones(50)))


@pytest.mark.parametrize("name", ["auc", "auc_window_partial", "auc_single_class"])
def test_golden(name):
    """The last window of TorchRec's AUC."""
    (case,) = [case for other, case in golden.cases("metrics") if other == name]
    arrays = golden.load("metrics", name)
    size = case["meta"]["window_size"]
    for task in range(2):
        window = [arrays[key][:, task].reshape(-1)[-size:] for key in case["inputs"]]
        expected = arrays["window_auc"][-1, task]
        np.testing.assert_allclose(auc(*window, compat="torchrec"), expected, **case["tolerance"])


def trapezoids(scores, labels, weights):
    """TorchRec's way: sample by sample from the first one on, in their order."""
    order = np.argsort(-scores, kind="stable")
    true, false = np.cumsum((weights * labels)[order]), np.cumsum((weights * (1 - labels))[order])
    return np.trapezoid(true, false) / true[-1] / false[-1]


def test_torchrec_neither_merges_ties_nor_starts_at_the_origin():
    rng = np.random.default_rng(5)
    weights = rng.random(40)
    for scores, labels in (
        (rng.integers(0, 4, 40).astype(float), rng.integers(0, 2, 40).astype(float)),
        (rng.random(40), rng.random(40)),
    ):
        theirs = auc(scores, labels, weights, compat="torchrec")
        assert theirs == pytest.approx(trapezoids(scores, labels, weights), abs=1e-12)
        assert abs(theirs - auc(scores, labels, weights)) > 1e-4


def average_precision_by_thresholds(scores, labels, weights):
    total = (weights * labels).sum()
    value = previous = 0.0
    for threshold in np.unique(scores)[::-1]:
        taken = scores >= threshold
        found = (weights * labels)[taken].sum()
        if weights[taken].sum() > 0:
            value += (found - previous) / total * found / weights[taken].sum()
        previous = found
    return value


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 3)), max_size=20))
def test_average_precision(samples):
    scores, labels, weights = np.array(samples, np.float64).reshape(-1, 3).T
    positive = (weights * labels).sum() > 0
    expected = average_precision_by_thresholds(scores, labels, weights) if positive else 0.0
    assert average_precision(scores, labels, weights) == pytest.approx(expected, abs=1e-12)


def regression_auc_by_pairs(scores, labels, weights):
    right = total = 0.0
    for i in range(len(scores)):
        for j in range(i):
            if labels[i] != labels[j]:
                pair = weights[i] * weights[j]
                agree = (scores[i] - scores[j]) * (labels[i] - labels[j])
                right += pair * (1.0 if agree > 0 else 0.5 if agree == 0 else 0.0)
                total += pair
    return right / total if total else 0.5


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3)), max_size=20))
def test_regression_auc(samples):
    scores, labels, weights = np.array(samples, np.float64).reshape(-1, 3).T
    expected = regression_auc_by_pairs(scores, labels, weights)
    assert regression_auc(scores, labels, weights) == pytest.approx(expected, abs=1e-12)
    inversions = sum(
        (scores[i] - scores[j]) * (labels[i] - labels[j]) < 0
        for i in range(len(scores))
        for j in range(i)
    )
    pairs = len(scores) * (len(scores) - 1) / 2
    expected = 1 - inversions / pairs if pairs else 1.0
    got = regression_auc(scores, labels, weights, compat="torchrec")
    assert got == pytest.approx(expected, abs=1e-12)


def test_of_two_labels_regression_auc_is_auc():
    rng = np.random.default_rng(3)
    scores, labels = rng.integers(0, 30, 200).astype(float), rng.integers(0, 2, 200).astype(float)
    weights = rng.random(200)
    assert regression_auc(scores, labels, weights) == pytest.approx(auc(scores, labels, weights))


@pytest.mark.parametrize("labels", [[0, 0], [1, 1], []], ids=["negative", "positive", "empty"])
def test_one_class_says_nothing(labels):
    assert auc(np.arange(len(labels), dtype=np.float32), np.array(labels)) == 0.5


def test_nan_has_no_place():
    for area in (auc, average_precision, regression_auc):
        with pytest.raises(ValueError, match="1 of 2 scores are NaN"):
            area(np.array([0.5, np.nan]), np.array([0, 1]))
