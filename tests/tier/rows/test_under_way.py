"""Evicted rows on their way, compared with a list of dicts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.tier.rows.under_way import RowsUnderWay
from tests.fuzz import max_examples

IDS = st.lists(st.integers(-9, 9).filter(lambda i: i != -1), unique=True, max_size=8)


@settings(max_examples=max_examples(60))
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "find"]), IDS), max_size=30))
def test_the_last_eviction_of_an_id_is_found(steps):
    under_way, evictions = RowsUnderWay(), []
    for kind, ids in steps:
        array = np.array(ids, np.int64)
        if kind == "add":
            evictions.append((under_way.add(array), ids))
        elif kind == "remove" and evictions:
            under_way.remove(evictions.pop(0)[0])
        found = {}
        for wanted in under_way.find(array):
            for position, index in zip(wanted.positions.tolist(), wanted.index, strict=True):
                assert wanted.evicted.ids[index] == array[position]
                found[ids[position]] = wanted.evicted
        last = {i: evicted for evicted, of in evictions for i in of}
        assert found == {i: last[i] for i in ids if i in last}
        assert len(under_way) == len(evictions)


def test_many_ids():
    under_way, ids = RowsUnderWay(), np.arange(5000)
    evicted = under_way.add(ids)
    [wanted] = under_way.find(ids[::-1].copy())
    np.testing.assert_array_equal(wanted.index, ids[::-1])
    under_way.remove(evicted)
    assert under_way.find(ids) == ()
