from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.tier.rows.under_way import WrittenIds
from tests.fuzz import max_examples

PARTS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5)
ACTIONS = st.lists(st.one_of(PARTS, st.sampled_from(["take", "give_back", "all"])), max_size=20)


@given(actions=ACTIONS)
@settings(max_examples=max_examples(50))
def test_ids_as_a_set(actions):
    written, expected, taken = WrittenIds(), None, []
    for action in actions:
        if action == "take":
            found = written.take()
            assert (None if found is None else found.tolist()) == (
                None if expected is None else sorted(expected)
            )
            taken, expected = [found], set()
        elif action == "give_back":
            for each in taken:
                written.give_back(each)
                known = each is not None and expected is not None
                expected = expected | set(each.tolist()) if known else None
            taken = []
        elif action == "all":
            written.add_all()
            expected = None
        else:
            written.add(np.array(action, np.int64))
            expected = None if expected is None else expected | set(action)


def test_repeats_take_no_memory():
    written = WrittenIds()
    written.take()
    for _ in range(100):
        written.add(np.arange(10_000))
    assert sum(part.size for part in written._parts) <= 1 << 17
    np.testing.assert_array_equal(written.take(), np.arange(10_000))
