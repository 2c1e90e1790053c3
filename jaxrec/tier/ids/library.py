"""Id maps and batch operations in C++, by a library that is built with the package.

`jaxrec.tier.ids.reference` has the same functions and classes, with docstrings. ctypes releases the
GIL while the library computes, so that planning runs beside the training loop.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import pathlib
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrec.tier.ids.reference import RecordArray

_LIBRARY = pathlib.Path(__file__).parents[1] / "native" / "libjaxrec_tier.so"
# Version of the functions in native/library.cc: both change together.
_INTERFACE = 7

_COUNT, _HANDLE, _BYTE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char


# ctypes calls `from_param` itself, so that the calls below can name arrays, not their addresses.
class _Array:
    """Argument type of a NumPy array or None, which the library gets as an address."""

    @staticmethod
    def from_param(array: np.ndarray | None) -> Any:
        if array is None:
            return None
        try:
            return ctypes.byref(_first_byte(array))
        except (TypeError, ValueError):
            return ctypes.c_void_p(array.ctypes.data)


# The first arguments of functions on records: `RecordArray`'s `bytes`, and numbers.
_FILE = (_Array, *[_COUNT] * 5, _Array, _COUNT)

# Argument types of the library's functions. A function that is not in _RESULTS returns a count.
_ARGUMENTS = {
    "id_map_new": (_COUNT, ctypes.c_uint64, _COUNT),
    "id_map_delete": (_HANDLE,),
    "id_map_num_bytes": (_HANDLE,),
    "id_map_size": (_HANDLE,),
    "id_map_find": (_HANDLE, _Array, _COUNT, _Array, _COUNT),
    "id_maps_look_up": (_COUNT, *[_Array] * 4, _COUNT, ctypes.c_uint64, *[_Array] * 5),
    "id_map_insert": (_HANDLE, _Array, _Array, _COUNT),
    "id_map_remove": (_HANDLE, _Array, _COUNT, _Array),
    "id_map_items": (_HANDLE, _COUNT, _Array, _Array),
    "distinct": (_Array, _COUNT, ctypes.c_uint64, _Array, _Array, _Array),
    "smallest": (_Array, _Array, _COUNT, _COUNT, _Array),
    "search": (_Array, _COUNT),
    "commit": (_Array, _COUNT, _COUNT, _COUNT),
    "find_evictions": (_Array, _COUNT, *[_Array] * 4),
    "add_evictions": (_Array, _COUNT),
    "fingerprint": (_Array, _Array, _COUNT, _Array),
    "take_rows": (_Array, _COUNT),
    "put_rows": (_Array, _COUNT),
    "copy_rows": (_Array, _COUNT, _Array, _Array, _COUNT, _Array, _COUNT, _Array),
    "record_uses": (_Array, _COUNT, _COUNT, _Array, _Array, _COUNT),
    "read_records": (*_FILE, _Array, _Array, _COUNT, *[_Array] * 3, _COUNT),
    "write_records": (*_FILE, _Array, _Array, _COUNT, _Array, _COUNT),
    "erase_records": (_Array, _COUNT, _COUNT, _COUNT, _Array, _COUNT),
}

# Number of fields of `Search` in native/batch_ops.h, and the index of `num_found`, which
# `num_eligible` follows.
_SEARCH_FIELDS, _NUM_FOUND = 16, 13

# Whether `read_records` sets bits in `RecordArray.pages` for the pages that it reads.
MARKS_PAGES = True

_VOID = (
    "id_map_delete", "id_map_find", "find_evictions", "add_evictions", "fingerprint", "take_rows",
    "put_rows", "copy_rows", "read_records",
)  # fmt: skip
_RESULTS = {"id_map_new": _HANDLE, **dict.fromkeys(_VOID)}


@functools.cache
def _load() -> ctypes.CDLL | str:
    """Load the library, or return why there is none."""
    if not _LIBRARY.exists():
        return (
            "the native library was not built, which needs a C++17 compiler: install jaxrec again, "
            "in a checkout by `pip install -e .`"
        )
    library = ctypes.CDLL(str(_LIBRARY))
    library.jaxrec_tier_interface.restype = _COUNT
    if library.jaxrec_tier_interface() != _INTERFACE:
        return "the native library was built from another version of jaxrec: reinstall jaxrec"
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, f"jaxrec_{name}")
        function.argtypes = arguments
        function.restype = _RESULTS.get(name, _COUNT)
    return library


def missing() -> str | None:
    """Return why the native library cannot be used here; None: it can."""
    library = _load()
    return library if isinstance(library, str) else None


@functools.cache
def _library() -> ctypes.CDLL:
    library = _load()
    if isinstance(library, str):
        raise RuntimeError(library)
    return library


def _seed() -> int:
    """Draw a random 64-bit seed for the hash of a map."""
    # From the operating system, so that ids cannot be chosen to collide. Results do not depend on
    # it: `items` sorts, and slots come from the caller.
    return secrets.randbits(64)


# Seed of the maps that live no longer than a call.
_PASSING_SEED = _seed()


class Map:
    """Map from ids to slots, in native memory."""

    def __init__(self, capacity: int, num_ids: int | None = None):
        handle = _library().jaxrec_id_map_new(capacity, _seed(), num_ids or 0)
        self._handle = ctypes.c_void_p(handle)
        if not self._handle:
            raise MemoryError(f"no memory for a map of {capacity:,} ids")
        delete = weakref.finalize(self, _library().jaxrec_id_map_delete, self._handle)
        # As Python ends, threads that use the map may still run; the system takes its memory back.
        delete.atexit = False

    def __len__(self) -> int:
        return _library().jaxrec_id_map_size(self._handle)

    @property
    def nbytes(self) -> int:
        return _library().jaxrec_id_map_num_bytes(self._handle)

    def find(self, ids: np.ndarray, threads: int) -> np.ndarray:
        slots = np.empty(ids.size, np.int32)
        _library().jaxrec_id_map_find(self._handle, ids, ids.size, slots, threads)
        return slots

    def insert(self, ids: np.ndarray, slots: np.ndarray) -> int:
        return _library().jaxrec_id_map_insert(self._handle, ids, slots, ids.size)

    def remove(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        slots = np.empty(ids.size, np.int32)
        removed = _library().jaxrec_id_map_remove(self._handle, ids, ids.size, slots)
        return slots, removed

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        size, room = len(self), -1
        while size > room:  # Another thread may add ids between the calls.
            room = size
            ids, slots = np.empty(room, np.int64), np.empty(room, np.int32)
            size = _library().jaxrec_id_map_items(self._handle, room, ids, slots)
        order = np.argsort(ids[:size])
        return ids[order], slots[order]


def lookup_all(
    maps: Sequence[Map], ids: Sequence[np.ndarray], threads: int
) -> list[tuple[np.ndarray, ...]]:
    # The library writes the absent ids of all maps one after the other into arrays that are large
    # enough for any batch; `sizes` says where each map's part ends.
    slots = [np.empty(each.size, np.int32) for each in ids]
    counts = np.array([each.size for each in ids], np.int64)
    total = int(counts.sum())
    positions, inverse, occurrences = (np.empty(total, np.int32) for _ in range(3))
    unique, sizes = np.empty(total, np.int64), np.empty((len(maps), 2), np.int64)
    handles = np.array([each._handle.value for each in maps], np.uintp)
    given, taken = (np.array(_addresses(*arrays), np.uintp) for arrays in (ids, slots))
    outputs = positions, unique, inverse, occurrences, sizes
    function = _library().jaxrec_id_maps_look_up
    _checked(function(len(maps), handles, given, counts, taken, threads, _PASSING_SEED, *outputs))
    lookups: list[tuple[np.ndarray, ...]] = []
    start = first = 0
    for of_map, (num_positions, num_unique) in zip(slots, sizes.tolist(), strict=True):
        here = slice(start, start := start + num_positions)
        once = slice(first, first := first + num_unique)
        lookups.append((of_map, positions[here], unique[once], inverse[here], occurrences[once]))
    return lookups


def distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    unique, inverse = np.empty(ids.size, np.int64), np.empty(ids.size, np.int32)
    counts = np.empty(ids.size, np.int32)
    size = _checked(
        _library().jaxrec_distinct(ids, ids.size, _PASSING_SEED, unique, inverse, counts)
    )
    # Copies, so that a batch with few distinct ids does not hold memory for all of its ids.
    return unique[:size].copy(), inverse, counts[:size].copy()


def smallest(keys: np.ndarray, eligible: np.ndarray | None, k: int) -> np.ndarray:
    indices = np.empty(k, np.int32)
    size = _checked(_library().jaxrec_smallest(keys, eligible, keys.size, k, indices))
    return indices[:size]


def record_uses(slots: np.ndarray, batch: int, counts: np.ndarray, last_use: np.ndarray) -> int:
    return _library().jaxrec_record_uses(slots, slots.size, batch, counts, last_use, counts.size)


def search(searches: Sequence[Any]) -> tuple[int, list[tuple[int, np.ndarray]]]:
    used = [(rows, batch) for each in searches for rows, batch in each.uses]
    # One row per use and per table: the fields of `Uses` and of `Search` in native/batch_ops.h, in
    # their order, 8 bytes each.
    uses = np.array([(_address(rows), rows.size, batch) for rows, batch in used], np.int64)
    ends = np.cumsum([0, *(each.most for each in searches)]).tolist()
    found = np.empty(ends[-1], np.int32)
    first_use, first_found = _address(uses), _address(found)
    fields = np.empty((len(searches), _SEARCH_FIELDS), np.int64)
    for number, each in enumerate(searches):
        records = each.records
        fields[number] = (
            *_addresses(records.born, records.last_use, records.count),
            records.born.size,
            first_use,
            len(each.uses),
            each.bound,
            _address(each.hits),
            each.hits.size,
            0 if each.keys is None else _address(each.keys),
            each.least,
            each.most,
            first_found + found.itemsize * ends[number],
            0,
            0,
            0 if each.eligible is None else _address(each.eligible),
        )
        first_use += uses.itemsize * 3 * len(each.uses)
    done = _checked(_library().jaxrec_search(fields, len(searches)))
    numbers = fields[:, _NUM_FOUND : _NUM_FOUND + 2].tolist()
    return done, [
        (num_eligible, found[start : start + num_found])
        for start, (num_found, num_eligible) in zip(ends, numbers, strict=False)
    ]


def commit(
    maps: Sequence[Map], changes: Sequence[Any], batch: int, power: int
) -> tuple[int, list[np.ndarray]]:
    evicted = [np.empty(each.victims.size, np.int64) for each in changes]
    # One row per map: the fields of `Change` in native/batch_ops.h, in their order, 8 bytes each.
    fields = np.array(
        [
            (
                handle._handle.value,
                *_addresses(records.ids, records.born, records.count, records.power, each.victims),
                each.victims.size,
                *_addresses(evicted_ids, each.new_ids, each.new_slots),
                each.new_ids.size,
                *_addresses(each.slots, each.misses, each.inverse),
                each.misses.size,
                *_addresses(each.absent_slots),
            )
            for handle, each, evicted_ids in zip(maps, changes, evicted, strict=True)
            for records in [each.records]
        ],
        np.uint64,
    )
    done = _checked(_library().jaxrec_commit(fields, len(changes), batch, power))
    return done, evicted


def find_evictions(tables: Sequence[Any]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    total = sum(each.places.size for each in tables)
    which, index, positions = np.empty((3, total), np.int32)
    sizes = np.empty(len(tables), np.int64)
    fields = _evictions(tables)
    _library().jaxrec_find_evictions(fields, len(tables), which, index, positions, sizes)
    stops = np.cumsum(sizes).tolist()
    parts = [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    return [(which[part], index[part], positions[part]) for part in parts]


def add_evictions(tables: Sequence[Any]) -> None:
    _library().jaxrec_add_evictions(_evictions(tables), len(tables))


def _evictions(tables: Sequence[Any]) -> np.ndarray:
    # One row per table: the fields of `Evictions` in native/batch_ops.h.
    return np.array(
        [
            (
                *_addresses(each.last, each.places),
                each.places.size,
                _address(each.numbers),
                each.numbers.size,
                each.next,
            )
            for each in tables
        ],
        np.int64,
    )


def fingerprint(lists: Sequence[np.ndarray]) -> np.ndarray:
    sums = np.empty((len(lists), 2), np.uint64)
    sizes = np.array([each.size for each in lists], np.int64)
    starts = np.array(_addresses(*lists), np.uintp)
    _library().jaxrec_fingerprint(starts, sizes, len(lists), sums)
    return sums


def take_rows(arrays: Sequence[np.ndarray], places: Sequence[np.ndarray]) -> list[np.ndarray]:
    rows = [
        np.empty((of_array.size, array.shape[1]), np.uint8)
        for array, of_array in zip(arrays, places, strict=True)
    ]
    # One row per array: the fields of `Rows` in native/row_records.h.
    fields = np.array(
        [
            (*_addresses(array, of_array), array.shape[1], of_array.size, _address(taken))
            for array, of_array, taken in zip(arrays, places, rows, strict=True)
        ],
        np.int64,
    )
    _library().jaxrec_take_rows(fields, len(arrays))
    return rows


def put_rows(
    arrays: Sequence[np.ndarray],
    places: Sequence[np.ndarray],
    parts: Sequence[Sequence[np.ndarray]],
) -> None:
    of_arrays = [_parts(each) for each in parts]
    # One row per array: the fields of `NewRows` in native/row_records.h.
    fields = np.array(
        [
            (
                _address(array),
                array.shape[1],
                _address(of_array),
                of_array.size,
                _address(of_parts),
                len(of_parts),
            )
            for array, of_array, of_parts in zip(arrays, places, of_arrays, strict=True)
        ],
        np.int64,
    )
    _library().jaxrec_put_rows(fields, len(arrays))


def copy_rows(
    sources: Sequence[Sequence[np.ndarray]],
    which: np.ndarray,
    index: np.ndarray,
    places: np.ndarray,
    rows: np.ndarray,
) -> None:
    parts = np.array([_parts(each) for each in sources], np.int64)
    given = parts, len(sources[0]), which, index, rows.shape[1], places, places.size, rows
    _library().jaxrec_copy_rows(*given)


def _parts(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the fields of `Part` in native/row_records.h, ``[parts, 3]``."""
    widths = [each.shape[1] for each in parts]
    offsets = itertools.accumulate(widths, initial=0)
    return np.array(
        [
            (_address(each), width, offset)
            for each, width, offset in zip(parts, widths, offsets, strict=False)
        ],
        np.int64,
    )


def read_records(
    file: RecordArray, slots: np.ndarray, ids: np.ndarray | None, threads: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    found, out = np.empty(slots.size, bool), np.empty((slots.size, file.width), np.uint8)
    # The library fills in ids only where the file has them and the caller does not know them.
    found_ids = slots if ids is None else ids
    if file.has_id and ids is None:
        found_ids = np.empty(slots.size, np.int64)
    given, outputs = (file.pages, file.seeks_data, slots, ids), (found_ids, found, out)
    _library().jaxrec_read_records(*_file(file), *given, slots.size, *outputs, threads)
    return found, found_ids, out


def write_records(
    file: RecordArray,
    slots: np.ndarray,
    ids: np.ndarray,
    records: np.ndarray,
    through_map: bool,
    threads: int,
) -> int:
    pages = file.pages if through_map else None
    given = pages, file.seeks_data, slots, ids, slots.size, records, threads
    return _library().jaxrec_write_records(*_file(file), *given)


def erase_records(file: RecordArray, slots: np.ndarray) -> int:
    return _library().jaxrec_erase_records(
        file.bytes, file.start, file.stride, file.descriptor, slots, slots.size
    )


def _file(file: RecordArray) -> tuple[Any, ...]:
    return file.bytes, file.start, file.stride, file.width, file.has_id, file.descriptor


def _addresses(*arrays: np.ndarray) -> list[int]:
    return [_address(array) for array in arrays]


def _address(array: np.ndarray) -> int:
    try:
        return ctypes.addressof(_first_byte(array))
    except (TypeError, ValueError):
        return array.ctypes.data


def _first_byte(array: Any) -> ctypes.c_char:
    # An address five times as fast as `array.ctypes.data`, which a batch of 26 tables would take
    # 500 times. Empty and read-only arrays have no such buffer: TypeError or ValueError.
    return _BYTE.from_buffer(array)


def _checked(size: int) -> int:
    if size < 0:
        raise MemoryError("no memory for the operation")
    return size
