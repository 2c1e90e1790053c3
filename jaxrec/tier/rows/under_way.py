"""Evicted rows on their way to a row store, and ids whose records there have changed."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading

import numpy as np

from jaxrec.tier.ids.id_map import Places

_FIRST_ROOM = 1024

# The largest range whose ids index an array. The array has 8 bytes for each id: 32 MiB at most.
_MOST_INDEXED = 1 << 22


@dataclasses.dataclass(frozen=True, eq=False)
class EvictedRows:
    """Rows of evicted ids, from the moment of the decision until the store has them.

    Attributes:
        ids: The ids, int64 ``[n]``.
        number: Their place in the order of evictions.
        records: Future of their records.
    """

    ids: np.ndarray
    number: int
    records: concurrent.futures.Future[np.ndarray] = dataclasses.field(
        default_factory=concurrent.futures.Future
    )


@dataclasses.dataclass(frozen=True)
class WantedRows:
    """The wanted rows that one eviction holds.

    Attributes:
        evicted: The eviction.
        index: Indices of the rows in the eviction, int32 ``[n]``.
        positions: Their positions among the wanted rows, int ``[n]``.
    """

    evicted: EvictedRows
    index: np.ndarray
    positions: np.ndarray


class RowsUnderWay:
    """Evicted rows that a store does not have yet. Threads may share it.

    Args:
        num_ids: Ids are 0 to ``num_ids`` - 1; None: any int64 but -1.
    """

    def __init__(self, num_ids: int | None = None) -> None:
        self._lock = threading.Lock()
        self._evictions: dict[int, EvictedRows] = {}
        self._num_evictions = 0
        # Places of ids in `_last`; None: an id is its own place.
        self._places, room = None, num_ids
        if room is None or room > _MOST_INDEXED:
            self._places, room = Places(_FIRST_ROOM, num_ids), _FIRST_ROOM
        # For each place the number of the last eviction of its id, times 2**32, and the id's index
        # there. The system gives the memory of a range of ids when it is written.
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

    def find(self, ids: np.ndarray) -> tuple[WantedRows, ...]:
        """Return the last evictions of those of some distinct ids that are under way."""
        with self._lock:
            if not self._evictions:
                return ()
            if self._places is None:
                last = self._last[ids]
            else:
                places = self._places.find(ids)
                last = np.where(places >= 0, self._last[places], 0)
            positions = np.flatnonzero(last >= min(self._evictions) << 32)
            last = last[positions]
            number, index = last >> 32, last.astype(np.int32)  # of the lower half
            return tuple(
                WantedRows(evicted, index[is_of], positions[is_of])
                for of in np.unique(number).tolist()
                if (evicted := self._evictions.get(of)) is not None
                for is_of in [number == of]
            )

    def remove(self, evicted: EvictedRows) -> None:
        """Forget an eviction whose rows the store has."""
        with self._lock:
            del self._evictions[evicted.number]
            if self._places is None:
                return
            places = self._places.find(evicted.ids)
            is_last = self._last[places] >> 32 == evicted.number
            self._places.remove(evicted.ids[is_last & (places >= 0)])


_NO_IDS = np.zeros(0, np.int64)


class WrittenIds:
    """Ids whose records were written to a row store or removed from it. Threads may share it.

    Before the first `take`, and after the store's content was replaced, all records count as
    written. Repeated ids are removed when they outnumber the others, so that memory is bounded by
    twice the distinct ids, 8 bytes each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start(is_all=True)

    def _start(self, *, is_all: bool) -> None:
        self._parts: list[np.ndarray] = []
        self._size = self._num_distinct = 0
        self._is_all = is_all

    def add(self, ids: np.ndarray) -> None:
        """Note ids, int64 ``[n]``. The array must not change afterwards."""
        with self._lock:
            if self._is_all:
                return
            self._parts.append(ids)
            self._size += ids.size
            if self._size > max(2 * self._num_distinct, 1 << 16):
                self._parts = [np.unique(np.concatenate(self._parts))]
                self._size = self._num_distinct = self._parts[0].size

    def add_all(self) -> None:
        """Note that any record may have changed."""
        with self._lock:
            self._start(is_all=True)

    def take(self) -> np.ndarray | None:
        """Return the ids since the last `take`, sorted, int64 ``[n]``; None: all records.

        `give_back` notes them again if they are not saved after all.
        """
        with self._lock:
            taken = None if self._is_all else np.unique(np.concatenate([_NO_IDS, *self._parts]))
            self._start(is_all=False)
            return taken

    def give_back(self, taken: np.ndarray | None) -> None:
        """Note the result of a `take` again."""
        if taken is None:
            self.add_all()
        else:
            self.add(taken)
