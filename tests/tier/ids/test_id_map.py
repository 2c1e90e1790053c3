"""Id maps in C++ and in NumPy, compared with a dictionary."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.tier.ids import implementation, library, reference
from jaxrec.tier.ids.id_map import IdMap, Lookup, MapChange, commit, lookup_all
from jaxrec.tier.vocabulary.eviction import Records
from tests.fuzz import max_examples

IMPLEMENTATIONS = [reference]
if library.missing() is None:
    IMPLEMENTATIONS.append(library)


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda module: module.__name__.rpartition(".")[2])
def each_implementation(request, monkeypatch):
    monkeypatch.setattr(implementation, "current", lambda: request.param)


def int64(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


def int32(*slots: int) -> np.ndarray:
    return np.array(slots, np.int32)


def require_equal(ids: IdMap, expected: dict[int, int]) -> None:
    found, slots = ids.items()
    assert found.tolist() == sorted(expected)
    assert slots.tolist() == [expected[each] for each in sorted(expected)]
    assert len(ids) == len(expected)
    np.testing.assert_array_equal(ids.find(found), slots)


def unmix(hashed: np.ndarray) -> np.ndarray:
    """Return the ids whose MurmurHash3 finalizers are given."""
    mask = 2**64 - 1
    back = []
    for each in hashed.tolist():
        each ^= each >> 33
        each = each * pow(0xC4CEB9FE1A85EC53, -1, 2**64) & mask
        each ^= each >> 33
        each = each * pow(0xFF51AFD7ED558CCD, -1, 2**64) & mask
        back.append(each ^ each >> 33)
    return np.array(back, np.uint64).view(np.int64)


@pytest.mark.usefixtures("each_implementation")
class TestIdMap:
    def test_finds_what_was_inserted(self):
        ids = IdMap(4, threads=1)
        ids.insert(int64(5, -(2**63), 2**63 - 1), int32(7, 0, 2**31 - 1))
        np.testing.assert_array_equal(ids.find(int64(5, 6, -(2**63), 5)), int32(7, -1, 0, 7))
        assert ids.find(int64(-1)).tolist() == [-1]
        assert ids.find(int64()).dtype == np.int32
        require_equal(ids, {5: 7, -(2**63): 0, 2**63 - 1: 2**31 - 1})
        assert ids.remove(int64(2**63 - 1, 5)).tolist() == [2**31 - 1, 7]
        require_equal(ids, {-(2**63): 0})
        assert repr(ids) == "IdMap(capacity=4, threads=1), 1 ids"

    # A range of 16 times the capacity indexes an array, a larger one is hashed.
    @pytest.mark.parametrize("ids_per_entry", [None, 16, 17])
    @pytest.mark.parametrize("capacity", [0, 1, 2, 3, 4, 5, 7, 100, 5000])
    def test_is_filled_emptied_and_filled_again(self, capacity, ids_per_entry):
        num_ids = None if ids_per_entry is None else max(1, ids_per_entry * capacity)
        ids = IdMap(capacity, num_ids=num_ids)
        slots = np.arange(capacity, dtype=np.int32)
        for first in range(3):
            numbers = np.arange(first, capacity + first)
            ids.insert(numbers, slots)
            with pytest.raises(ValueError, match="no room for 1 ids: the map has"):
                ids.insert(int64(10**9), int32(0))
            require_equal(ids, dict(zip(numbers.tolist(), slots.tolist(), strict=True)))
            np.testing.assert_array_equal(ids.remove(numbers[::-1]), slots[::-1])
            require_equal(ids, {})
            assert ids.find(numbers).tolist() == [-1] * capacity

    @pytest.mark.parametrize(
        ("given_ids", "slots", "message"),
        [
            ([3, 1], [0, 0], "id 1 at position 1 is in the map already"),
            ([3, 4, 3], [0, 0, 0], "id 3 at position 2 occurs twice"),
            ([3, -1], [0, 0], "id -1 at position 1: maps cannot hold it"),
            ([3, 4], [0, -1], "slot -1 at position 1: it must be 0 or more"),
            ([3, 4, 5, 6, 7, 8, 9], [0] * 7, "no room for 7 ids: the map has 2 of 8"),
            ([3, 4], [0], "slots must have the shape \\[2\\], not \\[1\\]"),
        ],
    )
    @pytest.mark.parametrize("num_ids", [None, 10])
    @pytest.mark.usefixtures("unchecked")
    def test_refused_insertions_change_nothing(self, given_ids, slots, message, num_ids):
        if num_ids is not None:
            message = message.replace("maps cannot hold it", "the map holds ids from 0 to 9")
        ids = IdMap(8, num_ids=num_ids)
        ids.insert(int64(1, 2), int32(10, 20))
        with pytest.raises(ValueError, match=message):
            ids.insert(int64(*given_ids), int32(*slots))
        require_equal(ids, {1: 10, 2: 20})

    @pytest.mark.parametrize(
        ("given_ids", "message"),
        [
            ([1, 3], "id 3 at position 1 is not in the map"),
            ([1, 2, 1], "id 1 at position 2 occurs twice"),
            ([1, -1], "id -1 at position 1 is not in the map"),
        ],
    )
    @pytest.mark.parametrize("num_ids", [None, 10])
    def test_refused_removals_change_nothing(self, given_ids, message, num_ids):
        ids = IdMap(8, num_ids=num_ids)
        ids.insert(int64(1, 2), int32(10, 20))
        with pytest.raises(KeyError, match=message):
            ids.remove(int64(*given_ids))
        require_equal(ids, {1: 10, 2: 20})

    @pytest.mark.parametrize("num_ids", [10, 10_000])
    def test_ids_beyond_a_range_are_absent_and_refused(self, num_ids):
        ids = IdMap(8, num_ids=num_ids)
        last = num_ids - 1
        ids.insert(int64(0, last), int32(2**31 - 1, 4))
        beyond = [-(2**63), -1, num_ids, 2**63 - 1]
        assert ids.find(int64(*beyond, last, 0)).tolist() == [-1] * 4 + [4, 2**31 - 1]
        for each in beyond:
            message = f"id {each} at position 1: the map holds ids from 0 to {last:,}"
            with pytest.raises(ValueError, match=message):
                ids.insert(int64(1, each), int32(0, 0))
            with pytest.raises(KeyError, match=f"id {each} at position 1 is not in the map"):
                ids.remove(int64(0, each))
        require_equal(ids, {0: 2**31 - 1, last: 4})

    @pytest.mark.usefixtures("unchecked")
    def test_arrays_of_other_types_and_shapes_are_refused(self):
        ids = IdMap(8)
        with pytest.raises(TypeError, match="ids must be a NumPy array of int64, not int32"):
            ids.find(int32(1))
        with pytest.raises(TypeError, match="ids must be a NumPy array of int64, not list"):
            ids.remove([1])
        with pytest.raises(TypeError, match="slots must be a NumPy array of int32, not int64"):
            ids.insert(int64(1), int64(1))
        with pytest.raises(ValueError, match=r"ids must have the shape \[n\], not \[1, 2\]"):
            ids.find(int64(1, 2)[None])

    def test_views_are_read_as_they_are(self):
        ids = IdMap(8)
        ids.insert(np.arange(8)[::2], np.arange(8, dtype=np.int32)[1::2])
        unaligned = np.frombuffer(b"x" + np.arange(8).tobytes(), np.int64, offset=1)
        for view in (np.arange(8), np.repeat(np.arange(8), 3)[::3], unaligned):
            assert ids.find(view).tolist() == [1, -1, 3, -1, 5, -1, 7, -1]

    def test_capacity_and_threads_are_checked(self):
        with pytest.raises(ValueError, match="capacity must be from 0 to 2,147,483,647, not -1"):
            IdMap(-1)
        with pytest.raises(ValueError, match="capacity must be from 0 to 2,147,483,647"):
            IdMap(2**31)
        with pytest.raises(ValueError, match="threads must be 1 or more, not 0"):
            IdMap(1, threads=0)
        with pytest.raises(ValueError, match="num_ids must be 1 or more, not 0"):
            IdMap(1, num_ids=0)

    def test_large_batches_are_found_by_several_threads(self):
        count = 100_001
        ids = IdMap(count, threads=3)
        numbers = np.random.default_rng(0).permutation(10 * count)[: 2 * count]
        slots = np.arange(count, dtype=np.int32)
        ids.insert(numbers[:count], slots)
        expected = np.concatenate([slots, np.full(count, -1, np.int32)])
        np.testing.assert_array_equal(ids.find(numbers), expected)

    def test_several_maps_are_looked_up_at_once(self):
        first, empty, last = IdMap(9, threads=1), IdMap(0, threads=3), IdMap(9)
        first.insert(int64(5, 6), int32(50, 60))
        last.insert(int64(7), int32(70))
        lookups = lookup_all(
            [first, empty, last], [int64(6, 9, -1, 5, 9, 7), int64(), int64(7, 2, 7)]
        )
        expected = [
            Lookup(
                slots=int32(60, -1, -1, 50, -1, -1),
                misses=int32(1, 2, 4, 5),
                absent=int64(9, -1, 7),
                inverse=int32(0, 1, 0, 2),
                counts=int32(2, 1, 1),
            ),
            Lookup(int32(), int32(), int64(), int32(), int32()),
            Lookup(int32(70, -1, 70), int32(1), int64(2), int32(0), int32(1)),
        ]
        for lookup, wanted in zip(lookups, expected, strict=True):
            for name in Lookup._fields:
                found, array = getattr(lookup, name), getattr(wanted, name)
                np.testing.assert_array_equal(found, array, err_msg=name)
                assert found.dtype == array.dtype
        assert lookup_all([], []) == []

    @pytest.mark.usefixtures("unchecked")
    def test_ids_of_another_type_are_not_looked_up(self):
        with pytest.raises(TypeError, match="ids must be a NumPy array of int64, not int32"):
            lookup_all([IdMap(1)], [int32(1)])

    def test_large_batches_of_several_maps(self):
        rng = np.random.default_rng(0)
        maps, ids = [IdMap(30_000, threads=2) for _ in range(3)], []
        for number, each in enumerate(maps):
            each.insert(np.arange(30_000) * 7, rng.permutation(30_000).astype(np.int32))
            ids.append(rng.integers(0, 300_000 - 90_000 * number, 50_000))
        for each, of_map, lookup in zip(maps, ids, lookup_all(maps, ids), strict=True):
            slots, misses, absent, inverse, counts = lookup
            np.testing.assert_array_equal(slots, each.find(of_map))
            np.testing.assert_array_equal(misses, np.flatnonzero(slots < 0))
            np.testing.assert_array_equal(absent[inverse], of_map[misses])
            np.testing.assert_array_equal(counts, np.bincount(inverse, minlength=absent.size))
            assert np.unique(absent).size == absent.size

    # Patterns of ids that weak hashes send to few places.
    @pytest.mark.parametrize(
        "pattern",
        [
            np.arange(20_000),
            -2 - np.arange(20_000),
            np.arange(20_000) << 32,
            np.arange(20_000) << 44,
            np.arange(20_000) * 0x61C8864680B583EB,
            unmix(np.arange(20_000, dtype=np.uint64)),
        ],
        ids=["sequential", "negative", "high", "highest", "golden", "hashes_in_one_bucket"],
    )
    def test_patterns_of_ids(self, pattern):
        numbers = pattern.astype(np.int64)
        ids = IdMap(numbers.size)
        slots = np.arange(numbers.size, dtype=np.int32)
        ids.insert(numbers, slots)
        np.testing.assert_array_equal(ids.find(numbers), slots)
        np.testing.assert_array_equal(ids.remove(numbers[::2]), slots[::2])
        np.testing.assert_array_equal(ids.find(numbers), np.where(slots % 2, slots, -1))

    def test_threads_may_change_a_map_at_once(self):
        ids = IdMap(4000, threads=2)
        ids.insert(np.arange(1000), np.arange(1000, dtype=np.int32))
        failures = []

        def change(first: int) -> None:
            numbers = np.arange(first, first + 1000)
            for _ in range(20):
                ids.insert(numbers, np.arange(1000, dtype=np.int32))
                if (ids.find(np.arange(1000)) != np.arange(1000)).any():
                    failures.append(first)
                if (ids.remove(numbers) != np.arange(1000)).any():
                    failures.append(first)

        threads = [threading.Thread(target=change, args=(1000 * i,)) for i in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        require_equal(ids, {i: i for i in range(1000)})


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@settings(max_examples=max_examples(60))
@given(
    seed=st.integers(0, 2**32),
    capacity=st.one_of(st.integers(0, 12), st.integers(0, 400)),
    spread=st.sampled_from([1, 2, 10, 40]),
    num_batches=st.integers(1, 60),
    is_range=st.booleans(),
)
def test_random_programs(module, seed, capacity, spread, num_batches, is_range):
    """Insertions and removals of random ids, some of which must be refused, as a dictionary's."""
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementation, "current", lambda: module)
        universe = max(1, spread * capacity)
        ids = IdMap(capacity, threads=2, num_ids=universe if is_range else None)
    expected: dict[int, int] = {}
    multiplier = 1 if is_range else int(rng.choice([1, 2**32, 2**52]))
    for _ in range(num_batches):
        batch = multiplier * rng.integers(0, universe, rng.integers(0, capacity + 2))
        if rng.random() < 0.8:
            batch = rng.permutation(np.unique(batch))
        slots = rng.integers(0, 2**31, batch.size, np.int32)
        found = ids.find(batch)
        np.testing.assert_array_equal(found, [expected.get(i, -1) for i in batch.tolist()])
        is_distinct = np.unique(batch).size == batch.size
        if rng.random() < 0.5:
            if rng.random() < 0.8:
                batch, slots = batch[found < 0], slots[found < 0]
                is_distinct = np.unique(batch).size == batch.size
            taken = any(i in expected for i in batch.tolist())
            if taken or not is_distinct or len(expected) + batch.size > capacity:
                with pytest.raises(ValueError, match=r"no room|occurs twice|in the map already"):
                    ids.insert(batch, slots)
            else:
                ids.insert(batch, slots)
                expected.update(zip(batch.tolist(), slots.tolist(), strict=True))
        else:
            if rng.random() < 0.8:
                batch = batch[found >= 0]
                is_distinct = np.unique(batch).size == batch.size
            if not is_distinct or any(i not in expected for i in batch.tolist()):
                with pytest.raises(KeyError, match=r"occurs twice|not in the map"):
                    ids.remove(batch)
            else:
                assert ids.remove(batch).tolist() == [expected.pop(i) for i in batch.tolist()]
    require_equal(ids, expected)


@pytest.mark.skipif(library.missing() is not None, reason="there is no native library")
def test_no_memory(monkeypatch):
    monkeypatch.setattr(library._library(), "jaxrec_id_map_new", lambda *arguments: None)
    with pytest.raises(MemoryError, match="no memory for a map of 5 ids"):
        IdMap(5)


def test_numpy_serves_without_the_library_and_says_so(monkeypatch):
    monkeypatch.setattr(library, "missing", lambda: "it is not there")
    implementation._warn.cache_clear()
    with pytest.warns(RuntimeWarning, match="id maps run in NumPy.*: it is not there"):
        ids = IdMap(5)
    assert isinstance(ids._map, reference.Map)
    IdMap(5)  # says it once


@pytest.mark.skipif(library.missing() is not None, reason="there is no native library")
def test_a_library_of_other_sources_is_refused(monkeypatch):
    monkeypatch.setattr(library, "_INTERFACE", -1)
    assert "built from another version of jaxrec" in library._load.__wrapped__()


PROGRAM = """
import threading, time
import numpy as np
from jaxrec.tier.ids.id_map import IdMap

ids = IdMap(100_000)
raw, slots = np.arange(100_000), np.arange(100_000, dtype=np.int32)

def work():
    while True:
        ids.insert(raw, slots)
        ids.remove(raw)

threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
print("end")
"""


def test_a_program_ends_while_a_thread_uses_a_map():
    command = [sys.executable, "-P", "-c", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


@pytest.mark.usefixtures("each_implementation")
def test_a_batch_of_ids_comes_and_goes_as_one():
    batch, slots = np.arange(20_000), np.arange(20_000, dtype=np.int32)
    ids, is_over = IdMap(20_000, threads=1), threading.Event()

    def come_and_go():
        while not is_over.is_set():
            ids.insert(batch, slots)
            ids.remove(batch)

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(100):
            found = ids.find(batch) >= 0
            assert found.all() or not found.any()
    finally:
        is_over.set()
        thread.join()


_NONE = np.zeros(0, np.int32)


class Table:
    """A map with its records, and the same as a dict from slots to ids and births."""

    def __init__(self, room: int) -> None:
        self.map = IdMap(room)
        self.records = Records.empty(room)
        self.records.count[:] = 9
        self.expected: dict[int, tuple[int, int]] = {}

    def change(self, rng: np.random.Generator, batch: int) -> tuple[MapChange, list, list]:
        """Draw a change; return it, the evicted ids and the slots that the batch should have."""
        room = self.records.born.size
        ids = rng.integers(-room, 2 * room, rng.integers(0, room + 2))
        ids[ids == -1] = 7
        (lookup,) = lookup_all([self.map], [ids])
        hits = set(lookup.slots[lookup.slots >= 0].tolist())
        spare = [slot for slot in self.expected if slot not in hits]
        victims = rng.permutation(np.array(spare, np.int32))[: rng.integers(0, len(spare) + 1)]
        free = [slot for slot in range(room) if slot not in self.expected or slot in victims]
        admitted = rng.random(lookup.absent.size) < 0.7
        admitted &= np.cumsum(admitted) <= len(free)
        new_ids = lookup.absent[admitted]
        new_slots = rng.permutation(np.array(free, np.int32))[: new_ids.size]
        absent_slots = np.full(admitted.size, -1, np.int32)
        absent_slots[admitted] = new_slots
        evicted = [self.expected.pop(slot)[0] for slot in victims.tolist()]
        for slot, new_id in zip(new_slots.tolist(), new_ids.tolist(), strict=True):
            self.expected[slot] = new_id, batch
        slot_of = {of_slot: slot for slot, (of_slot, _) in self.expected.items()}
        change = MapChange(
            self.map,
            self.records,
            victims,
            new_ids,
            new_slots,
            lookup.slots,
            lookup.misses,
            lookup.inverse,
            absent_slots,
        )
        return change, evicted, [slot_of.get(each, -1) for each in ids.tolist()]

    def require_expected(self) -> None:
        slots = np.array(sorted(self.expected), np.int64)
        ids = np.array([self.expected[slot][0] for slot in slots.tolist()], np.int64)
        births = [self.expected[slot][1] for slot in slots.tolist()]
        np.testing.assert_array_equal(self.records.ids[slots], ids)
        assert self.records.born[slots].tolist() == births
        assert np.flatnonzero(self.records.born >= 0).tolist() == slots.tolist()
        assert not self.records.count[slots].any()
        assert (self.records.power[slots] == 5).all()
        assert len(self.map) == ids.size
        np.testing.assert_array_equal(self.map.find(ids), slots)


@pytest.mark.parametrize("seed", range(max_examples(20)))
def test_random_batches_of_several_tables(seed, each_implementation):
    rng = np.random.default_rng(seed)
    tables = [Table(int(room)) for room in rng.integers(1, 300, 4)]
    for batch in range(12):
        changes, evicted, slots = zip(*(t.change(rng, batch) for t in tables), strict=True)
        of_maps = commit(changes, batch, power=5)
        assert [each.tolist() for each in of_maps] == list(evicted)
        assert [each.slots.tolist() for each in changes] == list(slots)
        for table in tables:
            table.require_expected()


def test_no_tables(each_implementation):
    assert commit([], 1, 0) == []


@pytest.mark.parametrize(
    ("new_ids", "message"),
    [([-1], "id -1 at position 0"), ([5], "in the map already"), ([8, 9], "no room for 2 ids")],
)
def test_a_refused_id(new_ids, message, each_implementation):
    """The error is that of the map; the table after it is as before."""
    table, after = Table(2), Table(2)
    ids, slots = np.array(new_ids), np.arange(len(new_ids), dtype=np.int32)
    first = MapChange(
        table.map, table.records, _NONE, np.array([5]), slots[:1], _NONE, _NONE, _NONE, _NONE
    )
    commit([first], 1, 0)
    changes = [
        MapChange(each.map, each.records, _NONE, ids, slots, _NONE, _NONE, _NONE, _NONE)
        for each in (table, after)
    ]
    with pytest.raises(ValueError, match=message):
        commit(changes, 2, 0)
    assert len(after.map) == 0
    assert (after.records.born == -1).all()
    assert table.map.find(np.array([5])).tolist() == [0]


def test_records_that_disagree_with_the_map(each_implementation):
    table, zero = Table(2), np.zeros(1, np.int32)
    change = MapChange(
        table.map, table.records, zero, np.zeros(0, np.int64), _NONE, _NONE, _NONE, _NONE, _NONE
    )
    with pytest.raises(AssertionError, match="a map lacks an id that its records have"):
        commit([change], 1, 0)
