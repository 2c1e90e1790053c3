"""The store in memory, and records that grow there."""

from __future__ import annotations

import concurrent.futures
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.tier.stores import memory_store
from jaxrec.tier.stores.memory_store import GrowingRecords, MemoryStore
from jaxrec.tier.stores.record_format import RecordFormat
from tests.fuzz import max_examples

WIDTH = 3
IDS = st.lists(
    st.one_of(st.integers(0, 12), st.sampled_from([-(2**63), 2**63 - 1, -2])),
    unique=True,
    max_size=8,
)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "delete", "get"]), IDS), max_size=30)


def opened(width: int = WIDTH) -> MemoryStore:
    store = MemoryStore()
    store.open(RecordFormat(width, "rows"))
    return store


def records_of(ids: list[int], number: int) -> np.ndarray:
    """A record of each id, another one for each number."""
    return np.array([[i % 251, number % 256, 7] for i in ids], np.uint8).reshape(-1, WIDTH)


def contents(store: MemoryStore, size: int = 1 << 16) -> dict[int, list[int]]:
    return {
        i: record
        for ids, records in store.scan(size)
        for i, record in zip(ids.tolist(), records.tolist(), strict=True)
    }


@settings(max_examples=max_examples(60))
@given(STEPS)
def test_agrees_with_a_dict(steps):
    store, expected = opened(), {}
    for number, (step, ids) in enumerate(steps):
        array = np.array(ids, np.int64)
        if step == "put":
            records = records_of(ids, number)
            store.put(array, records)
            expected |= dict(zip(ids, records.tolist(), strict=True))
        elif step == "delete":
            store.delete(array)
            expected = {i: record for i, record in expected.items() if i not in ids}
        else:
            found, records = store.get(array)
            assert found.tolist() == [i in expected for i in ids]
            assert records.tolist() == [expected.get(i, [0] * WIDTH) for i in ids]
            assert records.dtype == np.uint8
        assert len(store) == len(expected)
    assert contents(store) == expected


@pytest.mark.parametrize(
    "shapes", [[(1, 3)], [(2, 2)], [(2, 1), (1, 2)]], ids=["rows", "width", "rows of a part"]
)
def test_parts_that_are_no_records(shapes):
    store = opened()
    parts = [np.zeros(shape, np.uint8) for shape in shapes]
    with pytest.raises(ValueError, match=r"^2 records of .* got shape"):
        MemoryStore.put_all([store], [np.array([1, 2])], [parts])
    assert len(store) == 0


def test_several_stores_at_once():
    stores = [opened(), opened()]
    for number, store in enumerate(stores):
        store.put(np.array([1, 2]), records_of([1, 2], number))
    read = MemoryStore.get_all(stores, [np.array([2, 5]), np.array([], np.int64)])
    assert [found.tolist() for found, _ in read] == [[True, False], []]
    assert [records.tolist() for _, records in read] == [[[2, 0, 7], [0, 0, 0]], []]


def test_a_derived_class_reads_in_its_way():
    class Refusing(MemoryStore):
        def get(self, ids):
            raise OSError("refused")

    store = Refusing()
    store.open(RecordFormat(WIDTH, "rows"))
    with pytest.raises(OSError, match="refused"):
        Refusing.get_all([store], [np.array([1])])


def test_stores_grow_while_others_read_them():
    stores = [opened(), opened()]
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        is_done = False

        def read() -> int:
            count = 0
            while not is_done:
                MemoryStore.get_all(stores, [np.arange(500), np.arange(500)])
                count += 1
            return count

        reads = thread.submit(read)
        try:
            for first in range(0, 200_000, 500):
                ids = np.arange(first, first + 500)
                for store in stores:
                    store.put(ids, np.zeros((500, WIDTH), np.uint8))
        finally:
            is_done = True
        assert reads.result() > 0


def test_it_grows():
    store = opened()
    for first in range(0, 10_000, 2500):
        ids = np.arange(first, first + 2500)
        store.put(ids, records_of(ids.tolist(), first))
    assert len(store) == 10_000
    found, records = store.get(np.arange(10_000))
    assert found.all()
    for first in range(0, 10_000, 2500):
        ids = list(range(first, first + 2500))
        np.testing.assert_array_equal(records[ids], records_of(ids, first))


def test_room_of_deleted_records_is_used_again():
    store = opened()
    for first in range(0, 50_000, 1000):
        ids = np.arange(first, first + 1000)
        store.put(ids, records_of(ids.tolist(), 1))
        store.delete(ids)
    assert len(store) == 0
    assert store._records.room == 1024


@pytest.mark.parametrize("size", [1, 3, 10, 11], ids="size_{}".format)
def test_scan_in_parts(size):
    store = opened()
    ids = list(range(10))
    store.put(np.array(ids), records_of(ids, 3))
    sizes = [len(part) for part, _ in store.scan(size)]
    assert sizes == [size] * (10 // size) + [10 % size] * (10 % size > 0)
    assert contents(store, size) == dict(zip(ids, records_of(ids, 3).tolist(), strict=True))


def test_an_empty_store():
    assert len(MemoryStore()) == 0
    store = opened()
    assert list(store.scan()) == []
    found, records = store.get(np.zeros(0, np.int64))
    assert found.shape == (0,)
    assert records.shape == (0, WIDTH)


def test_records_are_copies():
    store = opened()
    records = records_of([1], 5)
    store.put(np.array([1]), records)
    records[:] = 0
    _, read = store.get(np.array([1]))
    read[:] = 9
    assert contents(store) == {1: [1, 5, 7]}


def test_misuse():
    store = MemoryStore()
    with pytest.raises(ValueError, match="the store is not open"):
        store.get(np.array([1]))
    store.open(RecordFormat(4, "rows"))
    with pytest.raises(ValueError, match="a memory store serves one vocabulary; give each its own"):
        store.open(RecordFormat(4, "rows"))


def test_threads():
    """Records are never torn, lost or another id's, while the store grows and others delete."""
    store = opened(64)

    def work(thread: int) -> int:
        rng = np.random.default_rng(thread)
        bad = 0
        for _ in range(40):
            ids = np.unique(rng.integers(0, 2000, 100)) * 4 + thread
            store.put(ids, np.repeat(ids.astype(np.uint8)[:, None], 64, 1))
            found, records = store.get(ids)
            bad += int((~found).sum() + (records != ids.astype(np.uint8)[:, None]).any(1).sum())
            for scanned, of_scanned in store.scan(500):
                bad += int((of_scanned != scanned.astype(np.uint8)[:, None]).any(1).sum())
            store.delete(ids[::2])
        return bad

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0] * 4


class FixedMap(mmap.mmap):
    """Memory of a platform that cannot grow it."""

    def resize(self, newsize):
        raise SystemError("mmap: resizing not available--no mremap()")


@pytest.fixture(params=[mmap.mmap, FixedMap], ids=["in_place", "copied"])
def _each_platform(request, monkeypatch):
    monkeypatch.setattr(memory_store.mmap, "mmap", request.param)


@pytest.mark.usefixtures("_each_platform")
@pytest.mark.parametrize("width", [1, 3, 260])
def test_records_stay_as_they_grow(width):
    records = GrowingRecords(0, width)
    expected = np.zeros((0, width), np.uint8)
    for room in (1, 5, 10_000):
        grown = np.zeros((room, width), np.uint8)
        grown[: len(expected)] = expected
        records.grow(room)
        np.testing.assert_array_equal(records.array, grown)
        expected = np.random.default_rng(room).integers(0, 256, (room, width), np.uint8)
        records.array[:] = expected
