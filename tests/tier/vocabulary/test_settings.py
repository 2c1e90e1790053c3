"""Settings of open vocabularies, and which row an unknown id reads."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxrec.tier import Dynamic, default_row, lfu, lru, shared, zeros
from jaxrec.tier.stores.memory_store import MemoryStore
from jaxrec.tier.vocabulary.vocabulary import Vocabulary
from tests.tier.vocabulary_oracle import mix


def test_defaults():
    settings = Dynamic()
    assert settings == Dynamic(
        eviction=lru(),
        admit_after=1,
        admit_probability=1.0,
        unknown=zeros(),
        evict_fraction=1 / 32,
        counters=None,
        store=None,
    )


def name_arguments(arguments):
    return "-".join(
        f"{name}={getattr(value, '__name__', value)}" for name, value in arguments.items()
    )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"eviction": lfu}, TypeError, r"eviction is a policy such as jaxrec.tier.lfu\(\), got <f"),
        ({"eviction": "lru"}, TypeError, "eviction is a policy .*, got 'lru'"),
        ({"unknown": "zeros"}, TypeError, r"unknown is jaxrec.tier.zeros\(\), .* got 'zeros'"),
        ({"store": 3}, TypeError, "store is a URL such as 'memory://' or a .*RowStore, got 3"),
        ({"admit_after": True}, TypeError, "admit_after is an integer, got True"),
        ({"admit_after": 2.0}, TypeError, r"admit_after is an integer, got 2\.0"),
        ({"admit_after": 0}, ValueError, "admit_after is from 1 to 255, got 0"),
        ({"admit_after": 256}, ValueError, "admit_after is from 1 to 255, got 256"),
        ({"admit_probability": 0.0}, ValueError, r"admit_probability is above 0 and .* got 0\.0"),
        ({"admit_probability": 1.1}, ValueError, r"admit_probability is above 0 and .* got 1\.1"),
        ({"admit_probability": float("nan")}, ValueError, "admit_probability is .* got nan"),
        ({"evict_fraction": -1}, ValueError, "evict_fraction is above 0 and at most 1, got -1"),
        ({"counters": 0}, ValueError, "counters is 1 or more, got 0"),
    ],
    ids=lambda value: name_arguments(value) if isinstance(value, dict) else "",
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=f"Dynamic: {message}"):
        Dynamic(**arguments)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rows", [0, -1, True, 2.0, "2"], ids=repr)
def test_number_of_shared_rows(rows):
    with pytest.raises(ValueError, match=f"shared: rows is an integer of 1 or more, got {rows!r}"):
        shared(rows)


@pytest.mark.parametrize("store", ["memory://", MemoryStore()], ids=["url", "object"])
def test_stores(store):
    assert Dynamic(store=store).store == store


def test_rows_of_unknown_ids():
    ids = np.array([5, -(2**63), 2**63 - 1, 5])
    for one_row in (zeros(), default_row()):
        assert one_row.rows == 1
        assert one_row.rows_of(ids).tolist() == [0] * 4
    rows = shared(10).rows_of(ids)
    assert rows.tolist() == [mix(i, 101) % 10 for i in ids.tolist()]
    assert rows.dtype == np.int32


@pytest.mark.parametrize(("halvings", "sightings"), list(enumerate([1, 4, 6, 7, 8, 8])))
def test_sightings_from_before_an_eviction_count(halvings, sightings):
    vocabulary = Vocabulary(3, Dynamic(admit_after=8, counters=1000))
    batches = itertools.count(1)

    def evicted_and_admitted(*ids):
        changes = vocabulary.commit(vocabulary.propose(np.array(ids), next(batches), held=0))
        return changes.evicted_ids.tolist(), changes.new_ids.tolist()

    for _ in range(7):
        assert evicted_and_admitted(1) == ([], [])
    assert evicted_and_admitted(1) == ([], [1])
    assert evicted_and_admitted(*[2] * 8) == ([], [2])
    assert evicted_and_admitted(*[3] * 8) == ([1], [3])
    vocabulary.sightings.lines >>= halvings
    for _ in range(sightings - 1):
        assert evicted_and_admitted(1) == ([], [])
    assert evicted_and_admitted(1) == ([2], [1])


def test_shared_rows_are_shared_evenly():
    rows = shared(16).rows_of(np.arange(4096))
    counts = np.bincount(rows, minlength=16)
    assert counts.min() > 180
