"""Rows in memory over another store: hits, bounds, errors, and reads beside writes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from jaxrec.tier.stores.cached_store import CachedStore, parse_bytes
from jaxrec.tier.stores.memory_store import MemoryStore
from jaxrec.tier.stores.record_format import RecordFormat

WIDTH = 16
FORMAT = RecordFormat(WIDTH, "rows uint8[16]")
PLACE = WIDTH + 48  # bytes of a record in memory


class CountingStore(MemoryStore):
    """Counts the ids that are read; `hold` stops reads after they were read."""

    def __init__(self):
        super().__init__()
        self.reads, self.error = 0, None
        self.reading, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def get(self, ids):
        self.reads += ids.size
        result = super().get(ids)
        self.reading.set()
        assert self.go_on.wait(10)
        return result

    def put(self, ids, records):
        super().put(ids[:3] if self.error else ids, records[:3] if self.error else records)
        if self.error:
            raise self.error


def opened(room):
    store = CachedStore(CountingStore(), room * PLACE)
    store.open(FORMAT)
    return store


def records_of(ids, version=0):
    return np.repeat((ids * 7 + version).astype(np.uint8)[:, None], WIDTH, 1)


def require(store, ids, version=0):
    found, records = store.get(ids)
    assert found.all()
    np.testing.assert_array_equal(records, records_of(ids, version))


def test_what_was_used_is_not_read_again():
    store, ids = opened(100), np.arange(50)
    store.put(ids, records_of(ids))
    require(store, ids)
    assert store.store.reads == 0
    store.store.put(ids + 50, records_of(ids + 50))
    for _ in range(3):
        require(store, ids + 50)
    assert store.store.reads == 50
    assert not store.get(np.array([500, 3]))[0][0]
    assert store.store.reads == 51


def test_the_least_recently_used_go():
    store, ids = opened(64), np.arange(64)
    store.put(ids, records_of(ids))
    require(store, ids[:32])
    store.put(ids[:2] + 100, records_of(ids[:2] + 100))
    require(store, ids[:32])
    assert store.store.reads == 0
    require(store, ids[32:])
    assert store.store.reads == 2


@pytest.mark.parametrize("room", [0, 1, 7, 50])
def test_memory_is_bounded(room):
    store, rng, expected = opened(room), np.random.default_rng(0), {}
    for version in range(40):
        ids = rng.permutation(200)[: rng.integers(0, 60)]
        store.put(ids, records_of(ids, version))
        expected.update(dict.fromkeys(ids.tolist(), version))
        store.delete(gone := rng.permutation(200)[:5])
        for i in gone.tolist():
            expected.pop(i, None)
        asked = rng.integers(0, 200, 30)  # with repeats
        found, records = store.get(asked)
        assert found.tolist() == [i in expected for i in asked.tolist()]
        for i, record in zip(asked[found].tolist(), records[found], strict=True):
            np.testing.assert_array_equal(record, records_of(np.array([i]), expected[i])[0])
        assert len(store._map) <= room == len(store._records)
        assert len(store._map) + store._num_free == room


def test_a_range_needs_no_more_than_its_ids():
    store = CachedStore(CountingStore())
    store.open(RecordFormat(WIDTH, "rows", num_ids=10))
    assert len(store._records) == 10


@pytest.mark.parametrize("change", ["put", "delete", "clear"])
def test_a_change_during_a_read_is_not_undone(change):
    """A read that began before a change and ends after it keeps nothing old in memory."""
    store, ids = opened(100), np.arange(10)
    store.store.put(ids, records_of(ids))
    backing = store.store
    backing.go_on.clear()
    reader = threading.Thread(target=store.get, args=(ids,))
    reader.start()
    assert backing.reading.wait(10)
    if change == "put":
        store.put(ids[:5], records_of(ids[:5], 1))
    elif change == "delete":
        store.delete(ids[:5])
    else:
        store.clear()
    backing.go_on.set()
    reader.join()
    if change == "put":
        require(store, ids[:5], 1)
        require(store, ids[5:])
    else:
        assert store.get(ids)[0].tolist() == [change == "delete" and i >= 5 for i in range(10)]


def test_a_write_that_fails():
    """Memory has what the store below has."""
    store, ids = opened(100), np.arange(10)
    store.put(ids, records_of(ids))
    store.store.error = OSError("full")
    with pytest.raises(OSError, match="full"):
        store.put(ids, records_of(ids, 1))
    require(store, ids[:3], 1)
    require(store, ids[3:])


def test_sizes():
    assert parse_bytes("0") == 0
    assert parse_bytes("1.5kb") == 1500
    assert parse_bytes("3 TB") == 3 * 10**12
    for text in ("", "GB", "-1GB", "1 PB", "1e9"):
        with pytest.raises(ValueError, match="a size of memory is a number and KB, MB, GB or TB"):
            parse_bytes(text)
    with pytest.raises(ValueError, match="memory must be 0 bytes or more, got -1"):
        CachedStore(MemoryStore(), -1)
