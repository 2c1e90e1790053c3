"""Id maps, batch operations and records of a mapped file in NumPy.

They define what `jaxrec.tier.ids.library` computes in C++, and replace it where it is missing.
Callers check the arguments: `jaxrec.tier.ids.id_map` and `jaxrec.tier.ids.batch_ops`.
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
    """Records of equal size, one after another, in a mapped file.

    A record is a tag (8 bytes, 0 if the record is absent, otherwise its checksum), the id (8 bytes,
    if ``has_id``; otherwise the slot is the id), ``width`` bytes, and zeros up to a multiple of 8.
    """

    # The checksum is never 0. A hole of a sparse file, which reads as zeros, is thus full of absent
    # records. A record that was written in part has a wrong checksum and counts as absent, so that
    # a crash loses the record but never returns half of one.
    bytes: np.ndarray  # uint8, the whole file, mapped and shared
    # Bits of the pages of 4,096 bytes that surely exist in the file, uint64. Only these are written
    # through `bytes`: a write to a new page on a full disk kills the process.
    pages: np.ndarray
    seeks_data: bool  # whether `lseek` with SEEK_DATA finds further pages that exist
    descriptor: int
    start: int  # position of the first record in the file
    width: int
    has_id: bool

    @property
    def head(self) -> int:
        """Bytes of the tag and the id."""
        return 2 * _WORD if self.has_id else _WORD

    @property
    def stride(self) -> int:
        """Bytes from one record to the next."""
        return stride(self.width, self.has_id)


def stride(width: int, has_id: bool) -> int:
    """Return the bytes from one record of some width to the next."""
    whole = width + (2 * _WORD if has_id else _WORD)
    return (whole + _WORD - 1) // _WORD * _WORD


_MAX_COUNT = np.iinfo(np.uint32).max

# Constants of the checksum, as in native/row_records.cc. Four independent sums let the processor
# multiply words in parallel.
_LANES = 4
_FACTOR, _STEP = np.uint64(0xD6E8FEB86659FD93), np.uint64(0x9E3779B97F4A7C15)

# Whether `read_records` sets bits in `RecordArray.pages` for the pages that it reads.
MARKS_PAGES = False


class Map:
    """Map from ids to slots: sorted ids and their slots."""

    def __init__(self, capacity: int, num_ids: int | None = None):
        self._capacity, self._num_ids = capacity, num_ids
        # Replaced together, so that a reader in another thread sees both arrays of one state.
        self._items = np.empty(0, np.int64), np.empty(0, np.int32)
        self._changing = threading.Lock()

    def __len__(self) -> int:
        return self._items[0].size

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._items)

    def find(self, ids: np.ndarray, threads: int) -> np.ndarray:
        """Return the slot of each id, int32 ``[n]``, -1 for absent ids."""
        return _find(*self._items, ids)

    def insert(self, ids: np.ndarray, slots: np.ndarray) -> int:
        """Add ids and return their number; on failure change nothing.

        Return -1 without room, or the position of the first id that is in the map, occurs twice,
        cannot be held or has a negative slot.
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
        """Remove ids; return the slots that they had and the number of ids.

        If an id is absent or occurs twice, return its position instead and change nothing.
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
        """Return all ids in ascending order, and their slots."""
        ids, slots = self._items
        return ids.copy(), slots.copy()


def _find(sorted_ids: np.ndarray, slots: np.ndarray, ids: np.ndarray) -> np.ndarray:
    if sorted_ids.size == 0:
        return np.full(ids.size, -1, np.int32)
    places = np.minimum(np.searchsorted(sorted_ids, ids), sorted_ids.size - 1)
    return np.where(sorted_ids[places] == ids, slots[places], np.int32(-1))


def _occurs_before(ids: np.ndarray) -> np.ndarray:
    """Return whether each id repeats an earlier one, bool ``[n]``."""
    repeats = np.ones(ids.size, bool)
    repeats[np.unique(ids, return_index=True)[1]] = False
    return repeats


def lookup_all(
    maps: Sequence[Map], ids: Sequence[np.ndarray], threads: int
) -> list[tuple[np.ndarray, ...]]:
    """Return the fields of `jaxrec.tier.ids.id_map.Lookup` for each map."""
    lookups: list[tuple[np.ndarray, ...]] = []
    for each, of_map in zip(maps, ids, strict=True):
        slots = each.find(of_map, threads)
        positions = np.flatnonzero(slots < 0).astype(np.int32)
        lookups.append((slots, positions, *distinct(of_map[positions])))
    return lookups


def distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return distinct ids in order of first occurrence, each id's index among them, and counts."""
    # `np.unique` sorts by id; `order` sorts its results by first occurrence.
    unique, first, inverse, counts = np.unique(
        ids, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(first)
    rank = np.empty(order.size, np.int32)
    rank[order] = np.arange(order.size, dtype=np.int32)
    return unique[order], rank[inverse], counts[order].astype(np.int32)


def smallest(keys: np.ndarray, eligible: np.ndarray | None, k: int) -> np.ndarray:
    """Return the indices of the k smallest eligible keys, ordered by key, then index."""
    indices = np.arange(keys.size) if eligible is None else np.flatnonzero(eligible)
    order = np.argsort(keys[indices], kind="stable")[:k]
    return indices[order].astype(np.int32)


def record_uses(slots: np.ndarray, batch: int, counts: np.ndarray, last_use: np.ndarray) -> int:
    """Count a use of each slot and set its last use; return the number of slots.

    If a slot is outside ``counts``, return its position instead and record nothing.
    """
    outside = slots >= counts.size
    if outside.any():
        return int(outside.argmax())
    used = slots[slots >= 0]
    # In int64, so that a count at the largest uint32 stays there and does not wrap.
    sums = counts + np.bincount(used, minlength=counts.size)
    np.minimum(sums, _MAX_COUNT, out=counts, casting="unsafe")
    last_use[used] = batch
    return slots.size


def search(searches: Sequence[Any]) -> tuple[int, list[tuple[int, np.ndarray]]]:
    """Search tables (`Search`); return the number of searched ones and their results.

    A table without a row that is used or hit ends this: the number returned is then its index. Each
    result has the number of eligible rows and the rows found, int32 ``[m]``.
    """
    results: list[tuple[int, np.ndarray]] = []
    for each in searches:
        records, hits = each.records, each.hits
        for rows, batch in each.uses:
            if record_uses(rows, batch, records.count, records.last_use) < rows.size:
                return len(results), results
        if hits.max(initial=-1) >= records.born.size:
            return len(results), results
        eligible = (records.born >= 0) & (records.last_use < each.bound)
        eligible[hits[hits >= 0]] = False
        if each.eligible is not None:
            each.eligible[:] = eligible
        num_eligible = int(np.count_nonzero(eligible))
        keys = records.last_use.view(np.uint64) if each.keys is None else each.keys
        most = each.most if num_eligible >= each.least else 0
        results.append((num_eligible, smallest(keys, eligible, most)))
    return len(results), results


def commit(
    maps: Sequence[Map], changes: Sequence[Any], batch: int, power: int
) -> tuple[int, list[np.ndarray]]:
    """Carry out a batch's changes (`MapChange`); return the number of changed maps and evicted ids.

    A map that refuses a new id, or lacks an evicted one, ends this: the number returned is then its
    index, and later maps are unchanged. The evicted ids are int64 ``[e]`` for each map.
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


def find_evictions(tables: Sequence[Any]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return which places were evicted last by an eviction under way (`Evictions`), for each table.

    The arrays are int32 ``[n]``: the position of the eviction in ``numbers``, the index there, and
    the position among the places.
    """
    found = []
    for each in tables:
        last = np.where(each.places >= 0, each.last[each.places], 0)
        number = last >> 32
        which = np.searchsorted(each.numbers, number)
        is_here = which < each.numbers.size
        is_here[is_here] = each.numbers[which[is_here]] == number[is_here]
        index = last.astype(np.int32)  # the lower half
        positions = np.flatnonzero(is_here).astype(np.int32)
        found.append((which[is_here].astype(np.int32), index[is_here], positions))
    return found


def add_evictions(tables: Sequence[Any]) -> None:
    """Note that the distinct places of each table are evicted (`Evictions`), as number `next`."""
    for each in tables:
        first = each.next << 32
        each.last[each.places] = np.arange(first, first + each.places.size)


def fingerprint(lists: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum and the exclusive or of each list of int64 ids, uint64 ``[lists, 2]``."""
    bits = [each.view(np.uint64) for each in lists]
    sums = [(each.sum(dtype=np.uint64), np.bitwise_xor.reduce(each)) for each in bits]
    return np.array(sums, np.uint64).reshape(-1, 2)


def take_rows(arrays: Sequence[np.ndarray], places: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Gather rows of each array, uint8 ``[rows, width]``; return zeros for negative places."""
    taken = []
    for array, of_array in zip(arrays, places, strict=True):
        # "clip" takes row 0 for negative places; the default would take rows from the end.
        rows = array.take(of_array, axis=0, mode="clip")
        rows[of_array < 0] = 0
        taken.append(rows)
    return taken


def put_rows(
    arrays: Sequence[np.ndarray],
    places: Sequence[np.ndarray],
    parts: Sequence[Sequence[np.ndarray]],
) -> None:
    """Set rows of each array, at distinct places, to the parts of the rows side by side.

    Arrays are uint8 ``[rows, width]``; parts are uint8 ``[n, _]``, contiguous.
    """
    for array, of_array, of_rows in zip(arrays, places, parts, strict=True):
        array[of_array] = np.concatenate(of_rows, axis=1)


def copy_rows(
    sources: Sequence[Sequence[np.ndarray]],
    which: np.ndarray,
    index: np.ndarray,
    places: np.ndarray,
    rows: np.ndarray,
) -> None:
    """Set ``rows[places[i]]`` to row ``index[i]`` of source ``which[i]``, for distinct places.

    ``which``, ``index`` and ``places`` are int32 ``[n]``, ``rows`` is uint8 ``[_, width]``. Sources
    are the parts of their rows, as of `put_rows`.
    """
    for number, source in enumerate(sources):
        is_here = which == number
        rows[places[is_here]] = np.concatenate([part[index[is_here]] for part in source], axis=1)


def record_tags(ids: np.ndarray, records: np.ndarray) -> np.ndarray:
    """Return the checksums of records and their ids, uint64 ``[n]``, never 0."""
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
    """Read the records of slots, int64 ``[n]``; a negative slot has no record.

    Return whether each slot has a record (of the given id, unless ``ids`` is None), the ids of the
    records, int64 ``[n]``, and the records, uint8 ``[n, width]``, zeros for absent ones.
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
    """Write records, uint8 ``[n, width]``, at distinct slots; return 0 or an ``errno``.

    With ``through_map`` the C++ library may write existing pages through the mapped memory. This
    function never does.
    """
    # `pwrite` reports a full disk as an error; a write through the map would kill the process.
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
    """Remove the records of some slots; return 0 or an ``errno``."""
    # Slots without a record are skipped: to write their tag would fill a hole of the file.
    has_record = (_rows(file)[slots, :8] != 0).any(axis=1)
    for start in (file.start + slots[has_record] * file.stride).tolist():
        try:
            os.pwrite(file.descriptor, bytes(8), start)
        except OSError as error:
            return error.errno or errno.EIO
    return 0


def _rows(file: RecordArray) -> np.ndarray:
    """View the mapped file as one row for each slot, uint8 ``[room, stride]``."""
    room = (file.bytes.size - file.start) // file.stride
    return file.bytes[file.start : file.start + room * file.stride].reshape(room, file.stride)
