"""Maps from 64-bit ids to slots, batch lookups and changes, and a map that assigns slots."""

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
    """Map from 64-bit ids to int32 slots of 0 or more, for whole batches of ids.

    Several ids may have the same slot. Threads may share a map. Ids are 0 to ``num_ids`` - 1, or
    any int64 but -1 where ``num_ids`` is None.
    """

    # The memory for `capacity` ids is taken at once. If `num_ids` is at most 16 times the capacity,
    # the map is an array indexed by ids, otherwise a hash map.

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
        """Bytes of memory."""
        return self._map.nbytes

    def find(self, ids: Int64[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
        """Return the slot of each id, -1 for absent ids. Ids may repeat."""
        return self._map.find(checked(ids, np.int64, "ids"), self.threads)

    def insert(self, ids: Int64[np.ndarray, " n"], slots: Int32[np.ndarray, " n"]) -> None:
        """Add ids with their slots, all of them or none."""
        ids = checked(ids, np.int64, "ids")
        slots = checked(slots, np.int32, "slots", ids.size)
        inserted = self._map.insert(ids, slots)
        if inserted < 0:
            raise ValueError(
                f"no room for {ids.size:,} ids: the map has {len(self):,} of {self.capacity:,}"
            )
        if inserted < ids.size:
            # The map says only which id it refused, so that the usual call costs nothing; find out
            # why here.
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
        """Remove ids, all of them or none, and return the slots that they had."""
        ids = checked(ids, np.int64, "ids")
        slots, removed = self._map.remove(ids)
        if removed < ids.size:
            why = "occurs twice" if _repeats(ids, removed) else "is not in the map"
            raise KeyError(f"id {ids[removed]} at position {removed} {why}")
        return slots

    def items(self) -> tuple[Int64[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
        """Return all ids in ascending order, and their slots."""
        return self._map.items()


class Lookup(NamedTuple):
    """Result of a lookup of a batch's ids in one map: their slots, and the ids that it lacks."""

    slots: np.ndarray  # int32 [n], -1 for absent ids
    misses: np.ndarray  # int32 [k], positions of absent ids in the batch
    absent: np.ndarray  # int64 [m], the distinct absent ids in order of first occurrence
    inverse: np.ndarray  # int32 [k], index in `absent` of the id at each of `misses`
    counts: np.ndarray  # int32 [m], occurrences of each of `absent`


def lookup_all(maps: Sequence[IdMap], ids: Sequence[Int64[np.ndarray, " _"]]) -> list[Lookup]:
    """Look up a batch's ids in several maps; ``ids`` has for each map an array of its own."""
    if not maps:
        return []
    lookups = implementation.current().lookup_all(
        [each._map for each in maps],
        [checked(of_map, np.int64, "ids") for of_map in ids],
        max(each.threads for each in maps),
    )
    return [Lookup(*fields) for fields in lookups]


def _repeats(ids: np.ndarray, position: int) -> bool:
    """Return whether the id at a position occurs earlier, too."""
    return bool((ids[:position] == ids[position]).any())


def num_cores() -> int:
    """Return the number of processor cores that this process may use."""
    # Containers and batch systems often grant a process a part of the machine's cores; macOS does
    # not tell.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class MapChange(NamedTuple):
    """Changes that a batch makes to one map of ids, and to the records of the map's slots."""

    ids: IdMap
    records: Any  # `jaxrec.tier.Records`: `ids`, `born`, `count` and `power` change
    victims: np.ndarray  # int32 [e], slots whose ids are removed first
    new_ids: np.ndarray  # int64 [m]
    new_slots: np.ndarray  # int32 [m], which may be among the victims
    # As in `Lookup`; `slots` is filled in at `misses`, from the slots of the absent ids.
    slots: np.ndarray
    misses: np.ndarray
    inverse: np.ndarray
    absent_slots: np.ndarray  # int32 [absent], -1 for ids that were not admitted


def commit(changes: Sequence[MapChange], batch: int, power: int) -> list[np.ndarray]:
    """Carry out the changes of a batch; return for each map the ids of its victims, int64 ``[e]``.

    Records of new ids get ``born`` of ``batch``, the frequency class ``power`` and a count of 0.
    """
    if not changes:
        return []
    maps: list[Any] = [each.ids._map for each in changes]
    done, evicted = implementation.current().commit(maps, changes, batch, power)
    if done < len(changes):
        # Insert again, for the error that says which id was refused.
        changes[done].ids.insert(changes[done].new_ids, changes[done].new_slots)
        raise AssertionError("a map lacks an id that its records have")
    return evicted


class Places:
    """Map that gives ids places from 0 on, reuses freed places, and grows beyond ``room``.

    Ids are 0 to ``num_ids`` - 1, or any int64 but -1 where ``num_ids`` is None.
    """

    # For stores, whose rows lie in arrays. A vocabulary has a fixed number of rows and chooses
    # their order itself.

    def __init__(self, room: int, num_ids: int | None = None) -> None:
        self._map = IdMap(room, num_ids=num_ids)
        self._next = 0  # this place and those after it were never taken
        self._freed = np.zeros(0, np.int32)

    def __len__(self) -> int:
        return len(self._map)

    @property
    def room(self) -> int:
        """Number of places before the map must grow."""
        return self._map.capacity

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the place of each id, int32 ``[n]``, -1 for none."""
        return self._map.find(ids)

    def assign(self, ids: np.ndarray) -> np.ndarray:
        """Return the place of each of distinct ids, int32 ``[n]``; ids without a place get one."""
        return assign_all([self], [ids])[0]

    def _assign_new(self, ids: np.ndarray) -> np.ndarray:
        """Give places to distinct ids without one."""
        count = ids.size
        wanted, room = len(self) + count, self.room
        while room < wanted:
            room *= 2
        if room > self.room:
            self._grow(room)
        reused = min(count, self._freed.size)
        fresh = np.arange(self._next, self._next + count - reused, dtype=np.int32)
        new = np.concatenate([self._freed[self._freed.size - reused :], fresh])
        self._map.insert(ids, new)
        self._freed = self._freed[: self._freed.size - reused]
        self._next += fresh.size
        return new

    def load(self, ids: np.ndarray, places: np.ndarray, room: int) -> None:
        """Replace all ids by the given ones, int64 ``[n]``, at their places, int32 ``[n]``."""
        self._map = IdMap(room, num_ids=self._map.num_ids)
        self._map.insert(ids, places)
        self._next = int(places.max(initial=-1)) + 1
        is_free = np.ones(self._next, bool)
        is_free[places] = False
        self._freed = np.flatnonzero(is_free).astype(np.int32)

    def remove(self, ids: np.ndarray) -> np.ndarray:
        """Free and return the places of distinct ids; skip ids without one."""
        places = self._map.remove(ids[self._map.find(ids) >= 0])
        self._freed = np.concatenate([self._freed, places])
        return places

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids in ascending order, and their places."""
        return self._map.items()

    def _grow(self, room: int) -> None:
        ids, places = self._map.items()
        self._map = IdMap(room, num_ids=self._map.num_ids)
        self._map.insert(ids, places)


def find_all(places: Sequence[Places], ids: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the place of each id in each of several maps, int32 ``[n]``, -1 for none."""
    return [found.slots for found in lookup_all([each._map for each in places], ids)]


def assign_all(places: Sequence[Places], ids: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the place of each of distinct ids in each of several maps; see `Places.assign`."""
    # One native call finds the ids of all maps.
    lookups = lookup_all([each._map for each in places], ids)
    for each, (slots, misses, new_ids, _, _) in zip(places, lookups, strict=True):
        if new_ids.size:
            slots[misses] = each._assign_new(new_ids)
    return [found.slots for found in lookups]
