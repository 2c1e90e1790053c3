"""Places of ids, compared with a dict."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.tier.ids.id_map import Places
from tests.fuzz import max_examples

STEPS = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(-20, 20).filter(lambda i: i != -1), unique=True))
)


@settings(max_examples=max_examples(60))
@given(STEPS)
def test_places_are_distinct_and_stay(steps):
    places, expected = Places(2), {}
    for is_new, ids in steps:
        array = np.array(ids, np.int64)
        if is_new:
            given_places = places.assign(array)
            assert all(
                expected.get(i, place) == place
                for i, place in zip(ids, given_places.tolist(), strict=True)
            )
            expected.update(zip(ids, given_places.tolist(), strict=True))
        else:
            wanted = [expected.pop(i) for i in ids if i in expected]
            assert places.remove(array).tolist() == wanted
        assert len(set(expected.values())) == len(expected) == len(places)
        assert all(0 <= place < places.room for place in expected.values())
        assert places.find(array).tolist() == [expected.get(i, -1) for i in ids]
    found, of_found = places.items()
    assert dict(zip(found.tolist(), of_found.tolist(), strict=True)) == expected


def test_places_are_used_again():
    places = Places(4)
    for _ in range(100):
        places.assign(np.arange(4))
        places.remove(np.arange(4))
    assert places.room == 4


def test_load():
    places = Places(1)
    places.load(np.array([7, 8]), np.array([3, 1], np.int32), room=8)
    assert places.find(np.array([7, 8, 9])).tolist() == [3, 1, -1]
    taken = places.assign(np.arange(20, 26)).tolist()
    assert sorted(taken) == [0, 2, 4, 5, 6, 7]
    assert places.room == 8
