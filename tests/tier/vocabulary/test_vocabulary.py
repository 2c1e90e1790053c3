"""Vocabularies assign, evict and refuse as a dict in plain Python does.

A million operations over new seeds:
``JAXREC_TEST_FUZZ=100 pytest tests/tier/vocabulary/test_vocabulary.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.tier import (
    Dynamic,
    by_score,
    default_row,
    distance_lfu,
    lfu,
    lfu_lru,
    lru,
    shared,
    ttl,
    zeros,
)
from jaxrec.tier.vocabulary.assignment import VocabularyFullError
from jaxrec.tier.vocabulary.vocabulary import Vocabulary
from tests.fuzz import max_examples
from tests.tier.vocabulary_oracle import POLICIES, FullError, Oracle


class Clock:
    """Time that tests set."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def make_policy(name: str, clock: Clock):
    return {
        "lru": lru,
        "lfu": lfu,
        "lfu_lru": lfu_lru,
        "distance_lfu": distance_lfu,
        "distance_lfu_squared": lambda: distance_lfu(decay=2),
        "ttl_batches": lambda: ttl(batches=9),
        "ttl_hours": lambda: ttl(hours=2, clock=clock),
        "by_score": lambda: by_score(
            lambda records, batch: records.count - 0.5 * (batch - records.born)
        ),
    }[name]()


class Stream:
    """Batches of ids whose popularity drifts, with a clock that goes on."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.rng, self.clock, self.batch = np.random.default_rng(seed), clock, 0
        self.universe = np.unique(self.rng.integers(-(2**63), 2**63, 300))

    def next(self) -> np.ndarray:
        rng = self.rng
        self.batch += 1
        if rng.random() < 0.04:
            self.batch += -self.batch % 100  # where rows expire
        self.clock.now += float(rng.integers(0, 1500))
        popular = rng.zipf(1.3, rng.integers(0, 60)) + 2 * self.batch
        return self.universe[popular % len(self.universe)]


def assert_unchanged(vocabulary: Vocabulary, before: dict[str, np.ndarray], totals) -> None:
    after = vocabulary.state()
    assert after.keys() == before.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    ids, rows = vocabulary.map.items()
    order = np.argsort(before["record_ids"])
    np.testing.assert_array_equal(ids, before["record_ids"][order])
    np.testing.assert_array_equal(rows, before["rows"][order])
    assert vocabulary.statistics.summary(len(vocabulary)) == totals


def check_batch(
    vocabulary: Vocabulary,
    oracle: Oracle,
    ids: np.ndarray,
    batch: int,
    held: int,
    coming: Sequence[np.ndarray] = (),
    seen: Sequence[np.ndarray] = (),
):
    """Give a batch to both; return whether it had room.

    The vocabulary gets the ids of ``coming`` batches; the oracle those that its policy looks at.
    """
    try:
        expected = oracle.assign(ids.tolist(), batch, held, [each.tolist() for each in seen])
    except FullError as full:
        numbers = full.args
        before, totals = vocabulary.state(), vocabulary.statistics.summary(len(vocabulary))
        with pytest.raises(VocabularyFullError) as caught:
            vocabulary.propose(ids, batch, held, None, coming)
        error = caught.value
        assert (error.needed, error.available, error.room, error.first_id) == numbers
        assert_unchanged(vocabulary, before, totals)
        return False
    assignment = vocabulary.commit(vocabulary.propose(ids, batch, held, None, coming))
    for name, values in expected.items():
        assert getattr(assignment, name).tolist() == values, name
    assert assignment.rows.dtype == assignment.new_rows.dtype == np.int32
    residents = {resident.id: resident.row for resident in oracle.residents.values()}
    found, rows = vocabulary.map.items()
    assert dict(zip(found.tolist(), rows.tolist(), strict=True)) == residents
    return True


def run(vocabulary: Vocabulary, oracle: Oracle, stream: Stream, steps: int) -> None:
    """Compare over a stream, at times as of an earlier batch."""
    snapshots = {}
    for _ in range(steps):
        ids, held = stream.next(), int(stream.rng.integers(0, 4))
        if check_batch(vocabulary, oracle, ids, stream.batch, held):
            assert len(vocabulary) == len(oracle.residents)
            snapshots[stream.batch] = {i: (r.row, r.born) for i, r in oracle.residents.items()}
        if snapshots and stream.rng.random() < 0.3:
            batch = int(stream.rng.choice(list(snapshots)))
            present = {i: (r.row, r.born) for i, r in oracle.residents.items()}
            expected = [
                row if present.get(i) == (row, born) else -1
                for i in stream.universe.tolist()
                for row, born in [snapshots[batch].get(i, (-1, -1))]
            ]
            assert vocabulary.find(stream.universe, batch).tolist() == expected


CHOICES = st.fixed_dictionaries(
    {
        "unknown": st.sampled_from([zeros(), default_row(), shared(1), shared(7)]),
        "evict_fraction": st.sampled_from([0.001, 1 / 32, 0.3, 1.0]),
        "admit_after": st.sampled_from([1, 1, 2, 3]),
        "admit_probability": st.sampled_from([1.0, 1.0, 0.4]),
        "counters": st.sampled_from([None, 1, 13, 1000]),
    }
)
SEEDS = st.integers(0, 2**32)
SIZES = st.sampled_from([9, 40, 64, 150, 400])


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=max_examples(12))
@given(CHOICES, SIZES, SEEDS)
def test_policies(name: str, choices: dict, num_rows: int, seed: int):
    clock = Clock()
    dynamic = Dynamic(eviction=make_policy(name, clock), **choices)
    vocabulary = Vocabulary(num_rows, dynamic)
    oracle = Oracle(num_rows, dynamic, POLICIES[name], clock)
    run(vocabulary, oracle, Stream(seed, clock), 60)
    summary = vocabulary.statistics.summary(len(vocabulary))
    assert {key: summary[key] for key in oracle.counts} == oracle.counts
    assert summary["resident"] == len(oracle.residents)
    assert summary["load"] == len(oracle.residents) / oracle.room


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=max_examples(4))
@given(CHOICES, SIZES, SEEDS)
def test_a_loaded_vocabulary_goes_on_alike(name: str, choices: dict, num_rows: int, seed: int):
    clock = Clock()
    dynamic = Dynamic(eviction=make_policy(name, clock), **choices)
    vocabulary = Vocabulary(num_rows, dynamic)
    oracle = Oracle(num_rows, dynamic, POLICIES[name], clock)
    stream = Stream(seed, clock)
    run(vocabulary, oracle, stream, 30)
    state = copy.deepcopy(vocabulary.state())
    loaded = Vocabulary(num_rows, dynamic)
    # What it had before is gone.
    loaded.commit(loaded.propose(np.arange(2), 1, 0))
    taken_over = loaded.load_state(state, stream.batch)
    np.testing.assert_array_equal(taken_over.old_rows, taken_over.rows)
    assert taken_over.dropped_ids.size == 0
    assert len(loaded) == len(oracle.residents)
    run(loaded, oracle, stream, 30)
    # The state is a copy: what came later did not change it.
    again = Vocabulary(num_rows, dynamic)
    again.load_state(state, stream.batch)
    again.commit(again.propose(stream.universe[:1], stream.batch + 1, 0))


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=max_examples(4))
@given(CHOICES, SIZES, st.sampled_from([0.3, 0.8, 1.1, 4]), SEEDS)
def test_a_vocabulary_of_another_size(
    name: str, choices: dict, num_rows: int, factor: float, seed: int
):
    clock = Clock()
    # Sightings are counted anew if the number of counters differs.
    choices |= {"admit_after": 1}
    dynamic = Dynamic(eviction=make_policy(name, clock), **choices)
    vocabulary = Vocabulary(num_rows, dynamic)
    oracle = Oracle(num_rows, dynamic, POLICIES[name], clock)
    stream = Stream(seed, clock)
    run(vocabulary, oracle, stream, 30)
    other_rows = max(8, int(num_rows * factor))
    other = Vocabulary(other_rows, dynamic)
    loaded = other.load_state(vocabulary.state(), stream.batch)
    resized = oracle.resized(other_rows, stream.batch)
    rows = {
        r.row: resized.residents[r.id].row
        for r in oracle.residents.values()
        if r.id in resized.residents
    }
    assert dict(zip(loaded.old_rows.tolist(), loaded.rows.tolist(), strict=True)) == rows
    dropped = {r.id: r.row for r in oracle.residents.values() if r.id not in resized.residents}
    pairs = zip(loaded.dropped_ids.tolist(), loaded.dropped_rows.tolist(), strict=True)
    assert dict(pairs) == dropped
    run(other, resized, stream, 30)


@pytest.mark.parametrize(
    ("rows", "counters", "is_kept"),
    [(40, None, True), (80, 40, True), (80, None, False)],
    ids=["same_rows", "same_counters", "other_counters"],
)
def test_sightings_of_a_saved_vocabulary(rows: int, counters: int | None, is_kept: bool):
    vocabulary = Vocabulary(40, Dynamic(admit_after=2))
    vocabulary.commit(vocabulary.propose(np.array([5, 6]), 1, 0))
    assert len(vocabulary) == 0
    other = Vocabulary(rows, Dynamic(admit_after=2, counters=counters))
    other.load_state(vocabulary.state(), 1)
    other.commit(other.propose(np.array([6]), 2, 0))
    assert len(other) == is_kept


@pytest.mark.parametrize("saved", [1, 3], ids=["all_saved", "sightings_saved"])
def test_a_vocabulary_may_begin_or_end_to_count_sightings(saved: int):
    vocabulary = Vocabulary(40, Dynamic(admit_after=saved))
    vocabulary.commit(vocabulary.propose(np.array([5, 6, 6, 6]), 1, 0))
    other = Vocabulary(40, Dynamic(admit_after=4 - saved))
    other.load_state(vocabulary.state(), 1)
    assert other.map.items()[0].tolist() == ([5, 6] if saved == 1 else [6])


def test_rows_of_batches_under_way_stay():
    vocabulary = Vocabulary(1 + 4, Dynamic())
    for batch in (1, 2, 3, 4):
        vocabulary.commit(vocabulary.propose(np.array([batch]), batch, 0))
    # Of four rows, those of batches 3 and 4 are held.
    assignment = vocabulary.commit(vocabulary.propose(np.array([5, 6]), 5, held=2))
    assert assignment.evicted_ids.tolist() == [1, 2]
    with pytest.raises(VocabularyFullError) as caught:
        vocabulary.propose(np.array([7, 5, 8]), 6, held=2)
    assert (caught.value.needed, caught.value.available) == (2, 1)
    assert (caught.value.room, caught.value.first_id) == (4, 8)


def test_a_proposal_changes_nothing():
    vocabulary = Vocabulary(10, Dynamic(admit_after=2, eviction=lfu_lru()))
    vocabulary.commit(vocabulary.propose(np.array([1, 1, 2]), 1, 0))
    before, totals = vocabulary.state(), vocabulary.statistics.summary(len(vocabulary))
    vocabulary.propose(np.arange(10), 2, 0)
    assert_unchanged(vocabulary, before, totals)


def test_extreme_ids():
    ids = np.array([-(2**63), 2**63 - 1, 0, -2, 1])
    vocabulary = Vocabulary(10, Dynamic())
    assignment = vocabulary.commit(vocabulary.propose(ids, 1, 0))
    assert len(set(assignment.rows.tolist())) == 5
    assert vocabulary.find(ids, 1).tolist() == assignment.rows.tolist()


@pytest.mark.parametrize(
    ("rows", "unknown", "message"),
    [
        (1, zeros(), "num_embeddings is 1, but 1 rows are kept for unknown ids"),
        (1, default_row(), "num_embeddings is 1, but 1 rows are kept for unknown ids"),
        (5, shared(8), "num_embeddings is 5, but 8 rows are kept for unknown ids"),
        (2**31, zeros(), "rows that int32 numbers, at most 2147483645, but 2147483648 are wanted"),
    ],
    ids=["zeros", "default", "shared", "beyond_int32"],
)
def test_no_room(rows: int, unknown, message: str):
    with pytest.raises(ValueError, match=message):
        Vocabulary(rows, Dynamic(unknown=unknown))


def test_fresh_rows_fill_shards_evenly():
    vocabulary = Vocabulary(2 + 800, Dynamic())
    for batch in range(1, 5):
        vocabulary.commit(vocabulary.propose(np.arange(100) + 1000 * batch, batch, 0))
    _, rows = vocabulary.map.items()
    shares = np.histogram(rows, 8, (2, 802))[0]
    assert shares.min() >= 0.9 * shares.mean()
