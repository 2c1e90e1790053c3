"""Operations on batches, in C++ and in NumPy, compared with plain Python."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.tier.ids import implementation, library, reference
from jaxrec.tier.ids.batch_ops import Search, distinct, mix, record_uses, search, smallest
from jaxrec.tier.vocabulary.eviction import Records
from tests.fuzz import max_examples
from tests.tier.vocabulary_oracle import mix as mix_one

IMPLEMENTATIONS = [reference]
if library.missing() is None:
    IMPLEMENTATIONS.append(library)


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda module: module.__name__.rpartition(".")[2])
def each_implementation(request, monkeypatch):
    monkeypatch.setattr(implementation, "current", lambda: request.param)


def require_distinct(ids: np.ndarray) -> None:
    counts = collections.Counter(ids.tolist())
    unique, inverse, occurrences = distinct(ids)
    assert unique.tolist() == list(counts)
    assert occurrences.tolist() == list(counts.values())
    np.testing.assert_array_equal(unique[inverse], ids)
    assert (unique.dtype, inverse.dtype, occurrences.dtype) == (np.int64, np.int32, np.int32)


def require_smallest(keys: np.ndarray, eligible: np.ndarray | None, k: int) -> None:
    is_eligible = np.ones(keys.size, bool) if eligible is None else eligible != 0
    order = np.lexsort((np.arange(keys.size), keys))
    indices = smallest(keys, eligible, k)
    np.testing.assert_array_equal(indices, order[is_eligible[order]][:k])
    assert indices.dtype == np.int32


@pytest.mark.usefixtures("each_implementation")
class TestDistinct:
    def test_order_of_first_occurrence(self):
        unique, inverse, counts = distinct(np.array([9, -1, 9, 2**62, -1, 9]))
        assert unique.tolist() == [9, -1, 2**62]
        assert inverse.tolist() == [0, 1, 0, 2, 1, 0]
        assert counts.tolist() == [3, 2, 1]

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 16384, 16385, 100_000])
    @pytest.mark.parametrize("num_ids", [1, 1000, 2**63 - 1])
    def test_sizes(self, size, num_ids):
        require_distinct(np.random.default_rng(size).integers(-1, num_ids, size))

    @pytest.mark.usefixtures("unchecked")
    def test_other_types_are_refused(self):
        with pytest.raises(TypeError, match="ids must be a NumPy array of int64, not float64"):
            distinct(np.zeros(3))


@pytest.mark.usefixtures("each_implementation")
class TestSmallest:
    def test_equal_keys_go_by_index(self):
        keys = np.array([4, 1, 4, 1, 2**64 - 1, 1], np.uint64)
        assert smallest(keys, None, 2).tolist() == [1, 3]
        assert smallest(keys, None, 4).tolist() == [1, 3, 5, 0]
        assert smallest(keys, None, 10).tolist() == [1, 3, 5, 0, 2, 4]
        assert smallest(keys, np.array([1, 0, 1, 2, 1, 0], np.uint8), 2).tolist() == [3, 0]
        assert smallest(keys, np.zeros(6, bool), 2).tolist() == []
        assert smallest(keys, None, 0).tolist() == []
        assert smallest(keys[:0], None, 3).tolist() == []

    # Large ones are chosen by a sample of the keys, which misleads for some.
    @pytest.mark.parametrize("k", [1, 1000, 60_000, 290_000])
    @pytest.mark.parametrize(
        "keys",
        [
            np.random.default_rng(0).integers(0, 2**64, 300_000, np.uint64),
            np.random.default_rng(0).integers(0, 50, 300_000, np.uint64),
            np.full(300_000, 2**64 - 1, np.uint64),
            np.zeros(300_000, np.uint64),
            np.arange(300_000, dtype=np.uint64),
            np.arange(300_000, dtype=np.uint64)[::-1].copy(),
            np.where(np.arange(300_000) == 150_001, np.uint64(0), np.uint64(2**63)),
            np.where(np.arange(300_000) < 299_000, 2**40, np.arange(300_000)).astype(np.uint64),
        ],
        ids=[
            "random",
            "ties",
            "most",
            "zeros",
            "rising",
            "falling",
            "one_small",
            "small_at_the_end",
        ],
    )
    def test_distributions(self, keys, k):
        require_smallest(keys, None, k)
        require_smallest(keys, np.random.default_rng(1).random(keys.size) < 0.6, k)
        require_smallest(keys, np.arange(keys.size) % 300 == 7, k)

    @pytest.mark.usefixtures("unchecked")
    def test_bad_arguments_are_refused(self):
        keys = np.zeros(3, np.uint64)
        with pytest.raises(ValueError, match="k must be 0 or more, not -1"):
            smallest(keys, None, -1)
        with pytest.raises(ValueError, match=r"eligible must have the shape \[3\], not \[2\]"):
            smallest(keys, np.zeros(2, bool), 1)
        with pytest.raises(TypeError, match="eligible must be a NumPy array of uint8, not int64"):
            smallest(keys, np.zeros(3, np.int64), 1)
        with pytest.raises(TypeError, match="keys must be a NumPy array of uint64, not int64"):
            smallest(keys.view(np.int64), None, 1)


@settings(max_examples=max_examples(60))
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(0, 6000),
    bits=st.integers(0, 64),
    share=st.sampled_from([0.0, 0.5, 1.0]),
)
@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_random_keys_and_ids(module, seed, size, bits, share):
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 2**bits, size, np.uint64) << np.uint64(rng.integers(0, 65 - bits) % 64)
    eligible = None if share == 1 else rng.random(size) < share
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementation, "current", lambda: module)
        require_smallest(keys, eligible, int(rng.integers(0, size + 2)))
        require_distinct(keys.view(np.int64))


@pytest.mark.usefixtures("each_implementation")
class TestRecordUses:
    def test_counts_saturate(self):
        counts, last_use = np.array([0, 2**32 - 2, 2**32 - 1], np.uint32), np.full(3, 4)
        record_uses(np.array([1, -1, 1, 2, -(2**31), 1], np.int32), 2**40, counts, last_use)
        assert counts.tolist() == [0, 2**32 - 1, 2**32 - 1]
        assert last_use.tolist() == [4, 2**40, 2**40]
        record_uses(np.array([], np.int32), 2**41, counts, last_use)
        assert last_use.tolist() == [4, 2**40, 2**40]

    def test_as_numpy(self):
        rng = np.random.default_rng(0)
        counts, last_use = np.zeros(50, np.uint32), np.zeros(50, np.int64)
        expected, expected_use = counts.copy(), last_use.copy()
        for batch in range(1, 9):
            slots = rng.integers(-3, 50, 30 * batch, np.int32)
            record_uses(slots, batch, counts, last_use)
            np.add.at(expected, slots[slots >= 0], np.uint32(1))
            expected_use[slots[slots >= 0]] = batch
            np.testing.assert_array_equal(counts, expected)
            np.testing.assert_array_equal(last_use, expected_use)

    @pytest.mark.usefixtures("unchecked")
    def test_bad_arguments_change_nothing(self):
        counts, last_use, slots = np.zeros(3, np.uint32), np.zeros(3, int), np.array([0, 1], "i4")
        with pytest.raises(ValueError, match="slot 3 at position 1: there are 3 counts"):
            record_uses(np.array([0, 3], np.int32), 1, counts, last_use)
        with pytest.raises(TypeError, match="counts must be a NumPy array of uint32, not int64"):
            record_uses(slots, 1, counts.astype(np.int64), last_use)
        with pytest.raises(ValueError, match=r"last_use must have the shape \[3\], not \[2\]"):
            record_uses(slots, 1, counts, last_use[:2])
        for fixed in (np.zeros(6, np.uint32)[::2], np.broadcast_to(np.uint32(0), 3)):
            with pytest.raises(ValueError, match="counts must be contiguous and writeable"):
                record_uses(slots, 1, fixed, last_use)
        with pytest.raises(ValueError, match="last_use must be contiguous and writeable"):
            record_uses(slots, 1, counts, np.zeros(6, int)[::2])
        assert counts.tolist() == last_use.tolist() == [0, 0, 0]


def random_search(rng: np.random.Generator) -> Search:
    count = int(rng.choice([0, 1, 30, 200, 40_000]))
    records = Records.empty(count)
    records.born[:] = rng.integers(-1, 3, count)
    records.last_use[:] = rng.integers(0, 6, count)

    def rows() -> np.ndarray:
        return rng.integers(-1, count, rng.integers(0, 50) if count else 0).astype(np.int32)

    return Search(
        records,
        [(rows(), 6 + number) for number in range(rng.integers(0, 3))],
        int(rng.integers(-3, 9)),
        rows(),
        rng.integers(0, 2**64, count, np.uint64) if rng.random() < 0.5 else None,
        int(rng.integers(-5, 60)),
        int(rng.integers(0, 60)),
        np.empty(count, bool) if rng.random() < 0.5 else None,
    )


@settings(max_examples=max_examples(50))
@given(st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_searches(num_tables, seed):
    for module in IMPLEMENTATIONS:
        searches = [random_search(rng) for rng in np.random.default_rng(seed).spawn(num_tables)]
        befores = [copy.deepcopy(each.records) for each in searches]
        done, results = module.search(searches)
        assert done == num_tables
        for each, before, (num_eligible, found) in zip(searches, befores, results, strict=True):
            records, hits = each.records, set(each.hits.tolist())
            for rows, batch in each.uses:
                for row in rows[rows >= 0].tolist():
                    before.count[row] += 1
                    before.last_use[row] = batch
            np.testing.assert_array_equal(records.count, before.count)
            np.testing.assert_array_equal(records.last_use, before.last_use)
            pairs = zip(records.born.tolist(), records.last_use.tolist(), strict=True)
            eligible = [
                row
                for row, (born, last_use) in enumerate(pairs)
                if born >= 0 and last_use < each.bound and row not in hits
            ]
            assert num_eligible == len(eligible)
            if each.eligible is not None:
                assert np.flatnonzero(each.eligible).tolist() == eligible
            keys = (records.last_use if each.keys is None else each.keys).tolist()
            expected = sorted(eligible, key=lambda row: (keys[row], row))[: each.most]
            assert found.dtype == np.int32
            assert found.tolist() == (expected if len(eligible) >= each.least else [])


@pytest.mark.usefixtures("each_implementation")
class TestSearch:
    def test_nothing_to_search(self):
        assert search([]) == []

    def test_rows_beyond_the_table(self):
        whole = random_search(np.random.default_rng(0))._replace(
            records=Records.empty(2), keys=None
        )
        whole = whole._replace(uses=[], hits=np.array([1], np.int32), eligible=None)
        outside = np.array([0, 2], np.int32)
        for bad in (whole._replace(hits=outside), whole._replace(uses=[(outside, 1)])):
            with pytest.raises(ValueError, match="hit of search 1 is of none of the 2 rows"):
                search([whole, bad, whole])

    def test_other_arrays_are_refused(self):
        whole = Search(Records.empty(4), [], 1, np.zeros(1, np.int32), None, 0, 1)
        for bad in (
            whole._replace(hits=np.zeros(1, np.int64)),
            whole._replace(hits=np.zeros(4, np.int32)[::2]),
            whole._replace(uses=[(np.zeros(1, np.int64), 1)]),
            whole._replace(keys=np.zeros(3, np.uint64)),
            whole._replace(eligible=np.zeros(3, bool)),
            whole._replace(records=dataclasses.replace(whole.records, count=np.zeros(4, np.int32))),
            whole._replace(most=-1),
        ):
            with pytest.raises((TypeError, ValueError)):
                search([bad])


def test_fingerprints(each_implementation):
    lists = [[], [5], [2**63 - 1, 2**63 - 1, -7, 3]]
    sums = implementation.current().fingerprint([np.array(each, np.int64) for each in lists])
    for each, (total, mixed) in zip(lists, sums.tolist(), strict=True):
        bits = [number % 2**64 for number in each]
        assert total == sum(bits) % 2**64
        assert mixed == functools.reduce(operator.xor, bits, 0)


def split(rows: np.ndarray) -> list[np.ndarray]:
    """Cut rows into two parts, of which the first may have no columns."""
    return [np.ascontiguousarray(part) for part in np.split(rows, [rows.shape[1] // 3], axis=1)]


@settings(max_examples=max_examples(50))
@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_rows_of_arrays(count, width, seed):
    rng = np.random.default_rng(seed)
    array = rng.integers(0, 256, (count, width), np.uint8)
    places = rng.integers(-1, count, rng.integers(0, 60)).astype(np.int32)
    expected = [[0] * width if place < 0 else array[place].tolist() for place in places.tolist()]
    distinct_places = rng.permutation(count)[: rng.integers(0, count + 1)].astype(np.int32)
    rows = rng.integers(0, 256, (distinct_places.size, width), np.uint8)
    for module in IMPLEMENTATIONS:
        taken, again = module.take_rows([array, array[:0]], [places, places[:0]])
        assert taken.tolist() == expected
        assert again.shape == (0, width)
        changed = array.copy()
        module.put_rows([changed], [distinct_places], [split(rows)])
        after = array.tolist()
        for place, row in zip(distinct_places.tolist(), rows.tolist(), strict=True):
            after[place] = row
        assert changed.tolist() == after


@settings(max_examples=max_examples(50))
@given(st.integers(1, 4), st.integers(1, 300), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_rows_of_several_arrays(num_sources, width, count, seed):
    rng = np.random.default_rng(seed)
    sources = [rng.integers(0, 256, (9, width), np.uint8) for _ in range(num_sources)]
    which = rng.integers(0, num_sources, count).astype(np.int32)
    index = rng.integers(0, 9, count).astype(np.int32)
    places = rng.permutation(50)[:count].astype(np.int32)
    expected = np.zeros((50, width), np.uint8)
    for i in range(count):
        expected[places[i]] = sources[which[i]][index[i]]
    for module in IMPLEMENTATIONS:
        rows = np.zeros((50, width), np.uint8)
        parts = [split(each) for each in sources]
        module.copy_rows(parts, which, index, places, rows)
        np.testing.assert_array_equal(rows, expected)


# The first outputs of Java's SplittableRandom, and of Vigna's splitmix64.c, with seed 1234567.
PUBLISHED = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)


def test_published_numbers():
    """Output ``i`` mixes the state, which each output advances by one increment."""
    outputs = [int(mix(np.array([1234567]), seed)[0]) for seed in range(5)]
    assert outputs == list(PUBLISHED)


@settings(max_examples=max_examples(100))
@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(0, 2**40))
def test_agrees_with_python(numbers, seed):
    bits = mix(np.array(numbers, np.int64), seed)
    assert bits.dtype == np.uint64
    assert bits.tolist() == [mix_one(number, seed) for number in numbers]


@pytest.mark.parametrize("seed", [0, 101, 1 << 20])
def test_bits_of_neighbours_are_even(seed):
    bits = mix(np.arange(4096), seed)
    ones = np.unpackbits(bits.view(np.uint8).reshape(-1, 8), axis=1).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 0.05
    assert np.bincount((bits % np.uint64(8)).astype(int)).min() > 430
