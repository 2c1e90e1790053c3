"""Evicted rows on their way, compared with a list of dicts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxrec.tier.ids import implementation, library, reference
from jaxrec.tier.rows.under_way import RowsUnderWay
from tests.fuzz import max_examples

IDS = st.lists(st.integers(-9, 9).filter(lambda i: i != -1), unique=True, max_size=8)


@pytest.fixture(autouse=True, scope="module", params=[library, reference], ids=["native", "python"])
def each_implementation(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementation, "current", lambda: request.param)
        yield


# A range whose ids index an array, and one whose ids are hashed.
@pytest.mark.every_case
@pytest.mark.parametrize("num_ids", [None, 19, 2**40])
@settings(max_examples=max_examples(60))
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "find"]), IDS), max_size=30))
@example([("add", [1]), ("add", []), ("add", [0]), ("add", []), ("remove", [0, 1, 2, 3, 4, 5])])
def test_the_last_eviction_of_an_id_is_found(num_ids, steps):
    under_way, alive = RowsUnderWay(num_ids), []
    last = {}  # eviction of each id
    for kind, ids in steps:
        if num_ids is not None:
            ids = [i + 9 for i in ids]
        array = np.array(ids, np.int64)
        if kind == "add":
            alive.append(under_way.add(array))
            last |= dict.fromkeys(ids, alive[-1])
        elif kind == "remove" and alive:  # not always the first: a write may have failed
            under_way.remove(alive.pop(len(ids) // 3 % len(alive)))
        found = {}
        wanted = under_way.find(array)
        for position, which, index in zip(
            wanted.positions.tolist(), wanted.which, wanted.index, strict=True
        ):
            evicted = wanted.evictions[which]
            assert evicted.ids[index] == array[position]
            found[ids[position]] = evicted
        assert found == {i: last[i] for i in ids if last.get(i) in alive}
        assert len(under_way) == len(alive)


@pytest.mark.parametrize("num_ids", [None, 5000])
def test_many_ids(num_ids):
    under_way, ids = RowsUnderWay(num_ids), np.arange(5000)
    evicted = under_way.add(ids)
    wanted = under_way.find(ids[::-1].copy())
    assert wanted.evictions == (evicted,)
    np.testing.assert_array_equal(wanted.index, ids[::-1])
    under_way.remove(evicted)
    assert len(under_way.find(ids)) == 0


@pytest.mark.parametrize("ids", [[0, 10], [-1]], ids=["above", "below"])
@pytest.mark.parametrize("method", ["add", "find"])
def test_ids_under_way_that_index_nothing(method, ids):
    under_way = RowsUnderWay(num_ids=10)
    with pytest.raises(ValueError, match=r"ids are 0 to 9, got"):
        getattr(under_way, method)(np.array(ids))
    assert len(under_way) == 0
