"""Requests packed into batches: nothing lost, nothing too large, equal work."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.data import BatchShape, CategoricalColumn, SequenceSchema, imbalance
from jaxrec.data.sequences.packing import attention_work, deal, stretches
from tests.fuzz import max_examples


def batches(events, candidates, shape):
    """All batches, ``[batches, devices * rows]`` request numbers."""
    found = []
    for start, stop, steps in stretches(events, candidates, shape):
        order, fullness = deal(events[start:stop], candidates[start:stop], shape, steps)
        assert fullness <= 1
        found.append(np.where(order < 0, -1, order + start))
    return np.concatenate(found) if found else np.zeros((0, shape.devices * shape.rows), int)


def totals(amounts, order, shape):
    padded = np.append(amounts, 0)  # request -1 is padding
    return padded[order].reshape(len(order), shape.devices, shape.rows).sum(-1)


@settings(max_examples=max_examples(200), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 16), st.integers(0, 5)), max_size=60),
    rows=st.integers(1, 6),
    events=st.integers(16, 40),
    candidates=st.integers(5, 20),
    devices=st.integers(1, 3),
    steps=st.integers(1, 3),
)
def test_each_request_is_in_one_batch_that_holds_it(
    lengths, rows, events, candidates, devices, steps
):
    shape = BatchShape(rows, events, candidates, devices, steps)
    of_events, of_candidates = np.array(lengths, np.uint8).reshape(-1, 2).T
    order = batches(of_events, of_candidates, shape)
    chosen = order[order >= 0]
    assert sorted(chosen.tolist()) == list(range(len(lengths)))
    assert totals(of_events.astype(int), order, shape).max(initial=0) <= events
    assert totals(of_candidates.astype(int), order, shape).max(initial=0) <= candidates
    assert (order >= 0).any(axis=1).all()


def test_one_device_takes_requests_in_order():
    events, candidates = np.array([5, 5, 1, 9, 2]), np.ones(5, int)
    order = batches(events, candidates, BatchShape(rows=3, events=11, candidates=9))
    assert order.tolist() == [[0, 1, 2], [3, 4, -1]]


@pytest.mark.parametrize("steps", [1, 4])
def test_power_law_lengths_make_equal_work(steps):
    rng = np.random.default_rng(0)
    events = np.minimum(1024, 12 * (1 + rng.pareto(1.1, 12_000))).astype(int)
    candidates = rng.integers(1, 33, len(events))
    shape = BatchShape(rows=64, events=8192, candidates=2048, devices=8, steps=steps)
    order = batches(events, candidates, shape)
    work = np.append(attention_work(events, candidates), 0)
    dealt = order.reshape(len(order), 8, -1)
    assert imbalance(work, dealt) < 1.1
    in_order = np.arange(len(events) // 512 * 512).reshape(-1, 8, 64)
    assert imbalance(work, in_order) > 1.3
    # All but the last batches, which have what is left, are nearly full in rows or in events.
    rows = (order >= 0).mean(axis=1)
    full = np.maximum(rows, totals(events, order, shape).sum(1) / (8 * 8192))
    assert full[:-steps].min() > 0.9


def test_work_is_that_of_visible_pairs_and_tokens():
    # Three events and two targets: a target sees events and itself.
    pairs = np.tril(np.ones((5, 5)))
    pairs[4, 3] = 0
    wanted = pairs.sum() * 4 * 128 + 5 * 14 * 128**2
    assert attention_work(np.array([3]), np.array([2])).tolist() == [wanted]


def test_capacities_are_those_of_a_device():
    ids = CategoricalColumn("ids", 9)
    schema = SequenceSchema(
        {"history": "candidate"}, {"history": ids, "user": ids}, context={"user": 2}
    )
    shape = BatchShape(rows=4, events=100, candidates=10, devices=2)
    assert shape.capacities(schema) == {"user": 8, "history": 100, "candidate": 10}


@pytest.mark.parametrize("name", ["rows", "events", "candidates", "devices", "steps"])
def test_sizes_are_positive(name):
    sizes = {"rows": 1, "events": 1, "candidates": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 1 or more, got 0"):
        BatchShape(**sizes)
