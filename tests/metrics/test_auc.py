from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrec.metrics import auc
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


def test_golden():
    """The last window of TorchRec's AUC; it leaves out the part of the curve before the first."""
    (case,) = [case for name, case in golden.cases("metrics") if name == "auc"]
    arrays = golden.load("metrics", "auc")
    batches = case["meta"]["window_batches"]
    for task in range(2):
        window = [arrays[name][-batches:, task].reshape(-1) for name in case["inputs"]]
        assert auc(*window) == pytest.approx(arrays["window_auc"][-1, task], abs=2e-4)


@pytest.mark.parametrize("labels", [[0, 0], [1, 1], []], ids=["negative", "positive", "empty"])
def test_one_class_says_nothing(labels):
    assert auc(np.arange(len(labels), dtype=np.float32), np.array(labels)) == 0.5


def test_nan_has_no_place():
    with pytest.raises(ValueError, match="1 of 2 scores are NaN"):
        auc(np.array([0.5, np.nan]), np.array([0, 1]))
