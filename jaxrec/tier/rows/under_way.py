"""Evicted rows on their way to a row store."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading

import numpy as np

from jaxrec.tier.stores.places import Places

_FIRST_ROOM = 1024


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

    Example:
        >>> import numpy as np
        >>> under_way = RowsUnderWay()
        >>> evicted = under_way.add(np.array([7, 2**60]))
        >>> [wanted] = under_way.find(np.array([5, 2**60]))
        >>> wanted.evicted is evicted, wanted.index, wanted.positions
        (True, array([1], dtype=int32), array([1]))
        >>> under_way.remove(evicted)
        >>> under_way.find(np.array([5, 2**60])), len(under_way)
        ((), 0)
    """

    def __init__(self, num_ids: int | None = None) -> None:
        self._lock = threading.Lock()
        self._evictions: dict[int, EvictedRows] = {}
        self._last = 0
        # For each place the last eviction of its id, and the id's index there.
        self._places = Places(_FIRST_ROOM, num_ids)
        self._number = np.zeros(_FIRST_ROOM, np.int64)
        self._index = np.zeros(_FIRST_ROOM, np.int32)

    def __len__(self) -> int:
        """Return the number of evictions under way."""
        return len(self._evictions)

    def add(self, ids: np.ndarray) -> EvictedRows:
        """Register the eviction of distinct ids, int64 ``[n]``."""
        with self._lock:
            self._last += 1
            evicted = self._evictions[self._last] = EvictedRows(ids, self._last)
            places = self._places.assign(ids)
            if (room := self._places.room) > self._number.size:
                self._number, self._index = (
                    np.concatenate([array, np.zeros(room - array.size, array.dtype)])
                    for array in (self._number, self._index)
                )
            self._number[places] = self._last
            self._index[places] = np.arange(ids.size, dtype=np.int32)
            return evicted

    def find(self, ids: np.ndarray) -> tuple[WantedRows, ...]:
        """Return the last evictions of those of some distinct ids that are under way."""
        with self._lock:
            places = self._places.find(ids)
            positions = np.flatnonzero(places >= 0)
            places = places[positions]
            number, index = self._number[places], self._index[places]
            return tuple(
                WantedRows(self._evictions[of.item()], index[number == of], positions[number == of])
                for of in np.unique(number)
            )

    def remove(self, evicted: EvictedRows) -> None:
        """Forget an eviction whose rows the store has."""
        with self._lock:
            del self._evictions[evicted.number]
            places = self._places.find(evicted.ids)
            is_last = self._number[places] == evicted.number
            self._places.remove(evicted.ids[is_last & (places >= 0)])
