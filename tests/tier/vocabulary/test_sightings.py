"""Counters of sightings: never too few, rarely too many."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.tier.vocabulary.sightings import Sightings
from tests.fuzz import max_examples
from tests.tier.vocabulary_oracle import Sketch


def see(sightings: Sightings, ids: list[int]) -> dict[int, int]:
    counts = collections.Counter(ids)
    distinct = np.array(list(counts), np.int64)
    counted = sightings.count(distinct, np.array(list(counts.values()), np.int32))
    sightings.record(distinct, counted)
    return dict(zip(counts, counted.tolist(), strict=True))


BATCHES = st.lists(
    st.lists(st.one_of(st.integers(-3, 20), st.integers(-(2**63), 2**63 - 1)), max_size=40),
    max_size=12,
)


@settings(max_examples=max_examples(60))
@given(BATCHES, st.sampled_from([1, 2, 7, 64, 1000]))
def test_counts_of_a_sketch(batches, counters):
    sightings, sketch = Sightings(counters), Sketch(counters)
    for ids in batches:
        expected = sketch.counted(collections.Counter(ids))
        sketch.record(expected)
        assert see(sightings, ids) == expected


@settings(max_examples=max_examples(40))
@given(BATCHES)
def test_never_too_few(batches):
    """With room for all ids, so that no counter is halved."""
    sightings, totals = Sightings(10_000), collections.Counter()
    for ids in batches:
        totals.update(ids)
        for i, count in see(sightings, ids).items():
            assert count >= min(255, totals[i])


def test_rarely_too_many():
    rng = np.random.default_rng(0)
    sightings = Sightings(4096)
    ids = rng.integers(-(2**63), 2**63, 2000)
    counted = see(sightings, ids.tolist())
    assert sum(count > 1 for count in counted.values()) == 0
    again = see(sightings, ids.tolist())
    assert sum(count > 2 for count in again.values()) <= 20


def test_counting_alone_changes_nothing():
    sightings = Sightings(100)
    for _ in range(2):
        assert sightings.count(np.array([7]), np.array([3], np.int32)).tolist() == [3]
    assert not sightings.lines.any()


@pytest.mark.parametrize("steps", [[300], [200, 100], [1] * 260], ids=["once", "twice", "single"])
def test_counters_end_at_255(steps):
    sightings = Sightings(100)
    for count in steps:
        counted = sightings.count(np.array([7]), np.array([count], np.int32))
        sightings.record(np.array([7]), counted)
    assert counted.tolist() == [255]


def test_ids_of_long_ago_are_forgotten():
    sightings = Sightings(50)
    see(sightings, [1] * 8)
    counted = [8]
    for first in range(10, 410, 50):
        see(sightings, list(range(first, first + 50)))
        counted.append(int(sightings.count(np.array([1]), np.array([0], np.int32))[0]))
    # Each time after 50 new ids the counters are halved.
    assert counted[-1] <= 1
    assert counted == sorted(counted, reverse=True)


def test_no_ids():
    sightings = Sightings(5)
    assert see(sightings, []) == {}
    assert not sightings.lines.any()
