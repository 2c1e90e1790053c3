"""Operations on whole batches of ids, slots and eviction keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt8, UInt32, UInt64

from jaxrec.tier.ids import implementation
from jaxrec.tier.ids.implementation import checked

_MAX_SIZE = 2**31 - 1


def distinct(
    ids: Int64[np.ndarray, " n"],
) -> tuple[Int64[np.ndarray, " m"], Int32[np.ndarray, " n"], Int32[np.ndarray, " m"]]:
    """Return distinct ids in order of first occurrence, each id's index among them, and counts."""
    ids = checked(ids, np.int64, "ids")
    _check_size(ids, "ids")
    return implementation.current().distinct(ids)


def smallest(
    keys: UInt64[np.ndarray, " n"],
    eligible: Bool[np.ndarray, " n"] | UInt8[np.ndarray, " n"] | None,
    k: int,
) -> Int32[np.ndarray, " m"]:
    """Return the indices of the ``k`` smallest eligible keys, ordered by key, then index.

    There are fewer than ``k`` if fewer keys are eligible.
    """
    keys = checked(keys, np.uint64, "keys")
    _check_size(keys, "keys")
    if eligible is not None:
        # The native code reads bytes of 0 and 1, which NumPy's bool is without a copy.
        is_flags = isinstance(eligible, np.ndarray) and eligible.dtype == np.bool_
        eligible = checked(eligible, np.bool_ if is_flags else np.uint8, "eligible", keys.size)
    if k < 0:
        raise ValueError(f"k must be 0 or more, not {k}")
    return implementation.current().smallest(keys, eligible, min(k, keys.size))


class Search(NamedTuple):
    """Search of one table for rows that lose their ids.

    A row is eligible if it has an id (``records.born`` of 0 or more), was last used before batch
    ``bound``, and is not in ``hits``, whose negative items are skipped.
    """

    records: Any  # `jaxrec.tier.Records`: `count` and `last_use` change by the uses
    # Rows that each of some batches used, int32 [n], and its number: recorded before the search.
    uses: Sequence[tuple[np.ndarray, int]]
    bound: int
    hits: np.ndarray  # int32 [n]
    keys: np.ndarray | None  # uint64 [rows]; None: `records.last_use`
    # The `most` eligible rows of the smallest keys are found, or all if there are fewer; none if
    # there are fewer than `least`.
    least: int
    most: int
    eligible: np.ndarray | None = None  # bool [rows], gets whether each row is eligible


def search(searches: Sequence[Search]) -> list[tuple[int, Int32[np.ndarray, " _"]]]:
    """Search several tables; return the number of eligible rows of each, and the rows found.

    The rows are ordered by key, then index.
    """
    if not searches:
        return []
    searches = [_checked_search(each) for each in searches]
    done, results = implementation.current().search(searches)
    if done < len(searches):
        num_rows = searches[done].records.born.size
        raise ValueError(f"a use or hit of search {done} is of none of the {num_rows} rows")
    return results


def _checked_search(given: Search) -> Search:
    records, num_rows = given.records, given.records.born.size
    if given.keys is not None:
        given = given._replace(keys=checked(given.keys, np.uint64, "keys", num_rows))
    arrays: list[tuple[np.ndarray, Any, int]]
    arrays = [(records.born, np.int64, num_rows), (records.last_use, np.int64, num_rows),
              (records.count, np.uint32, num_rows), (given.hits, np.int32, given.hits.size),
              *((rows, np.int32, rows.size) for rows, _ in given.uses)]  # fmt: skip
    if given.eligible is not None:
        arrays.append((given.eligible, np.bool_, num_rows))
    for array, dtype, size in arrays:
        # `checked` may return a copy, and changes would be lost in it.
        if array.dtype != dtype or array.shape != (size,) or not array.flags.c_contiguous:
            raise ValueError(
                f"a search needs contiguous arrays {dtype.__name__} [{size}], got {array.dtype} "
                f"{list(array.shape)}"
            )
    if given.most < 0:
        raise ValueError(f"most must be 0 or more, not {given.most}")
    return given


def record_uses(
    slots: Int32[np.ndarray, " n"],
    batch: int,
    counts: UInt32[np.ndarray, " slots"],
    last_use: Int64[np.ndarray, " slots"],
) -> None:
    """Add 1 to ``counts`` for each use of a slot, and set its ``last_use`` to ``batch``, in place.

    Slots may repeat; negative ones are skipped. Counts stop at the largest uint32.
    """
    slots = checked(slots, np.int32, "slots")
    checked(counts, np.uint32, "counts")
    checked(last_use, np.int64, "last_use", counts.size)
    for name, array in (("counts", counts), ("last_use", last_use)):
        # `checked` may return a contiguous copy, and the changes would be lost in it.
        if not array.flags.carray:
            raise ValueError(f"{name} must be contiguous and writeable, since they change in place")
    recorded = implementation.current().record_uses(slots, batch, counts, last_use)
    if recorded < slots.size:
        raise ValueError(
            f"slot {slots[recorded]} at position {recorded}: there are {counts.size} counts"
        )


def _check_size(array: np.ndarray, name: str) -> None:
    if array.size > _MAX_SIZE:
        raise ValueError(f"there may be {_MAX_SIZE:,} {name}, not {array.size:,}")


def mix(numbers: np.ndarray, seed: int) -> np.ndarray:
    """Return a hash of 64-bit integers, uint64; different seeds give independent hashes.

    Source: the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014), of the numbers plus ``seed + 1`` times its increment.
    """
    offset = np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    bits = numbers.view(np.uint64) + offset
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
