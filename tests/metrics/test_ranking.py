"""Ranks of a wanted item are those of a sort."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrec.metrics import rank_metrics


def test_ties_and_nan_count_against_the_item():
    scores = np.array([[1.0, 0.0, 0.5], [1.0, 1.0, 0.5], [np.nan, 0.0, 0.0]])
    found = rank_metrics(scores, k=1)
    assert found["HR@1"] == pytest.approx(1 / 3)
    assert found["MRR"] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)


@pytest.mark.parametrize("k", [1, 5, 10])
def test_definitions(k):
    scores = np.random.default_rng(0).permuted(np.tile(np.arange(30.0), (50, 1)), axis=1)
    ranks = [sorted(row, reverse=True).index(row[0]) + 1 for row in scores.tolist()]
    expected = {
        f"HR@{k}": np.mean([rank <= k for rank in ranks]),
        f"NDCG@{k}": np.mean([1 / np.log2(1 + rank) if rank <= k else 0 for rank in ranks]),
        "MRR": np.mean([1 / rank for rank in ranks]),
    }
    assert rank_metrics(scores, k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shape", "k"), [((0, 3), 1), ((3, 1), 1), ((3, 3), 0)], ids=["samples", "others", "k"]
)
def test_what_cannot_be_ranked(shape, k):
    with pytest.raises(ValueError, match="one sample or more"):
        rank_metrics(np.zeros(shape), k)
