"""Evicted rows on their way to a row store, and ids whose records there have changed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxrec.tier.ids import implementation
from jaxrec.tier.ids.id_map import Places
from jaxrec.tier.ids.implementation import checked

_FIRST_ROOM = 1024

# Largest range of ids that index an array, of 8 bytes each: at most 32 MiB.
_MOST_INDEXED = 1 << 22


@dataclasses.dataclass(frozen=True, eq=False)
class EvictedRows:
    """Rows of evicted ids, int64 ``[n]``, from the decision to evict until the store has them."""

    ids: np.ndarray
    number: int
    # The parts of the records (`RecordLayout.parts`).
    parts: concurrent.futures.Future[list[np.ndarray]] = dataclasses.field(
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
        concurrent.futures.wait([each.parts for each in self.evictions])

    def copy_to(self, rows: np.ndarray, places: np.ndarray) -> None:
        """Copy the rows to some places, int32 ``[n]``, of ``rows``, after `wait`."""
        sources = [each.parts.result() for each in self.evictions]
        implementation.current().copy_rows(sources, self.which, self.index, places, rows)


_NO_IDS, _NO_INDICES = np.zeros(0, np.int64), np.zeros(0, np.int32)
_NO_ROWS = WantedRows((), _NO_INDICES, _NO_INDICES, _NO_INDICES)


class Evictions(NamedTuple):
    """Ids of one table that are evicted, or looked for among evicted ones, for native code."""

    last: np.ndarray  # `RowsUnderWay._last`
    places: np.ndarray  # int64 [n], index of each id in `last`; negative: it was never evicted
    numbers: np.ndarray  # int64 [m], numbers of the evictions under way, ascending
    next: int  # number of the eviction that is added


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
        return add_all([self], [ids])[0]

    def find(self, ids: np.ndarray) -> WantedRows:
        """Return the rows of distinct ids that are under way, of their last eviction each."""
        return find_all([self], [ids])[0]

    def _add(self, ids: np.ndarray) -> tuple[EvictedRows, Evictions]:
        if self._places is None:
            places = self._checked(ids)
        else:
            places = self._places.assign(ids).astype(np.int64)
            grown = self._places.room - self._last.size
            if grown > 0:
                self._last = np.concatenate([self._last, np.zeros(grown, np.int64)])
        self._num_evictions += 1
        number = self._num_evictions
        evicted = self._evictions[number] = EvictedRows(ids, number)
        return evicted, Evictions(self._last, places, _NO_IDS, number)

    def _find(self, ids: np.ndarray) -> Evictions:
        if self._places is None:
            places = self._checked(ids)
        else:
            places = self._places.find(ids).astype(np.int64)
        return Evictions(self._last, places, np.array(list(self._evictions), np.int64), 0)

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        """Return ids that are indices of `_last`, as native code needs them."""
        ids, size = checked(ids, np.int64, "ids"), self._last.size
        if ids.size and not 0 <= ids.min() <= ids.max() < size:
            raise ValueError(f"ids are 0 to {size - 1}, got {ids.min()} to {ids.max()}")
        return ids

    def _wanted(self, which: np.ndarray, index: np.ndarray, positions: np.ndarray) -> WantedRows:
        if not positions.size:
            return _NO_ROWS
        # Evictions beyond the last one that is wanted may be sent later than the caller waits.
        evictions = tuple(itertools.islice(self._evictions.values(), int(which.max()) + 1))
        return WantedRows(evictions, which, index, positions)

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


def add_all(under_way: Sequence[RowsUnderWay], ids: Sequence[np.ndarray]) -> list[EvictedRows]:
    """Register the eviction of distinct ids in each of several tables, by one native call."""
    if not under_way:
        return []
    with _locked(under_way):
        added = [each._add(of_table) for each, of_table in zip(under_way, ids, strict=True)]
        implementation.current().add_evictions([evictions for _, evictions in added])
        return [evicted for evicted, _ in added]


def find_all(under_way: Sequence[RowsUnderWay], ids: Sequence[np.ndarray]) -> list[WantedRows]:
    """Return the rows of distinct ids that are under way in each table, by one native call."""
    if not under_way:
        return []
    with _locked(under_way):
        wanted = [each._find(of_table) for each, of_table in zip(under_way, ids, strict=True)]
        found = implementation.current().find_evictions(wanted)
        return [each._wanted(*of_table) for each, of_table in zip(under_way, found, strict=True)]


@contextlib.contextmanager
def _locked(under_way: Sequence[RowsUnderWay]) -> Iterator[None]:
    """Hold the locks of several tables; other threads hold one of them at a time."""
    with contextlib.ExitStack() as locks:
        for each in under_way:
            locks.enter_context(each._lock)
        yield


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
