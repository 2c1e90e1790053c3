"""Uses that are recorded together give the records that uses recorded one by one give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.tier import lfu_lru, lru, ttl
from jaxrec.tier.vocabulary import uses
from jaxrec.tier.vocabulary.records import Records
from jaxrec.tier.vocabulary.uses import Uses
from tests.fuzz import max_examples

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
    monkeypatch.setattr(uses, limit, number)
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
