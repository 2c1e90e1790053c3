"""Rows in the memory of the host."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrec.tier.ids import implementation
from jaxrec.tier.ids.id_map import Places, assign_all, find_all
from jaxrec.tier.stores.record_format import RecordFormat
from jaxrec.tier.stores.row_store import RowStore

_FIRST_ROOM = 1024


class MemoryStore(RowStore):
    """Records in an array that grows: the store ``"memory://"``.

    They end with the process; checkpoints of the model have them.
    """

    in_memory = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: GrowingRecords | None = None
        self._places = Places(0)

    @classmethod
    def from_url(cls, url: str) -> MemoryStore:
        """Make the store of the URL ``"memory://"``."""
        if url != "memory://":
            raise ValueError(f"a store in memory has the URL 'memory://', got {url!r}")
        return cls()

    def open(self, format: RecordFormat) -> None:
        with self._lock:
            if self._records is not None:
                raise ValueError("a memory store serves one vocabulary; give each its own")
            self.format = format
            self._empty()

    def get(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _get_all([self], [ids])[0]

    @classmethod
    def get_all(
        cls, stores: Sequence[Any], ids: Sequence[np.ndarray]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        # A class derived from this one may read in another way.
        return super().get_all(stores, ids) if cls.get != MemoryStore.get else _get_all(stores, ids)

    def put(self, ids: np.ndarray, records: np.ndarray) -> None:
        _put_all([self], [ids], [[np.ascontiguousarray(records, np.uint8)]])

    @classmethod
    def put_all(
        cls,
        stores: Sequence[Any],
        ids: Sequence[np.ndarray],
        parts: Sequence[Sequence[np.ndarray]],
    ) -> None:
        if cls.put != MemoryStore.put:
            super().put_all(stores, ids, parts)
        else:
            _put_all(stores, ids, parts)

    def delete(self, ids: np.ndarray) -> None:
        with self._lock:
            self._places.remove(ids)

    def clear(self) -> None:
        with self._lock:
            self._empty()

    def scan(self, size: int = 1 << 16) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with self._lock:
            ids, _ = self._places.items()
        # Other threads may put and delete between two parts, so that each part is found anew.
        for start in range(0, ids.size, size):
            with self._lock:
                part = ids[start : start + size]
                places = self._places.find(part)
                is_present = places >= 0
                records = self._opened.array[places[is_present]]
            yield part[is_present], records

    def __len__(self) -> int:
        return len(self._places)

    @property
    def _opened(self) -> GrowingRecords:
        if self._records is None:
            raise ValueError("the store is not open")
        return self._records

    def _empty(self) -> None:
        self._records = GrowingRecords(_FIRST_ROOM, self.format.width)
        self._places = Places(_FIRST_ROOM, self.format.num_ids)


def _get_all(
    stores: Sequence[MemoryStore], ids: Sequence[np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Read records of several stores by two native calls."""
    with _locked(stores):
        places = find_all([each._places for each in stores], ids)
        # The arrays go with the call: a store whose array is in use cannot grow.
        take_rows = implementation.current().take_rows
        records = take_rows([each._opened.array for each in stores], places)
    return [(of_store >= 0, rows) for of_store, rows in zip(places, records, strict=True)]


def _put_all(
    stores: Sequence[MemoryStore],
    ids: Sequence[np.ndarray],
    parts: Sequence[Sequence[np.ndarray]],
) -> None:
    """Write records of several stores, from their parts, by two native calls."""
    for each, of_store, of_records in zip(stores, ids, parts, strict=True):
        shapes = [part.shape for part in of_records]
        # Native code reads as many rows of each part as there are ids.
        if any(len(shape) != 2 or shape[0] != of_store.size for shape in shapes) or (
            sum(shape[1] for shape in shapes) != each.format.width
        ):
            raise ValueError(
                f"{of_store.size} records of {each.format}, got shape {', '.join(map(str, shapes))}"
            )
    with _locked(stores):
        places = assign_all([each._places for each in stores], ids)
        for each in stores:
            if each._places.room > each._opened.room:
                each._opened.grow(each._places.room)
        put_rows = implementation.current().put_rows
        put_rows([each._opened.array for each in stores], places, parts)


@contextlib.contextmanager
def _locked(stores: Sequence[MemoryStore]) -> Iterator[None]:
    """Hold the locks of several stores, always in one order."""
    with contextlib.ExitStack() as locks:
        for each in sorted(stores, key=id):
            locks.enter_context(each._lock)
        yield


class GrowingRecords:
    """Array of records, uint8 ``[room, width]``, in memory of its own that grows in place."""

    # Anonymous memory of mmap instead of a NumPy array. To grow it, Linux maps the same pages
    # elsewhere, so that nothing is copied and no record is in memory twice. New records take memory
    # when they are written.
    def __init__(self, room: int, width: int) -> None:
        self.room, self.width = room, width
        self._memory = _map_memory(room * width)

    @property
    def array(self) -> np.ndarray:
        """The records. Do not keep the array: memory with a view cannot grow."""
        count = self.room * self.width
        return np.frombuffer(self._memory, np.uint8, count).reshape(self.room, self.width)

    def grow(self, room: int) -> None:
        """Make room for more records; existing ones stay."""
        size, self.room = self.room * self.width, room
        try:
            self._memory.resize(max(room * self.width, 1))
        except (SystemError, ValueError, OSError):  # platforms that cannot
            memory = _map_memory(room * self.width)
            memory[:size] = self._memory[:size]
            self._memory = memory
        _use_huge_pages(self._memory)


def _map_memory(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _use_huge_pages(memory)
    return memory


def _use_huge_pages(memory: mmap.mmap) -> None:
    """Use huge pages, so that fewer accesses of random records miss the TLB."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
