"""Flags of rows and ids are sets of Python, one for each consumer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.tier.changes import change_flags
from jaxrec.tier.changes.change_flags import IdFlags, RowFlags, flag_type
from tests.fuzz import max_examples

ROWS = 20_000
CONSUMERS = 3
EDGES = [0, 1, 4095, 4096, 8191, 8192, ROWS - 1]
rows = st.lists(st.integers(0, ROWS - 1) | st.sampled_from(EDGES), max_size=30)
ids = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5), max_size=30)
bits = st.integers(0, 2**CONSUMERS - 1)
actions = st.sampled_from(["mark", "mark", "mark", "clear", "take"])


def check(flags, read, expected):
    for consumer, of_consumer in enumerate(expected):
        found = read(1 << consumer)
        assert found.dtype == np.int64
        assert found.tolist() == sorted(of_consumer)


@given(data=st.data())
@settings(max_examples=max_examples(60))
@pytest.mark.parametrize("kind", ["rows", "ids"])
def test_flags_are_sets(kind, data):
    flags = RowFlags(ROWS, CONSUMERS) if kind == "rows" else IdFlags(CONSUMERS)
    read = flags.rows if kind == "rows" else flags.ids
    expected = [set() for _ in range(CONSUMERS)]
    for _ in range(data.draw(st.integers(0, 6))):
        action = data.draw(actions)
        if action == "clear":
            consumer = data.draw(st.integers(0, CONSUMERS - 1))
            flags.clear(1 << consumer)
            expected[consumer].clear()
            continue
        items = data.draw(rows if kind == "rows" else ids)
        if action == "take":
            items = np.array(sorted(set(items)), np.int64)
            if kind == "rows":
                taken = flags.take(items)
                for item, of_item in zip(items.tolist(), taken.tolist(), strict=True):
                    own = sum(1 << c for c, each in enumerate(expected) if item in each)
                    assert of_item == own
                    for each in expected:
                        each.discard(item)
            else:  # bits of their own
                of_items = np.arange(items.size) % 2**CONSUMERS
                flags.mark(items, of_items)
                for item, of_item in zip(items.tolist(), of_items.tolist(), strict=True):
                    for consumer, each in enumerate(expected):
                        each |= {item} if of_item >> consumer & 1 else set()
            continue
        of_all = data.draw(bits)
        flags.mark(np.array(items, np.int64), of_all)
        for consumer, each in enumerate(expected):
            each |= set(items) if of_all >> consumer & 1 else set()
    check(flags, read, expected)
    if kind == "ids":
        assert len(flags) == len(set().union(*expected))


def test_ids_are_merged_as_they_come(monkeypatch):
    """Ids that come again and again take no memory."""
    monkeypatch.setattr(change_flags, "_PENDING", 100)
    flags = IdFlags(1)
    for _ in range(50):
        flags.mark(np.arange(60), 1)
        assert sum(each.size for each, _ in flags._added) <= 160
    assert flags.ids(1).tolist() == list(range(60))


@pytest.mark.parametrize(
    ("consumers", "bytes_a_row"), [(1, 1), (8, 1), (9, 2), (17, 4), (33, 8), (64, 8)]
)
def test_types(consumers, bytes_a_row):
    assert flag_type(consumers).itemsize == bytes_a_row
    flags = RowFlags(5, consumers)
    flags.mark(np.array([3]), (1 << consumers) - 1)
    flags.clear(1)
    assert flags.rows(1).tolist() == []
    last = 1 << (consumers - 1)
    assert flags.rows(last).tolist() == ([3] if consumers > 1 else [])
