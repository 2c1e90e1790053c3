"""Keys of eviction policies, compared with their formulas in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.tier import (
    Eviction,
    Records,
    by_score,
    distance_lfu,
    lfu,
    lfu_lru,
    lru,
    ttl,
)
from jaxrec.tier.vocabulary.eviction import ordered
from tests.fuzz import max_examples

BATCH = 2000


def make_records(uses: list[tuple[int, int, int]]) -> Records:
    """Records of rows from (last use, count, class)."""
    columns = np.array(uses, np.int64).reshape(-1, 3)
    return Records(
        ids=np.arange(len(uses)),
        last_use=columns[:, 0],
        count=columns[:, 1].astype(np.uint32),
        born=np.zeros(len(uses), np.int64),
        power=columns[:, 2].astype(np.uint8),
        last_seconds=3600 * columns[:, 0],
    )


USES = st.lists(
    st.tuples(
        st.integers(0, BATCH),
        st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1)),
        st.integers(5, 31),
    ),
    max_size=30,
)
FORMULAS = {
    "lru": (lru(), lambda last, count, power: last),
    "lfu": (lfu(), lambda last, count, power: (min(count, 2**24 - 1), last)),
    "lfu_lru": (lfu_lru(), lambda last, count, power: (power, last)),
    "distance_lfu": (distance_lfu(), lambda last, count, power: count / (BATCH - last + 1)),
    "ttl": (ttl(batches=3), lambda last, count, power: last),
    "by_score": (
        by_score(lambda records, batch: records.last_use - 3.0 * records.count),
        lambda last, count, power: last - 3.0 * count,
    ),
}


@pytest.mark.parametrize(("policy", "formula"), FORMULAS.values(), ids=FORMULAS)
@settings(max_examples=max_examples(50))
@given(USES)
def test_order(policy, formula, uses):
    keys = policy.keys(make_records(uses), BATCH)
    assert keys.dtype == np.uint64
    expected = sorted(range(len(uses)), key=lambda row: (formula(*uses[row]), row))
    assert np.argsort(keys, kind="stable").tolist() == expected


@settings(max_examples=max_examples(200))
@given(st.lists(st.floats(allow_nan=False), min_size=1))
def test_floats_keep_their_order_as_integers(scores):
    keys = ordered(np.array(scores)).tolist()
    for a, x in zip(scores, keys, strict=True):
        for b, y in zip(scores, keys, strict=True):
            assert (a < b, a == b) == (x < y, x == y)


def test_time_to_live_in_batches():
    policy = ttl(batches=10)
    expired = policy.expired(make_records([(1990, 1, 5), (1989, 1, 5), (2000, 1, 5)]), BATCH)
    assert expired.tolist() == [False, True, False]
    assert policy.expiry_interval == 2
    assert not policy.uses_seconds


def test_time_to_live_in_hours():
    policy = ttl(hours=24, clock=lambda: 3600.0 * 30)
    expired = policy.expired(make_records([(6, 1, 5), (5, 1, 5)]), BATCH)
    assert expired.tolist() == [False, True]
    assert policy.uses_seconds
    assert policy.seconds() == 3600 * 30
    assert policy.expiry_interval == 100


@pytest.mark.parametrize(("batches", "interval"), [(1, 1), (3, 1), (40, 10), (10**6, 100)])
def test_rows_outlive_their_time_by_a_quarter(batches, interval):
    assert ttl(batches=batches).expiry_interval == interval


@pytest.mark.parametrize(
    "arguments",
    [{}, {"batches": 1, "hours": 1}, {"batches": 0}, {"hours": -1.0}],
    ids=["none", "both", "zero", "negative"],
)
def test_time_to_live_wants_one_time(arguments):
    given = {"batches": None, "hours": None} | arguments
    message = (
        f"ttl takes either batches= or hours=, above 0, got batches={given['batches']}, "
        f"hours={given['hours']}"
    )
    with pytest.raises(ValueError, match=message):
        ttl(**arguments)


@pytest.mark.parametrize("decay", [0.0, -1.0, float("nan")])
def test_decay_is_positive(decay):
    with pytest.raises(ValueError, match=f"distance_lfu: decay is above 0, got {decay}"):
        distance_lfu(decay)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (np.zeros(2), r"a number for each of 3 rows, got an array of shape \(2,\)"),
        (np.zeros((3, 1)), r"each of 3 rows, got an array of shape \(3, 1\)"),
        (np.array([0, np.nan, 1]), r"got an array of shape \(3,\) with NaN"),
        (1.0, r"got an array of shape \(\)"),
    ],
    ids=["few", "wide", "nan", "scalar"],
)
def test_wrong_scores(scores, message):
    policy = by_score(lambda records, batch: scores)
    with pytest.raises(ValueError, match=message):
        policy.keys(make_records([(1, 1, 5)] * 3), BATCH)


def test_scores_of_any_type():
    policy = by_score(lambda records, batch: [5, -2, 3])
    keys = policy.keys(make_records([(1, 1, 5)] * 3), BATCH)
    assert np.argsort(keys).tolist() == [1, 2, 0]


class Oldest(Eviction):
    """A policy of one's own needs its keys alone."""

    def keys(self, records, batch):
        return records.born.astype(np.uint64)


def test_own_policy():
    records = make_records([(1, 1, 5)])
    policy = Oldest()
    assert policy.expired(records, BATCH) is None
    assert (policy.uses_power, policy.uses_seconds) == (False, False)
    assert (policy.expiry_interval, policy.seconds(), policy.foresight) == (100, 0.0, 0)


@pytest.mark.parametrize("policy", [lru(), lfu(), lfu_lru(), distance_lfu(2.0)], ids=repr)
def test_equal_policies_are_equal(policy):
    """Tables that share a feature need equal settings."""
    assert policy == type(policy)(**vars(policy))
    assert hash(policy) == hash(type(policy)(**vars(policy)))


TYPES = {
    "ids": np.int64,
    "last_use": np.int64,
    "count": np.uint32,
    "born": np.int64,
    "power": np.uint8,
    "last_seconds": np.int64,
}


def test_rows_are_free_at_first():
    records = Records.empty(3)
    assert {name: array.dtype for name, array in records.arrays().items()} == TYPES
    assert all(array.shape == (3,) for array in records.arrays().values())
    assert records.born.tolist() == [-1, -1, -1]
    assert records.count.tolist() == [0, 0, 0]


def test_take_copies():
    records = Records.empty(4)
    records.ids[:] = [9, 8, 7, 6]
    records.count[:] = [1, 2, 3, 4]
    few = records.take(np.array([2, 0]))
    records.ids[:] = 0
    assert few.ids.tolist() == [7, 9]
    assert few.count.tolist() == [3, 1]
    assert {name: array.dtype for name, array in few.arrays().items()} == TYPES
    assert records.take(np.zeros(0, np.int32)).ids.shape == (0,)
