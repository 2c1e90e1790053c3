"""The hash function XXH64 of many byte strings at once, in NumPy.

https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, "XXH64 algorithm description". Each
step of the specification runs over all strings that are long enough for it.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, UInt64

# The specification's PRIME64_1 to PRIME64_5.
_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_U64 = 2**64 - 1

# Bytes that four lanes take at a time.
_STRIPE = 32

# Strings that are hashed at once, few enough for their hashes to stay in the cache.
_BLOCK = 1 << 14

Hashes = UInt64[np.ndarray, " strings"]


def hash_integers(values: np.ndarray, seed: int) -> Hashes:
    """Hash integers of 64 bits, each as its eight bytes, the lowest first."""
    words = values.reshape(-1).view(np.uint64)
    hashes = np.empty(words.size, np.uint64)
    for start in range(0, words.size, _BLOCK):
        block = words[start : start + _BLOCK]
        state = np.full(block.size, (seed + _P5 + 8) & _U64, np.uint64)
        hashes[start : start + _BLOCK] = _avalanche(_add_word(state, block))
    return hashes


def hash_strings(
    data: np.ndarray, offsets: Int[np.ndarray, " strings_and_one"], seed: int
) -> Hashes:
    """Hash byte strings that lie one behind the other.

    Args:
        data: ``[bytes]`` uint8.
        offsets: String ``i`` is ``data[offsets[i]:offsets[i + 1]]``.
        seed: 0 to 2**64 - 1.
    """
    data = np.ascontiguousarray(data, np.uint8)
    hashes = np.empty(offsets.size - 1, np.uint64)
    for start in range(0, hashes.size, _BLOCK):
        ends = offsets[start : start + _BLOCK + 1].astype(np.int64)
        hashes[start : start + _BLOCK] = _hash_block(data, ends[:-1], np.diff(ends), seed)
    return hashes


def _hash_block(data: np.ndarray, places: np.ndarray, lengths: np.ndarray, seed: int) -> Hashes:
    state = np.full(lengths.size, (seed + _P5) & _U64, np.uint64)
    places, left = places.copy(), lengths.copy()
    if (long := np.flatnonzero(lengths >= _STRIPE)).size:
        state[long] = _hash_stripes(data, places[long], lengths[long], seed)
        places += left & -_STRIPE
        left &= _STRIPE - 1
    state += lengths.astype(np.uint64)
    words, halves = _windows(data, "<u8"), _windows(data, "<u4")
    while (some := np.flatnonzero(left >= 8)).size:
        state[some] = _add_word(state[some], words[places[some]])
        places[some] += 8
        left[some] -= 8
    if (some := np.flatnonzero(left >= 4)).size:
        state[some] = _add_half(state[some], halves[places[some]])
        places[some] += 4
        left[some] -= 4
    while (some := np.flatnonzero(left)).size:
        state[some] = _add_byte(state[some], data[places[some]])
        places[some] += 1
        left[some] -= 1
    return _avalanche(state)


def _hash_stripes(data: np.ndarray, places: np.ndarray, lengths: np.ndarray, seed: int) -> Hashes:
    """Return the state after the 32-byte stripes of strings that have at least one."""
    starts = (seed + _P1 + _P2, seed + _P2, seed, seed - _P1)
    lanes = [np.full(lengths.size, start & _U64, np.uint64) for start in starts]
    words, stripes = _windows(data, "<u8"), lengths // _STRIPE
    for stripe in range(int(stripes.max())):
        some = np.flatnonzero(stripes > stripe)
        for number, lane in enumerate(lanes):
            word = words[places[some] + (stripe * _STRIPE + 8 * number)]
            lane[some] = _rotated(lane[some] + word * np.uint64(_P2), 31) * np.uint64(_P1)
    state = np.zeros(lengths.size, np.uint64)
    for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True):
        state += _rotated(lane, bits)
    for lane in lanes:
        state = (state ^ _scrambled(lane)) * np.uint64(_P1) + np.uint64(_P4)
    return state


def _windows(data: np.ndarray, dtype: str) -> np.ndarray:
    """Return the number of ``dtype`` that begins at each byte."""
    count = data.size - np.dtype(dtype).itemsize + 1
    return np.ndarray((count,), dtype, data, strides=(1,)) if count > 0 else np.empty(0, dtype)


def _scrambled(word: Hashes) -> Hashes:
    return _rotated(word * np.uint64(_P2), 31) * np.uint64(_P1)


def _add_word(state: Hashes, word: Hashes) -> Hashes:
    state = state ^ _scrambled(word)
    return _rotated(state, 27) * np.uint64(_P1) + np.uint64(_P4)


def _add_half(state: Hashes, half: np.ndarray) -> Hashes:
    state = state ^ (half.astype(np.uint64) * np.uint64(_P1))
    return _rotated(state, 23) * np.uint64(_P2) + np.uint64(_P3)


def _add_byte(state: Hashes, byte: np.ndarray) -> Hashes:
    state = state ^ (byte.astype(np.uint64) * np.uint64(_P5))
    return _rotated(state, 11) * np.uint64(_P1)


def _avalanche(state: Hashes) -> Hashes:
    state = (state ^ (state >> np.uint64(33))) * np.uint64(_P2)
    state = (state ^ (state >> np.uint64(29))) * np.uint64(_P3)
    return state ^ (state >> np.uint64(32))


def _rotated(values: Hashes, bits: int) -> Hashes:
    return (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))
