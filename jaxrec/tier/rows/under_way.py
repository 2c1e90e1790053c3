"""Evicted rows on their way to a row store, and ids whose records there have changed."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading

import numpy as np

from jaxrec.tier.ids import implementation
from jaxrec.tier.ids.id_map import Places

_FIRST_ROOM = 1024

# Largest range of ids that index an array, of 8 bytes each: at most 32 MiB.
_MOST_INDEXED = 1 << 22


@dataclasses.dataclass(frozen=True, eq=False)
class EvictedRows:
    """Rows of evicted ids, int64 ``[n]``, from the decision to evict until the store has them."""

    ids: np.ndarray
    number: int
    records: concurrent.futures.Future[np.ndarray] = dataclasses.field(
        default_factory=concurrent.futures.Future
    )


@dataclasses.dataclass(frozen=True)
class WantedRows:
    """Requested rows that evictions hold.

    The row of request ``positions[i]`` is row ``index[i]`` of ``evictions[which[i]]``; all three
    arrays are int32 ``[n]``.
    """

    evictions: tuple[EvictedRows, ...]
    which: np.ndarray
    index: np.ndarray
    positions: np.ndarray

    def __len__(self) -> int:
        return self.positions.size

    def wait(self) -> None:
        """Wait until the rows are on the host, or an error keeps them from it."""
        concurrent.futures.wait([each.records for each in self.evictions])

    def copy_to(self, rows: np.ndarray, places: np.ndarray) -> None:
        """Copy the rows to some places, int32 ``[n]``, of ``rows``, after `wait`."""
        sources = [each.records.result() for each in self.evictions]
        implementation.current().copy_rows(sources, self.which, self.index, places, rows)


_NO_INDICES = np.zeros(0, np.int32)
_NO_ROWS = WantedRows((), _NO_INDICES, _NO_INDICES, _NO_INDICES)


class RowsUnderWay:
    """Evicted rows that a store does not have yet; threads may share it.

    Ids are 0 to ``num_ids`` - 1; with None any int64 except -1.
    """

    def __init__(self, num_ids: int | None = None) -> None:
        self._lock = threading.Lock()
        self._evictions: dict[int, EvictedRows] = {}
        self._num_evictions = 0
        # Index of each id in `_last`; None: an id is its own index.
        self._places, room = None, num_ids
        if room is None or room > _MOST_INDEXED:
            self._places, room = Places(_FIRST_ROOM, num_ids), _FIRST_ROOM
        # For each id its last eviction's number, times 2**32, plus its index there: one read finds
        # both. The system provides the pages of a range of ids only when they are written.
        self._last = np.zeros(room, np.int64)

    def __len__(self) -> int:
        """Return the number of evictions under way."""
        return len(self._evictions)

    def add(self, ids: np.ndarray) -> EvictedRows:
        """Register the eviction of distinct ids, int64 ``[n]``."""
        with self._lock:
            self._num_evictions += 1
            number = self._num_evictions
            evicted = self._evictions[number] = EvictedRows(ids, number)
            places = ids
            if self._places is not None:
                places = self._places.assign(ids)
                grown = self._places.room - self._last.size
                if grown > 0:
                    self._last = np.concatenate([self._last, np.zeros(grown, np.int64)])
            first = number << 32
            self._last[places] = np.arange(first, first + ids.size)
            return evicted

    def find(self, ids: np.ndarray) -> WantedRows:
        """Return the rows of distinct ids that are under way, of their last eviction each."""
        with self._lock:
            if not self._evictions:
                return _NO_ROWS
            if self._places is None:
                last = self._last[ids]
            else:
                places = self._places.find(ids)
                last = np.where(places >= 0, self._last[places], 0)
            # Older numbers are those of evictions that have arrived; they are not erased from the
            # array.
            first = min(self._evictions)
            positions = np.flatnonzero(last >= first << 32).astype(np.int32)
            if not positions.size:
                return _NO_ROWS
            last = last[positions]
            number, index = last >> 32, last.astype(np.int32)  # of the lower half
            # The place of each eviction in the result; -1: it has arrived, as later ones may have.
            place = np.full(int(number.max()) - first + 1, -1, np.int32)
            numbers = [each for each in self._evictions if each - first < place.size]
            place[np.array(numbers) - first] = np.arange(len(numbers))
            which = place[number - first]
            is_here = which >= 0
            if not is_here.any():
                return _NO_ROWS
            # Evictions beyond the last one that is wanted may be sent later than the caller waits.
            evictions = [self._evictions[each] for each in numbers[: which.max() + 1]]
            return WantedRows(tuple(evictions), which[is_here], index[is_here], positions[is_here])

    def remove(self, evicted: EvictedRows) -> None:
        """Forget an eviction whose rows the store has."""
        with self._lock:
            del self._evictions[evicted.number]
            if self._places is None:
                return
            places = self._places.find(evicted.ids)
            # An id that was evicted again meanwhile is still under way.
            is_last = self._last[places] >> 32 == evicted.number
            self._places.remove(evicted.ids[is_last & (places >= 0)])


_NO_IDS = np.zeros(0, np.int64)


class WrittenIds:
    """Ids whose records in a row store were written or removed; threads may share it.

    All records count as written before the first `take`, and after the store's content was
    replaced.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start(is_all=True)

    def _start(self, *, is_all: bool) -> None:
        self._parts: list[np.ndarray] = []
        self._size = self._num_distinct = 0
        self._is_all = is_all

    def add(self, ids: np.ndarray) -> None:
        """Add ids, int64 ``[n]``; the array must not change afterwards."""
        with self._lock:
            if self._is_all:
                return
            self._parts.append(ids)
            self._size += ids.size
            # Repeats are removed once they may outnumber the distinct ids, so that memory is at
            # most twice that of the distinct ids.
            if self._size > max(2 * self._num_distinct, 1 << 16):
                self._parts = [np.unique(np.concatenate(self._parts))]
                self._size = self._num_distinct = self._parts[0].size

    def add_all(self) -> None:
        """Let all records count as written."""
        with self._lock:
            self._start(is_all=True)

    def take(self) -> np.ndarray | None:
        """Return the ids since the last `take`, sorted, int64 ``[n]``; None: all records.

        If they are not saved after all, `give_back` adds them again.
        """
        with self._lock:
            taken = None if self._is_all else np.unique(np.concatenate([_NO_IDS, *self._parts]))
            self._start(is_all=False)
            return taken

    def give_back(self, taken: np.ndarray | None) -> None:
        """Add the result of a `take` once more; None: all records count as written."""
        if taken is None:
            self.add_all()
        else:
            self.add(taken)
