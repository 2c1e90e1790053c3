"""Expected lookups of rows beside drawing and counting."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrec.plan import statistics
from jaxrec.plan.heat import EvenHeat, SampledHeat
from tests.plan.models import batch_of, log_uniform


@pytest.mark.parametrize("rows", [1, 10, 1000])
@pytest.mark.parametrize("lookups", [0, 1, 50, 2000])
def test_even_heat_beside_drawing(rows, lookups):
    random = np.random.default_rng(0)
    drawn = [np.unique(random.integers(0, rows, lookups)).size for _ in range(300)]
    error = 4 * np.std(drawn) / np.sqrt(300) + 1e-9
    assert EvenHeat(rows).distinct(lookups) == pytest.approx(np.mean(drawn), abs=error)


@pytest.mark.parametrize("part", [0.1, 0.5, 1.0])
def test_distinct_rows_of_a_part_of_the_sample_beside_drawing(part):
    random = np.random.default_rng(0)
    ids = log_uniform(random, 10_000, 5000)
    heat = statistics([batch_of(ids, [1] * 5000)]).features["f"].heat(10_000)
    count = int(5000 * part)
    drawn = [np.unique(random.permutation(ids)[:count]).size for _ in range(50)]
    assert heat.distinct(count) == pytest.approx(np.mean(drawn), rel=0.01)


@pytest.mark.parametrize("times", [2, 8])
def test_distinct_rows_of_more_than_the_sample_beside_drawing(times):
    random = np.random.default_rng(0)
    sample = log_uniform(random, 100_000, 20_000)
    heat = statistics([batch_of(sample, [1] * 20_000)]).features["f"].heat(100_000)
    drawn = np.unique(log_uniform(random, 100_000, 20_000 * times)).size
    assert heat.distinct(20_000 * times) == pytest.approx(drawn, rel=0.2)


def test_shares_of_runs_of_rows_beside_counting():
    random = np.random.default_rng(0)
    ids = log_uniform(random, 1024, 50_000)
    heat = statistics([batch_of(ids, [1] * 50_000)]).features["f"].heat(1024)
    for sizes in ([1, 1], [1] * 8, [512, 256, 128, 128], [0, 768, 256]):
        sizes = np.array(sizes)
        ends = np.cumsum(sizes) * 1024 // sizes.sum()
        run = np.searchsorted(ends, np.arange(1024), side="right")
        expected = np.bincount(run[ids], minlength=sizes.size) / ids.size
        np.testing.assert_allclose(heat.shares(sizes, of_rows=False), expected, atol=0.01)
        rows = np.bincount(run[np.unique(ids)], minlength=sizes.size)
        np.testing.assert_allclose(heat.shares(sizes, of_rows=True), rows / rows.sum(), atol=0.02)


def test_a_table_larger_than_the_ids_seen():
    heat = statistics([batch_of([0, 1, 2, 3], [4])]).features["f"].heat(8)
    np.testing.assert_allclose(heat.shares(np.ones(2), of_rows=True), [1, 0])


def test_heat_is_never_more_than_there_is():
    heat = SampledHeat(10, 8, (1,), (8,), (8.0,), (8.0,))
    assert heat.distinct(1_000_000) <= 10
    assert heat.distinct(4) <= 4
