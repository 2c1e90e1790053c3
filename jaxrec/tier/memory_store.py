"""Rows of evicted ids in the memory of the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from jaxrec.tier.id_map import IdMap
from jaxrec.tier.row_store import RowStore

_FIRST_ROOM = 1024


class MemoryStore(RowStore):
    """Records in an array that grows: the store ``"memory://"``.

    The records end with the process; checkpoints of the model hold them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: np.ndarray | None = None
        self._map, self._free = IdMap(0), np.zeros(0, np.int32)

    def open(self, width: int) -> None:
        with self._lock:
            if self._records is not None:
                raise ValueError("a memory store serves one vocabulary; give each its own")
            self._records = np.zeros((_FIRST_ROOM, width), np.uint8)
            self._map = IdMap(_FIRST_ROOM)
            self._free = np.arange(_FIRST_ROOM, dtype=np.int32)

    def get(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            places = self._map.find(ids)
            has_record = places >= 0
            records = self._opened[np.maximum(places, 0)]
            records[~has_record] = 0
            return has_record, records

    def put(self, ids: np.ndarray, records: np.ndarray) -> None:
        with self._lock:
            places = self._map.find(ids)
            is_new = places < 0
            count = int(is_new.sum())
            while count > self._free.size:
                self._grow()
            places[is_new], self._free = self._free[:count], self._free[count:]
            self._map.insert(ids[is_new], places[is_new])
            self._opened[places] = records

    def delete(self, ids: np.ndarray) -> None:
        with self._lock:
            ids = ids[self._map.find(ids) >= 0]
            self._free = np.concatenate([self._map.remove(ids), self._free])

    def scan(self, size: int = 1 << 16) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with self._lock:
            ids, _ = self._map.items()
        for start in range(0, ids.size, size):
            with self._lock:
                part = ids[start : start + size]
                places = self._map.find(part)
                is_present = places >= 0
                records = self._opened[places[is_present]]
            yield part[is_present], records

    @property
    def is_durable(self) -> bool:
        return False

    def __len__(self) -> int:
        return len(self._map)

    @property
    def _opened(self) -> np.ndarray:
        if self._records is None:
            raise ValueError("the store is not open")
        return self._records

    def _grow(self) -> None:
        old = self._opened
        room = len(old)
        self._records = np.concatenate([old, np.zeros_like(old)])
        self._free = np.concatenate([self._free, np.arange(room, 2 * room, dtype=np.int32)])
        ids, places = self._map.items()
        self._map = IdMap(2 * room)
        self._map.insert(ids, places)
