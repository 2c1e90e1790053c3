"""Strings and 64-bit ids of any source as row indices of a table, by the stable hash XXH64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int, UInt64

from jaxrec.ragged.arrow import map_values, null_error
from jaxrec.ragged.columns import concrete, is_integer

if TYPE_CHECKING:
    import pyarrow as pa


def hash_ids(values: Any, num_embeddings: int | None, seed: int = 0) -> Any:
    """Hash ids or strings to row indices, the same on every platform and in every version.

    The hash is XXH64 (https://github.com/Cyan4973/xxHash). A string is hashed as its UTF-8 bytes,
    so it equals the hash of those bytes. An integer is hashed as its 64-bit two's complement, the
    lowest byte first, whatever the type that holds it. The number 5 and the string "5" differ.

    Different values may share a row: among ``n`` distinct values, about
    ``n**2 / (2 * num_embeddings)`` pairs. Give the table several times ``n`` rows, or use
    `jaxrec.data.Vocabulary`, which shares no rows.

    Args:
        values: NumPy array of integers, strings or bytes, of any shape; Arrow array or chunked
            array of integers, strings or binary values, of dictionaries or lists of them; list of
            integers, of strings or of bytes, or list of such lists.
        num_embeddings: Rows of the table, 1 to 2**31 - 1. None: return the 64-bit hashes.
        seed: 0 to 2**64 - 1; another seed is another hash function.

    Returns:
        int32 row indices in ``[0, num_embeddings)``, ``hash % num_embeddings``, or the uint64
        hashes. A NumPy array of the same shape; for Arrow an array with the same chunks, lists and
        null lists; for a list a NumPy array; for a list of lists a list of NumPy arrays.

    Raises:
        TypeError: The values are neither integers, strings nor bytes, or are traced.
        ValueError: A value is null, an integer does not fit 64 bits, or ``num_embeddings`` or
            ``seed`` is out of range.

    Example:
        >>> import numpy as np
        >>> hash_ids(["anna", "bob", "anna"], num_embeddings=1000)
        array([896,  27, 896], dtype=int32)
        >>> hash_ids(np.array([7], np.int8), None) == hash_ids(np.array([7], np.uint64), None)
        array([ True])
    """
    if num_embeddings is not None and not 1 <= num_embeddings < 2**31:
        raise ValueError(f"num_embeddings must be from 1 to 2**31 - 1, got {num_embeddings}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be from 0 to 2**64 - 1, got {seed}")
    seed = int(seed)

    def rows(hashes: np.ndarray) -> np.ndarray:
        if num_embeddings is None:
            return hashes
        # The remainder favours low rows by less than 2**-33 of their share: there are 2**64 hashes
        # and fewer than 2**31 rows.
        return (hashes % np.uint64(num_embeddings)).astype(np.int32)

    if type(values).__module__.startswith("pyarrow"):
        return map_values(values, lambda flat: rows(_hash_flat_arrow(flat, seed)))
    if isinstance(values, list | tuple):
        if values and all(isinstance(value, list | tuple | np.ndarray) for value in values):
            ends = np.cumsum([len(value) for value in values])
            flat = [item for value in values for item in value]
            return np.split(rows(_hash_objects(flat, seed)), ends[:-1])
        return rows(_hash_objects(values, seed))
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise null_error(f"value {int(np.flatnonzero(np.ma.getmaskarray(values))[0])}")
    array = concrete("values", values)
    if array.dtype.kind in "iu":
        wide = array.astype(np.int64 if array.dtype.kind == "i" else np.uint64, order="C")
        return rows(hash_integers(wide, seed)).reshape(array.shape)
    return rows(_hash_objects(array.reshape(-1).tolist(), seed)).reshape(array.shape)


def _hash_objects(values: Sequence[Any], seed: int) -> np.ndarray:
    """Hash Python objects: all integers, or all strings, or all bytes."""
    kinds = set(map(type, values))
    if all(issubclass(kind, str) for kind in kinds):
        text = "".join(values)
        # ASCII characters are single bytes. So one call encodes all strings, and their lengths give
        # the offsets.
        if text.isascii():
            return _hash_joined(text.encode(), values, seed)
        values = [value.encode() for value in values]
        return _hash_joined(b"".join(values), values, seed)
    if all(issubclass(kind, bytes) for kind in kinds):
        return _hash_joined(b"".join(values), values, seed)
    if all(map(is_integer, kinds)):
        for position, value in enumerate(values):
            if not -(2**63) <= value < 2**64:
                raise ValueError(f"value {position} is {value}, which does not fit 64 bits")
        words = [int(value) & (2**64 - 1) for value in values]
        return hash_integers(np.array(words, np.uint64), seed)
    raise _unfit(values)


def _hash_joined(data: bytes, values: Sequence[Any], seed: int) -> np.ndarray:
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=offsets[1:])
    return hash_strings(np.frombuffer(data, np.uint8), offsets, seed)


def _unfit(values: Sequence[Any]) -> Exception:
    """Return the error for values that are null, of a wrong type, or of several types."""
    for position, value in enumerate(values):
        if value is None or value != value:  # NaN, pandas' null, differs from itself
            return null_error(f"value {position}")
        if not (isinstance(value, str | bytes) or is_integer(type(value))):
            return TypeError(
                f"value {position} is of type {type(value).__name__}; expected integers, strings "
                "or bytes"
            )
    names = sorted({type(value).__name__ for value in values})
    return TypeError(f"values mix {' and '.join(names)}; hash values of one kind at a time")


def _hash_flat_arrow(array: pa.Array, seed: int) -> np.ndarray:
    """Hash an Arrow array without nulls and without lists."""
    import pyarrow as pa

    kind = array.type
    # A dictionary's strings are hashed once each, not once per row. A null among them shifts the
    # codes, so such a column is decoded first.
    if isinstance(kind, pa.DictionaryType):
        dictionary = array.dictionary.drop_null()
        if len(dictionary) < len(array.dictionary):
            return _hash_flat_arrow(array.cast(kind.value_type), seed)
        return _hash_flat_arrow(dictionary, seed)[array.indices.to_numpy()]
    if pa.types.is_integer(kind):
        wide = pa.int64() if pa.types.is_signed_integer(kind) else pa.uint64()
        return hash_integers(array.cast(wide).to_numpy(), seed)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        array = array.cast(pa.large_binary())
    elif pa.types.is_fixed_size_binary(kind):
        array = array.cast(pa.binary())
    kinds = (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())
    if array.type not in kinds:
        if pa.types.is_null(kind) and not len(array):
            return np.empty(0, np.uint64)
        raise TypeError(
            f"values are of Arrow type {kind}; expected integers, strings or binary values, or "
            "dictionaries or lists of them"
        )
    # The buffers are those of the whole column, of which `array` may be a slice.
    _, offsets, data = array.buffers()
    width = np.int64 if array.type in kinds[2:] else np.int32
    starts = np.zeros(1, width)  # an empty array may have no offsets
    if len(array):
        starts = np.frombuffer(offsets, width)[array.offset :][: len(array) + 1]
    return hash_strings(np.frombuffer(data or b"", np.uint8), starts, seed)


# XXH64 of many byte strings at once: each step of its specification
# (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md) runs over all strings that are
# long enough for it. A loop in Python over the strings would take a microsecond for each.

# The specification's PRIME64_1 to PRIME64_5.
_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_U64 = 2**64 - 1

# Bytes of a stripe: four lanes of eight.
_STRIPE = 32

# Strings hashed at once: each step reads and writes the states again, so these stay in the cache.
_BLOCK = 1 << 14

Hashes = UInt64[np.ndarray, " strings"]


def hash_integers(values: np.ndarray, seed: int) -> Hashes:
    """Hash 64-bit integers as eight bytes each, the lowest first."""
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
    """Hash byte strings; string ``i`` is ``data[offsets[i]:offsets[i + 1]]``, uint8."""
    data = np.ascontiguousarray(data, np.uint8)
    hashes = np.empty(offsets.size - 1, np.uint64)
    for start in range(0, hashes.size, _BLOCK):
        ends = offsets[start : start + _BLOCK + 1].astype(np.int64)
        hashes[start : start + _BLOCK] = _hash_block(data, ends[:-1], np.diff(ends), seed)
    return hashes


def _hash_block(data: np.ndarray, places: np.ndarray, lengths: np.ndarray, seed: int) -> Hashes:
    # In the order of the specification: whole stripes, then the remaining words of 8 bytes, at most
    # one of 4, and single bytes. `left` counts the bytes that a string still has.
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
    """View ``data`` as the numbers of ``dtype`` that begin at each byte."""
    # Strings begin at any byte, and a view with a stride of one byte needs no copy to align them.
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
