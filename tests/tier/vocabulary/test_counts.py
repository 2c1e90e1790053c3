"""Sightings of ids without a row, uses of rows, and counts of vocabularies."""

from __future__ import annotations

import collections
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.tier import lfu_lru, lru, ttl
from jaxrec.tier.vocabulary import counts as counts_module
from jaxrec.tier.vocabulary.counts import Sightings, Statistics, Uses
from jaxrec.tier.vocabulary.eviction import Records
from tests.fuzz import max_examples
from tests.tier.vocabulary_oracle import Sketch


def see_ids(sightings: Sightings, ids: list[int]) -> dict[int, int]:
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
        assert see_ids(sightings, ids) == expected


@settings(max_examples=max_examples(40))
@given(BATCHES)
def test_never_too_few(batches):
    """With room for all ids, so that no counter is halved."""
    sightings, totals = Sightings(10_000), collections.Counter()
    for ids in batches:
        totals.update(ids)
        for i, count in see_ids(sightings, ids).items():
            assert count >= min(255, totals[i])


def test_rarely_too_many():
    rng = np.random.default_rng(0)
    sightings = Sightings(4096)
    ids = rng.integers(-(2**63), 2**63, 2000)
    counted = see_ids(sightings, ids.tolist())
    assert sum(count > 1 for count in counted.values()) == 0
    again = see_ids(sightings, ids.tolist())
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
    see_ids(sightings, [1] * 8)
    counted = [8]
    for first in range(10, 410, 50):
        see_ids(sightings, list(range(first, first + 50)))
        counted.append(int(sightings.count(np.array([1]), np.array([0], np.int32))[0]))
    # Each time after 50 new ids the counters are halved.
    assert counted[-1] <= 1
    assert counted == sorted(counted, reverse=True)


def test_no_ids():
    sightings = Sightings(5)
    assert see_ids(sightings, []) == {}
    assert not sightings.lines.any()


ROWS = 20


def empty_records() -> Records:
    records = Records.empty(ROWS)
    records.ids[:] = np.arange(ROWS) * 7**15
    records.born[:] = np.arange(ROWS) % 4
    records.power[:] = np.arange(ROWS) % 3
    return records


@pytest.mark.parametrize("name", ["lru", "lfu_lru", "ttl_hours"])
@settings(max_examples=max_examples(20))
@given(seed=st.integers(0, 2**32), groups=st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_groups_of_batches(name: str, seed: int, groups: list[int]):
    rng = np.random.default_rng(seed)
    now = [0.0]
    policy = {
        "lru": lru,
        "lfu_lru": lfu_lru,
        "ttl_hours": lambda: ttl(hours=1, clock=lambda: now[0]),
    }[name]()
    together, one_by_one = empty_records(), empty_records()
    waiting, recorded = Uses(together, policy), Uses(one_by_one, policy)
    batch = 0
    for size in groups:
        for _ in range(size):
            batch, now[0] = batch + 1, now[0] + 10
            rows = rng.integers(-1, ROWS, rng.integers(0, 30), np.int32)
            waiting.add(rows, batch)
            recorded.add(rows, batch)
            recorded.record()
        waiting.record()
        for field, array in together.arrays().items():
            np.testing.assert_array_equal(array, getattr(one_by_one, field), err_msg=field)
    assert one_by_one.last_use.max() <= batch


@pytest.mark.parametrize(("limit", "number"), [("_MOST_USES", 6), ("_MOST_BATCHES", 3)])
def test_uses_wait_until_there_are_many(monkeypatch, limit: str, number: int):
    monkeypatch.setattr(counts_module, limit, number)
    records = empty_records()
    waiting = Uses(records, lru())
    for batch, expected in ((1, 0), (2, 0), (3, 3), (4, 3)):
        waiting.add(np.array([5, 5], np.int32), batch)
        assert records.last_use[5] == expected
    assert records.count[5] == 6
    waiting.record()
    assert (records.last_use[5], records.count[5]) == (4, 8)
    waiting.record()
    assert records.count[5] == 8


def add(statistics: Statistics, evicted: int = 0, **counts: int) -> None:
    zeros = dict.fromkeys(("lookups", "hits", "new", "admitted", "refused"), 0)
    statistics.add(evicted=evicted, **(zeros | counts))


def test_summary():
    statistics = Statistics(room=8)
    assert statistics.summary(2) == {
        "lookups": 0,
        "hits": 0,
        "new": 0,
        "admitted": 0,
        "evicted": 0,
        "refused": 0,
        "resident": 2,
        "load": 0.25,
        "hit_rate": 0.0,
    }
    add(statistics, lookups=10, hits=4, new=3, admitted=2, refused=1)
    add(statistics, lookups=10, hits=8, new=2, admitted=2, evicted=1)
    assert statistics.summary(6) == {
        "lookups": 20,
        "hits": 12,
        "new": 5,
        "admitted": 4,
        "evicted": 1,
        "refused": 1,
        "resident": 6,
        "load": 0.75,
        "hit_rate": 0.6,
    }
    assert statistics.batches == 2


def test_a_table_that_thrashes_warns_once():
    statistics = Statistics(room=1000)
    for _ in range(99):
        add(statistics, evicted=10)
        statistics.warn_if_thrashing("item")
    add(statistics, evicted=10)
    message = (
        "the table item thrashes: 1,000 rows were evicted in the last 100 batches, and it has "
        r"1,000, .*num_embeddings.*admit_after.*store='memory://'"
    )
    with pytest.warns(UserWarning, match=message):
        statistics.warn_if_thrashing("item")
    add(statistics, evicted=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        statistics.warn_if_thrashing("item")


def test_evictions_of_long_ago_do_not_count():
    statistics = Statistics(room=1000)
    add(statistics, evicted=900)
    for _ in range(100):
        add(statistics, evicted=1)
        statistics.warn_if_thrashing("item")
    assert statistics.summary(0)["evicted"] == 1000
