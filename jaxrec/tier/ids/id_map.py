"""Maps from 64-bit ids to slots, the changes of a batch to them, and places in arrays that grow."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from jaxrec.tier.ids import implementation
from jaxrec.tier.ids.implementation import checked

MAX_CAPACITY = 2**31 - 1


class IdMap:
    """Map from 64-bit ids to slots, for whole batches of ids.

    Slots are int32 from 0 on; several ids may have the same slot. The map may be used by several
    threads: methods that change it wait for the others.

    Args:
        capacity: Number of ids that the map has room for. Its memory is taken at once.
        threads: Number of threads that search for the ids of a large batch; default: one for each
            processor core of this process.
        num_ids: Ids are 0 to ``num_ids`` - 1; other ids are absent. If they are at most 16 times
            as many as there is room for, the map is an array that they index. None: any int64 but
            -1.
    """

    def __init__(self, capacity: int, threads: int | None = None, num_ids: int | None = None):
        if not 0 <= capacity <= MAX_CAPACITY:
            raise ValueError(f"capacity must be from 0 to {MAX_CAPACITY:,}, not {capacity:,}")
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be 1 or more, not {threads}")
        if num_ids is not None and num_ids < 1:
            raise ValueError(f"num_ids must be 1 or more, not {num_ids}")
        self.capacity, self.num_ids = capacity, num_ids
        self.threads = num_cores() if threads is None else threads
        self._map = implementation.current().Map(capacity, num_ids)

    def __len__(self) -> int:
        return len(self._map)

    def __repr__(self) -> str:
        return f"IdMap(capacity={self.capacity}, threads={self.threads}), {len(self)} ids"

    @property
    def nbytes(self) -> int:
        """Bytes of the map."""
        return self._map.nbytes

    def find(self, ids: Int64[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
        """Return the slot of each id, -1 where it is absent. Ids may repeat."""
        return self._map.find(checked(ids, np.int64, "ids"), self.threads)

    def insert(self, ids: Int64[np.ndarray, " n"], slots: Int32[np.ndarray, " n"]) -> None:
        """Add ids with their slots; where one is refused, none is added."""
        ids = checked(ids, np.int64, "ids")
        slots = checked(slots, np.int32, "slots", ids.size)
        inserted = self._map.insert(ids, slots)
        if inserted < 0:
            raise ValueError(
                f"no room for {ids.size:,} ids: the map has {len(self):,} of {self.capacity:,}"
            )
        if inserted < ids.size:
            if self.num_ids is None and ids[inserted] == -1:
                raise ValueError(f"id -1 at position {inserted}: maps cannot hold it")
            if self.num_ids is not None and not 0 <= ids[inserted] < self.num_ids:
                raise ValueError(
                    f"id {ids[inserted]} at position {inserted}: the map holds ids from 0 to "
                    f"{self.num_ids - 1:,}"
                )
            if slots[inserted] < 0:
                raise ValueError(
                    f"slot {slots[inserted]} at position {inserted}: it must be 0 or more"
                )
            why = "occurs twice" if _repeats(ids, inserted) else "is in the map already"
            raise ValueError(f"id {ids[inserted]} at position {inserted} {why}")

    def remove(self, ids: Int64[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
        """Remove ids and return the slots that they had; where one is absent, none is removed."""
        ids = checked(ids, np.int64, "ids")
        slots, removed = self._map.remove(ids)
        if removed < ids.size:
            why = "occurs twice" if _repeats(ids, removed) else "is not in the map"
            raise KeyError(f"id {ids[removed]} at position {removed} {why}")
        return slots

    def items(self) -> tuple[Int64[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
        """Return all ids in ascending order, and the slot of each."""
        return self._map.items()


class Lookup(NamedTuple):
    """Slots of the ids of a batch, and the ids that are absent from a map.

    Attributes:
        slots: Slot of each id, int32 ``[n]``; -1 where it is absent.
        misses: Positions of the absent ids, int32 ``[k]``.
        absent: The distinct absent ids in the order of their first occurrence, int64 ``[m]``.
        inverse: Place in ``absent`` of the id at each of ``misses``, int32 ``[k]``.
        counts: How often each of ``absent`` occurs, int32 ``[m]``.
    """

    slots: np.ndarray
    misses: np.ndarray
    absent: np.ndarray
    inverse: np.ndarray
    counts: np.ndarray


def look_up(maps: Sequence[IdMap], ids: Sequence[Int64[np.ndarray, " _"]]) -> list[Lookup]:
    """Look up the ids of a batch in several maps, each in its own.

    Args:
        maps: The maps.
        ids: The ids of each map, with repeats.
    """
    if not maps:
        return []
    lookups = implementation.current().look_up(
        [each._map for each in maps],
        [checked(of_map, np.int64, "ids") for of_map in ids],
        max(each.threads for each in maps),
    )
    return [Lookup(*fields) for fields in lookups]


def _repeats(ids: np.ndarray, position: int) -> bool:
    """Return whether the id at a position occurs before."""
    return bool((ids[:position] == ids[position]).any())


def num_cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class MapChange(NamedTuple):
    """Changes of a batch to one map and the records of its slots.

    Attributes:
        ids: The map.
        records: The `jaxrec.tier.Records`, of which ``ids``, ``born``, ``count`` and ``power``
            change.
        victims: Slots whose ids are removed, int32 ``[e]``.
        new_ids: Ids that are added, int64 ``[m]``.
        new_slots: Their slots, int32 ``[m]``; those of victims are free already.
        slots: Slot of each id of the batch, int32 ``[n]``, contiguous; changed.
        misses: Positions in ``slots`` of the ids that had no slot, int32 ``[k]``.
        inverse: For each of ``misses`` the index of its id in ``absent_slots``, int32 ``[k]``.
        absent_slots: Slot of each absent id, -1 for none, int32.
    """

    ids: IdMap
    records: Any
    victims: np.ndarray
    new_ids: np.ndarray
    new_slots: np.ndarray
    slots: np.ndarray
    misses: np.ndarray
    inverse: np.ndarray
    absent_slots: np.ndarray


def commit(changes: Sequence[MapChange], batch: int, power: int) -> list[np.ndarray]:
    """Carry out the changes of a batch.

    Args:
        changes: The changes of each map. Arrays have the types that `MapChange` names.
        batch: Number of the batch: ``born`` of new ids.
        power: Frequency class of new ids; their count is 0.

    Returns:
        For each map the ids of its victims, int64 ``[e]``.
    """
    if not changes:
        return []
    maps: list[Any] = [each.ids._map for each in changes]
    done, evicted = implementation.current().commit(maps, changes, batch, power)
    if done < len(changes):
        changes[done].ids.insert(changes[done].new_ids, changes[done].new_slots)  # raises its error
        raise AssertionError("a map lacks an id that its records have")
    return evicted


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
