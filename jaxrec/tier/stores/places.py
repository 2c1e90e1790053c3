"""Places of ids in an array that grows."""

from __future__ import annotations

import numpy as np

from jaxrec.tier.ids.id_map import IdMap


class Places:
    """Map of ids to places 0 to ``room`` - 1, with a list of the free ones.

    Args:
        room: Number of places at first.
        num_ids: Ids are 0 to ``num_ids`` - 1; None: any int64 but -1.
    """

    def __init__(self, room: int, num_ids: int | None = None) -> None:
        self._map = IdMap(room, num_ids=num_ids)
        self._next = 0  # This place and those after it were never taken.
        self._freed = np.zeros(0, np.int32)

    def __len__(self) -> int:
        return len(self._map)

    @property
    def room(self) -> int:
        """Number of places."""
        return self._map.capacity

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the place of each id, int32, -1 where it has none."""
        return self._map.find(ids)

    def assign(self, ids: np.ndarray) -> np.ndarray:
        """Return the place of each of distinct ids; those without one get one.

        The room doubles where it is too small.
        """
        places = self._map.find(ids)
        is_new = places < 0
        count = int(is_new.sum())
        if not count:
            return places
        wanted, room = len(self) + count, self.room
        while room < wanted:
            room *= 2
        if room > self.room:
            self._grow(room)
        reused = min(count, self._freed.size)
        fresh = np.arange(self._next, self._next + count - reused, dtype=np.int32)
        new = np.concatenate([self._freed[self._freed.size - reused :], fresh])
        self._map.insert(ids[is_new], new)
        self._freed = self._freed[: self._freed.size - reused]
        self._next += fresh.size
        places[is_new] = new
        return places

    def load(self, ids: np.ndarray, places: np.ndarray, room: int) -> None:
        """Set the map to given ids and their places."""
        self._map = IdMap(room, num_ids=self._map.num_ids)
        self._map.insert(ids, places)
        self._next = int(places.max(initial=-1)) + 1
        is_free = np.ones(self._next, bool)
        is_free[places] = False
        self._freed = np.flatnonzero(is_free).astype(np.int32)

    def remove(self, ids: np.ndarray) -> np.ndarray:
        """Free the places of distinct ids, and return them; ids without one are skipped."""
        places = self._map.remove(ids[self._map.find(ids) >= 0])
        self._freed = np.concatenate([self._freed, places])
        return places

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids in ascending order, and the place of each."""
        return self._map.items()

    def _grow(self, room: int) -> None:
        ids, places = self._map.items()
        self._map = IdMap(room, num_ids=self._map.num_ids)
        self._map.insert(ids, places)
