"""Operations on whole batches of ids, slots and eviction keys."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt8, UInt32, UInt64

from jaxrec.tier.ids import implementation
from jaxrec.tier.ids.implementation import checked

_MAX_SIZE = 2**31 - 1


def distinct(
    ids: Int64[np.ndarray, " n"],
) -> tuple[Int64[np.ndarray, " m"], Int32[np.ndarray, " n"], Int32[np.ndarray, " m"]]:
    """Return the distinct ids in the order of their first occurrence.

    Returns:
        The distinct ids, the position of each id among them, and how often each of them occurs.
    """
    ids = checked(ids, np.int64, "ids")
    _check_size(ids, "ids")
    return implementation.current().distinct(ids)


def smallest(
    keys: UInt64[np.ndarray, " n"],
    eligible: Bool[np.ndarray, " n"] | UInt8[np.ndarray, " n"] | None,
    k: int,
) -> Int32[np.ndarray, " m"]:
    """Return the indices of the smallest keys, ordered by key, and equal keys by index.

    Args:
        keys: The keys.
        eligible: Whether each key may be chosen; None: each may.
        k: Number of indices; there are fewer where fewer keys are eligible.
    """
    keys = checked(keys, np.uint64, "keys")
    _check_size(keys, "keys")
    if eligible is not None:
        is_flags = isinstance(eligible, np.ndarray) and eligible.dtype == np.bool_
        eligible = checked(eligible, np.bool_ if is_flags else np.uint8, "eligible", keys.size)
    if k < 0:
        raise ValueError(f"k must be 0 or more, not {k}")
    return implementation.current().smallest(keys, eligible, min(k, keys.size))


def mark_eligible(
    born: Int64[np.ndarray, " slots"],
    last_use: Int64[np.ndarray, " slots"],
    bound: int,
    hits: Int32[np.ndarray, " n"],
) -> tuple[Bool[np.ndarray, " slots"], int]:
    """Return whether each slot may be evicted, and the number of those that may.

    Args:
        born: 0 or more where the slot has an id.
        last_use: Number of the last batch that used the slot. It must be below ``bound``.
        bound: Number of a batch.
        hits: Slots that stay; negative ones are skipped.
    """
    born = checked(born, np.int64, "born")
    last_use = checked(last_use, np.int64, "last_use", born.size)
    hits = checked(hits, np.int32, "hits")
    if hits.max(initial=-1) >= born.size:
        raise ValueError(f"hit {hits.max()}: there are {born.size} slots")
    return implementation.current().mark_eligible(born, last_use, bound, hits)


def record_uses(
    slots: Int32[np.ndarray, " n"],
    batch: int,
    counts: UInt32[np.ndarray, " slots"],
    last_use: Int64[np.ndarray, " slots"],
) -> None:
    """Record the use of slots by a batch, in place.

    Args:
        slots: The slots; they may repeat, and negative ones are skipped.
        batch: Number of the batch.
        counts: Number of uses of each slot, to which each use adds 1. They stop at the largest
            uint32.
        last_use: The last batch that used each slot, which becomes ``batch``.
    """
    slots = checked(slots, np.int32, "slots")
    checked(counts, np.uint32, "counts")
    checked(last_use, np.int64, "last_use", counts.size)
    for name, array in (("counts", counts), ("last_use", last_use)):
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
    """Return well-mixed uint64 bits of 64-bit integers.

    The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014) of the numbers plus a multiple of its increment.
    """
    offset = np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    bits = numbers.view(np.uint64) + offset
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
