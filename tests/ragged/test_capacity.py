"""The ladder of capacities."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrec.ragged.capacity import LengthMoments, capacity_for


@pytest.fixture(scope="module")
def stats():
    """`scipy.stats`, whose import takes two seconds of each process that collects tests."""
    return importlib.import_module("scipy.stats")


def test_the_first_rungs():
    ladder = [8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert sorted({capacity_for(count) for count in range(129)}) == ladder
    assert [capacity_for(count) for count in ladder] == ladder


@given(st.integers(0, 2**40))
def test_a_rung_holds_its_count_and_little_more(count):
    capacity = capacity_for(count)
    assert capacity >= count
    assert capacity <= max(8, 1.5 * count)
    power = 1 << (capacity.bit_length() - 1)
    assert capacity in (power, power * 3 // 2)


def test_a_negative_count():
    with pytest.raises(ValueError, match="0 or more, not -1"):
        capacity_for(-1)


def test_moments_of_lengths_and_of_their_histogram(stats):
    lengths = np.random.default_rng(0).geometric(0.1, 1000)
    moments = LengthMoments.of(lengths)
    assert moments.mean == pytest.approx(lengths.mean())
    assert moments.variance == pytest.approx(lengths.var())
    skew = stats.skew(lengths) * lengths.std()
    assert moments.skew == pytest.approx(skew)
    assert LengthMoments.of(*np.unique(lengths, return_counts=True)) == pytest.approx(moments)
    assert LengthMoments.of(np.zeros(0, int)) == (0, 0, 0)
    assert LengthMoments.of(np.array([3, 3])) == (3, 0, 0)


@pytest.mark.parametrize("samples", [64, 512])
@pytest.mark.parametrize("mean", [2, 30])
def test_likely_ids_are_the_quantile_of_a_sum(stats, mean, samples):
    """A sum of geometric lengths has a negative binomial distribution."""
    p = 1 / mean
    moments = LengthMoments(mean, (1 - p) / p**2, (2 - p) / p)
    for deviations in (3, 4, 5):
        tail = stats.norm.sf(deviations)
        exact = samples + stats.nbinom.isf(tail, samples, p)
        assert moments.likely_ids(samples, deviations) == pytest.approx(exact, rel=0.02)
