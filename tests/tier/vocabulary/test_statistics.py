"""Counts of vocabularies, and the warning of a table that thrashes."""

from __future__ import annotations

import warnings

import pytest

from jaxrec.tier.vocabulary.statistics import Statistics


def add(statistics: Statistics, evicted: int = 0, resident: int = 0, **counts: int) -> None:
    zeros = dict.fromkeys(("lookups", "hits", "new", "admitted", "refused"), 0)
    statistics.add(resident=resident, evicted=evicted, **(zeros | counts))


def test_summary():
    statistics = Statistics(room=8, resident=2)
    assert statistics.summary() == {
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
    add(statistics, resident=4, lookups=10, hits=4, new=3, admitted=2, refused=1)
    add(statistics, resident=6, lookups=10, hits=8, new=2, admitted=2, evicted=1)
    assert statistics.summary() == {
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
    assert statistics.summary()["evicted"] == 1000
