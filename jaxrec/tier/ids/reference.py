"""Id maps and batch operations in NumPy, and records in a mapped file.

They define what `jaxrec.tier.ids.library` computes, and serve where the library is missing. The
callers checked the arguments: `jaxrec.tier.ids.id_map` and `jaxrec.tier.ids.batch_ops`.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

PAGE_BYTES = 4096
_WORD = 8


@dataclasses.dataclass(frozen=True)
class RecordArray:
    """Records one after another in a mapped file.

    A record starts with its tag, 8 bytes: 0 if it is absent, otherwise its checksum, which is never
    0. A hole of a sparse file is therefore full of absent records, and a record that was written in
    part counts as absent. Then come the id (8 bytes, if ``has_id``; otherwise the slot is the id),
    the bytes of the record, and zeros up to a multiple of 8.

    Attributes:
        bytes: The whole file, uint8; shared with the file.
        pages: Bits of the pages of 4,096 bytes that surely exist in the file, uint64. Only
            these are written through ``bytes``: the process is killed if it writes to a new page
            when the disk is full.
        seeks_data: Whether ``lseek`` with SEEK_DATA finds further pages that exist.
        descriptor: The open file.
        start: Position of the first record in the file.
        width: Bytes of a record.
        has_id: Whether records have their id.
    """

    bytes: np.ndarray
    pages: np.ndarray
    seeks_data: bool
    descriptor: int
    start: int
    width: int
    has_id: bool

    @property
    def head(self) -> int:
        """Bytes before those of the record."""
        return 2 * _WORD if self.has_id else _WORD

    @property
    def stride(self) -> int:
        """Bytes from one record to the next."""
        return stride(self.width, self.has_id)


def stride(width: int, has_id: bool) -> int:
    """Return the bytes that a record of some width takes in the file."""
    whole = width + (2 * _WORD if has_id else _WORD)
    return (whole + _WORD - 1) // _WORD * _WORD


_MAX_COUNT = np.iinfo(np.uint32).max

# Constants of the checksum of a record.
_LANES = 4
_FACTOR, _STEP = np.uint64(0xD6E8FEB86659FD93), np.uint64(0x9E3779B97F4A7C15)

# Whether `read_records` sets the bits of the pages that it reads.
MARKS_PAGES = False


class Map:
    """Map from ids to slots: the ids in ascending order, and the slot of each."""

    def __init__(self, capacity: int, num_ids: int | None = None):
        self._capacity, self._num_ids = capacity, num_ids
        # Replaced as one, so that a reader in another thread sees both of one state.
        self._items = np.empty(0, np.int64), np.empty(0, np.int32)
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return self._items[0].size

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._items)

    def find(self, ids: np.ndarray, threads: int) -> np.ndarray:
        """Return the slot of each id, -1 where it is absent."""
        return _find(*self._items, ids)

    def insert(self, ids: np.ndarray, slots: np.ndarray) -> int:
        """Add ids with their slots.

        Returns:
            The number of ids; or the position of the first id that the map has, that occurs before,
            that the map cannot hold or whose slot is negative; or -1 without room. The map is as
            before in these cases.
        """
        with self._changing:
            if ids.size > self._capacity - len(self):
                return -1
            taken = (_find(*self._items, ids) >= 0) | _occurs_before(ids)
            is_valid = ids != -1
            if self._num_ids is not None:
                is_valid = (ids >= 0) & (ids < self._num_ids)
            refused = taken | ~is_valid | (slots < 0)
            if refused.any():
                return int(refused.argmax())
            order = np.argsort(ids)
            sorted_ids, their_slots = self._items
            places = np.searchsorted(sorted_ids, ids[order])
            self._items = (
                np.insert(sorted_ids, places, ids[order]),
                np.insert(their_slots, places, slots[order]),
            )
            return ids.size

    def remove(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        """Remove ids.

        Returns:
            The slots that they had and the number of ids; or, in its place, the position of the
            first id that is absent or occurs before. The map is as before in this case.
        """
        with self._changing:
            slots = _find(*self._items, ids)
            absent = (slots < 0) | _occurs_before(ids)
            if absent.any():
                return slots, int(absent.argmax())
            sorted_ids, their_slots = self._items
            places = np.searchsorted(sorted_ids, ids)
            self._items = np.delete(sorted_ids, places), np.delete(their_slots, places)
            return slots, ids.size

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids in ascending order, and the slot of each."""
        ids, slots = self._items
        return ids.copy(), slots.copy()


def _find(sorted_ids: np.ndarray, slots: np.ndarray, ids: np.ndarray) -> np.ndarray:
    if sorted_ids.size == 0:
        return np.full(ids.size, -1, np.int32)
    places = np.minimum(np.searchsorted(sorted_ids, ids), sorted_ids.size - 1)
    return np.where(sorted_ids[places] == ids, slots[places], np.int32(-1))


def _occurs_before(ids: np.ndarray) -> np.ndarray:
    """Return whether each id repeats an earlier one."""
    repeats = np.ones(ids.size, bool)
    repeats[np.unique(ids, return_index=True)[1]] = False
    return repeats


def look_up(
    maps: Sequence[Map], ids: Sequence[np.ndarray], threads: int
) -> list[tuple[np.ndarray, ...]]:
    """Return for each map the fields of `jaxrec.tier.ids.id_map.Lookup`."""
    lookups: list[tuple[np.ndarray, ...]] = []
    for each, of_map in zip(maps, ids, strict=True):
        slots = each.find(of_map, threads)
        positions = np.flatnonzero(slots < 0).astype(np.int32)
        lookups.append((slots, positions, *distinct(of_map[positions])))
    return lookups


def distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct ids, the position of each id among them, and their counts."""
    unique, first, inverse, counts = np.unique(
        ids, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(first)
    rank = np.empty(order.size, np.int32)
    rank[order] = np.arange(order.size, dtype=np.int32)
    return unique[order], rank[inverse], counts[order].astype(np.int32)


def smallest(keys: np.ndarray, eligible: np.ndarray | None, k: int) -> np.ndarray:
    """Return the indices of the k smallest keys among the eligible, ordered by (key, index)."""
    indices = np.arange(keys.size) if eligible is None else np.flatnonzero(eligible)
    order = np.argsort(keys[indices], kind="stable")[:k]
    return indices[order].astype(np.int32)


def record_uses(slots: np.ndarray, batch: int, counts: np.ndarray, last_use: np.ndarray) -> int:
    """Add 1 to the count of each slot, up to the largest uint32, and set its last use.

    Returns:
        The number of slots; or the position of the first slot without a count. Nothing is recorded
        in this case.
    """
    outside = slots >= counts.size
    if outside.any():
        return int(outside.argmax())
    used = slots[slots >= 0]
    sums = counts + np.bincount(used, minlength=counts.size)
    np.minimum(sums, _MAX_COUNT, out=counts, casting="unsafe")
    last_use[used] = batch
    return slots.size


def mark_eligible(
    born: np.ndarray, last_use: np.ndarray, bound: int, hits: np.ndarray
) -> tuple[np.ndarray, int]:
    """Return whether each slot may be evicted, bool ``[slots]``, and the number of those.

    They have an id (``born`` is 0 or more), were last used before batch ``bound``, and are not
    among ``hits``, int32 slots, of which negative ones are skipped.
    """
    eligible = (born >= 0) & (last_use < bound)
    eligible[hits[hits >= 0]] = False
    return eligible, int(np.count_nonzero(eligible))


def commit(
    maps: Sequence[Map], changes: Sequence[Any], batch: int, power: int
) -> tuple[int, list[np.ndarray]]:
    """Carry out the changes of a batch, map by map (`jaxrec.tier.ids.id_map.commit`).

    Returns:
        The number of maps, or the index of the first one that refuses a new id or lacks the id of a
        victim: maps after it are as before. And for each map the ids of its victims.
    """
    evicted = [each.records.ids[each.victims] for each in changes]
    for number, (ids, each) in enumerate(zip(maps, changes, strict=True)):
        records = each.records
        records.born[each.victims] = -1
        if ids.remove(evicted[number])[1] < evicted[number].size:
            return number, evicted
        if ids.insert(each.new_ids, each.new_slots) < each.new_ids.size:
            return number, evicted
        records.ids[each.new_slots] = each.new_ids
        records.born[each.new_slots] = batch
        records.count[each.new_slots] = 0
        records.power[each.new_slots] = power
        each.slots[each.misses] = each.absent_slots[each.inverse]
    return len(changes), evicted


def fingerprint(lists: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum and the exclusive or of each list of int64 ids, uint64 ``[lists, 2]``."""
    bits = [each.view(np.uint64) for each in lists]
    sums = [(each.sum(dtype=np.uint64), np.bitwise_xor.reduce(each)) for each in bits]
    return np.array(sums, np.uint64).reshape(-1, 2)


def take_rows(array: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return rows of an array, uint8 ``[n, width]``: those at some places, zeros for negative ones.

    Args:
        array: uint8 ``[rows, width]``.
        places: int32 ``[n]``.
    """
    rows = array.take(places, axis=0, mode="clip")
    rows[places < 0] = 0
    return rows


def put_rows(array: np.ndarray, places: np.ndarray, rows: np.ndarray) -> None:
    """Set the rows of an array at some distinct places."""
    array[places] = rows


def record_tags(ids: np.ndarray, records: np.ndarray) -> np.ndarray:
    """Return the checksums of records, uint64 ``[n]``, never 0.

    Args:
        ids: int64 ``[n]``.
        records: uint8 ``[n, width]``.
    """
    count, width = records.shape
    words = np.zeros((count, -(-width // 8)), np.uint64)
    words.view(np.uint8)[:, :width] = records
    seeds = ids.view(np.uint64) * _STEP + np.uint64(width)
    lanes = [seeds + np.uint64(lane) for lane in range(_LANES)]
    for number, word in enumerate(words.T):
        lanes[number % _LANES] = _hash(lanes[number % _LANES], word)
    tags = np.full(count, _STEP)
    for lane in lanes:
        tags = _hash(tags, lane)
    return np.maximum(tags, np.uint64(1))


def _hash(hashes: np.ndarray, words: np.ndarray) -> np.ndarray:
    hashes = (hashes ^ words) * _FACTOR
    return hashes ^ (hashes >> np.uint64(32))


def read_records(
    file: RecordArray, slots: np.ndarray, ids: np.ndarray | None, threads: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read the records of some slots.

    Args:
        file: The records.
        slots: int64 ``[n]``; a negative slot has no record.
        ids: The ids of the slots, int64 ``[n]``; None: any ids.
        threads: Number of threads.

    Returns:
        Whether each slot has a record, bool ``[n]``; the ids that these have, int64 ``[n]``; and
        the records, uint8 ``[n, width]``, zeros where there is none.
    """
    rows = _rows(file)[np.maximum(slots, 0)]
    tags = rows[:, :8].copy().view(np.uint64)[:, 0]
    records = rows[:, file.head : file.head + file.width].copy()
    found_ids = rows[:, 8:16].copy().view(np.int64)[:, 0] if file.has_id else slots
    found = (slots >= 0) & (tags != 0)
    if ids is not None:
        found &= found_ids == ids
    found &= record_tags(found_ids, records) == tags
    records[~found] = 0
    return found, found_ids, records


def write_records(
    file: RecordArray,
    slots: np.ndarray,
    ids: np.ndarray,
    records: np.ndarray,
    through_map: bool,
    threads: int,
) -> int:
    """Write records.

    Args:
        file: The records.
        slots: Distinct slots, int64 ``[n]``.
        ids: int64 ``[n]``.
        records: uint8 ``[n, width]``.
        through_map: Whether pages that exist may be written through the map; not done here.
        threads: Number of threads.

    Returns:
        0, or the number of the error of a record that could not be written.
    """
    rows = np.zeros((slots.size, file.stride), np.uint8)
    rows[:, :8] = record_tags(ids, records)[:, None].view(np.uint8)
    if file.has_id:
        rows[:, 8:16] = ids[:, None].view(np.uint8)
    rows[:, file.head : file.head + file.width] = records
    for start, row in zip((file.start + slots * file.stride).tolist(), rows, strict=True):
        try:
            if os.pwrite(file.descriptor, row.tobytes(), start) < file.stride:
                return errno.ENOSPC
        except OSError as error:
            return error.errno or errno.EIO
    return 0


def erase_records(file: RecordArray, slots: np.ndarray) -> int:
    """Remove the records of some slots.

    Returns:
        0, or the number of the error of a record that could not be removed.
    """
    has_record = (_rows(file)[slots, :8] != 0).any(axis=1)
    for start in (file.start + slots[has_record] * file.stride).tolist():
        try:
            os.pwrite(file.descriptor, bytes(8), start)
        except OSError as error:
            return error.errno or errno.EIO
    return 0


def _rows(file: RecordArray) -> np.ndarray:
    """Return all records of a file, uint8 ``[room, stride]``."""
    room = (file.bytes.size - file.start) // file.stride
    return file.bytes[file.start : file.start + room * file.stride].reshape(room, file.stride)
