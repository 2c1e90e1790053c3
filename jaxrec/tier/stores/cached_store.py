"""Rows in memory over another store."""

from __future__ import annotations

import contextlib
import pathlib
import re
import threading
from collections.abc import Iterator

import numpy as np

from jaxrec.tier.ids.batch_ops import smallest
from jaxrec.tier.ids.id_map import IdMap
from jaxrec.tier.stores.record_format import RecordFormat
from jaxrec.tier.stores.row_store import RowStore

DEFAULT_BYTES = 1_000_000_000

# Bytes that a record takes besides its own: map entry, id and last use.
_OVERHEAD = 48
_EVICTED_SHARE = 1 / 32
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class CachedStore(RowStore):
    """Records in a bounded memory over a store: ``"memory+rocksdb:///path?memory=2GB"``.

    The memory of ``memory`` bytes keeps the records that were read or put most recently. `put`
    returns when the store below has the records, so that a crash loses only what that store loses.
    """

    def __init__(self, store: RowStore, memory: int = DEFAULT_BYTES) -> None:
        if memory < 0:
            raise ValueError(f"memory must be 0 bytes or more, got {memory}")
        self.store, self.memory = store, memory
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._reads = 0  # that are under way in the store below
        self._generation = 0  # number of times that the memory was emptied
        self._changed: list[np.ndarray] = []  # ids that were put or deleted meanwhile

    def __repr__(self) -> str:
        return f"CachedStore({self.store!r}, memory={self.memory})"

    def open(self, format: RecordFormat) -> None:
        self.store.open(format)
        self.format = format
        self._empty()

    def get(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            slots = self._map.find(ids)
            found = slots >= 0
            records = np.zeros((ids.size, self.format.width), np.uint8)
            records[found] = self._records[slots[found]]
            self._use(slots[found])
            self._reads += not found.all()
            # The lock is not held during the slow read below. `_changed` and the generation tell
            # what happened meanwhile.
            generation = self._generation
        if found.all():
            return found, records
        missing = np.flatnonzero(~found)
        stored: np.ndarray | None = None
        try:
            is_stored, stored = self.store.get(ids[missing])
        finally:
            with self._lock:
                self._reads -= 1
                if stored is not None and generation == self._generation:
                    self._keep_read(ids[missing][is_stored], stored[is_stored])
                if not self._reads:
                    self._changed.clear()
        found[missing], records[missing] = is_stored, stored
        return found, records

    # Written through: a thread of its own writes rows and may wait. Training waits only for reads,
    # which are what memory makes faster.
    def put(self, ids: np.ndarray, records: np.ndarray) -> None:
        with self._writing, self._changing(ids):
            self.store.put(ids, records)
            with self._lock:
                self._keep(ids, records)

    def delete(self, ids: np.ndarray) -> None:
        with self._writing, self._changing(ids):
            self.store.delete(ids)
            with self._lock:
                self._forget(ids)

    def scan(self, size: int = 1 << 16) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return self.store.scan(size)

    def __len__(self) -> int:
        return len(self.store)

    def clear(self) -> None:
        with self._writing:
            self.store.clear()
            self._empty()

    def snapshot(self, directory: pathlib.Path) -> None:
        self.store.snapshot(directory)

    def load_snapshot(self, directory: pathlib.Path) -> None:
        with self._writing:
            try:
                self.store.load_snapshot(directory)
            finally:
                self._empty()

    def flush(self) -> None:
        self.store.flush()

    def close(self) -> None:
        self.store.close()

    @contextlib.contextmanager
    def _changing(self, ids: np.ndarray) -> Iterator[None]:
        """Within the block, which changes ids in the store below, keep reads from caching them."""
        try:
            yield
        except BaseException:  # Some of the ids may have changed in the store below.
            with self._lock:
                self._forget(ids)
            raise
        finally:
            with self._lock:
                if self._reads:
                    self._changed.append(ids.copy())

    def _empty(self) -> None:
        with self._lock:
            room = min(self.memory // (self.format.width + _OVERHEAD), 2**31 - 1)
            if self.format.num_ids is not None:
                room = min(room, self.format.num_ids)
            self._map = IdMap(room, num_ids=self.format.num_ids)
            self._records = np.zeros((room, self.format.width), np.uint8)
            self._ids = np.full(room, -1, np.int64)
            self._last_use = np.zeros(room, np.uint64)
            self._free, self._num_free = np.arange(room, dtype=np.int32), room
            self._clock = 0
            self._generation += 1

    def _use(self, slots: np.ndarray) -> None:
        self._clock += 1
        self._last_use[slots] = self._clock

    def _keep_read(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Cache records, uint8 ``[n, width]``, that were read, unless their ids changed since."""
        ids, first = np.unique(ids, return_index=True)
        is_new = self._map.find(ids) < 0
        if self._changed:
            is_new &= ~np.isin(ids, np.concatenate(self._changed))
        self._keep(ids[is_new], records[first][is_new])

    def _keep(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Cache the records of distinct ids; of too many, the first that the memory holds."""
        self._forget(ids)
        room = self._ids.size
        ids, records = ids[:room], records[:room]
        if ids.size > self._num_free:
            # A share at once: finding the least recently used reads the last use of every record.
            wanted = max(ids.size - self._num_free, int(room * _EVICTED_SHARE))
            self._forget(self._ids[smallest(self._last_use, self._ids != -1, wanted)])
        self._num_free -= ids.size
        slots = self._free[self._num_free : self._num_free + ids.size].copy()
        self._map.insert(ids, slots)
        self._records[slots], self._ids[slots] = records, ids
        self._use(slots)

    def _forget(self, ids: np.ndarray) -> None:
        slots = self._map.remove(ids[self._map.find(ids) >= 0])
        self._ids[slots] = -1
        self._free[self._num_free : self._num_free + slots.size] = slots
        self._num_free += slots.size


def parse_bytes(text: str) -> int:
    """Return the number of bytes that a text such as ``"2GB"`` names."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B|)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"a size of memory is a number and KB, MB, GB or TB, got {text!r}")
    return round(float(match[1]) * _UNITS[match[2].upper()])
