"""Parsing of well-formed lines of Criteo's click logs by NumPy, many fields at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Int, UInt32, UInt64

from jaxrec.data.transforms import NUM_CATEGORICAL, NUM_DENSE

COLUMNS = 1 + NUM_DENSE + NUM_CATEGORICAL
HEX_DIGITS = 8

# Number of characters in a word.
_WORD = 8

# Bytes of text that are parsed at once: large enough for NumPy, small enough for caches.
_PIECE_BYTES = 1 << 19

# Arrow's view of a field and its separator: the size, then up to 12 characters in two words.
_VIEW = np.dtype({"names": ["size", "word", "rest"], "formats": ["<i4", "<u8", "<u4"]})

# Number of characters of -2147483648, the longest integer without leading zeros.
_LONGEST = 11


class Fields(NamedTuple):
    """The columns of some lines.

    Attributes:
        labels: ``[rows]`` int32, 0 or 1.
        counts: ``[13, rows]`` int32; missing ones are 0.
        hashes: ``[26, rows]`` uint32; missing ones are 0.
    """

    labels: Int[np.ndarray, " rows"]
    counts: Int[np.ndarray, "num_dense rows"]
    hashes: UInt32[np.ndarray, "num_categorical rows"]


def parse_fields(lines: bytes | bytearray, rows: int) -> Fields | None:
    """Parse ``rows`` lines, each with its newline.

    A well-formed line is a label, 13 integers of 32 bits in up to 11 characters and 26 ids of eight
    hexadecimal digits, separated by tabs. A missing integer or id is an empty field.

    Returns:
        The columns; None if a line is not well-formed.
    """
    columns = Fields(
        np.empty(rows, np.int32),
        np.empty((NUM_DENSE, rows), np.int32),
        np.empty((NUM_CATEGORICAL, rows), np.uint32),
    )
    start = row = 0
    while start < len(lines):
        stop = lines.rfind(b"\n", start, start + _PIECE_BYTES) + 1
        stop = stop or lines.index(b"\n", start) + 1
        views = _views(lines, start, stop)
        if views is None:
            return None
        rest = Fields(*(column[..., row : row + len(views)] for column in columns))
        if not _parse_views(views, rest):
            return None
        start, row = stop, row + len(views)
    return columns if row == rows else None


def _views(lines: bytes | bytearray, start: int, stop: int) -> np.ndarray | None:
    """Return the fields of the lines ``[start, stop)``; None if a line lacks fields.

    Returns:
        ``[rows, 40]`` structures of `_VIEW`.
    """
    characters = np.frombuffer(lines, np.uint8, stop - start, start)
    ends = np.flatnonzero(characters - np.uint8(ord("\t")) <= ord("\n") - ord("\t"))
    if len(ends) % COLUMNS or not (characters[ends[COLUMNS - 1 :: COLUMNS]] == ord("\n")).all():
        return None
    offsets = np.zeros(len(ends) + 1, np.int32)
    offsets[1:] = ends + 1
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(characters)]
    fields = pa.Array.from_buffers(pa.binary(), len(ends), buffers).cast(pa.binary_view())
    return np.frombuffer(fields.buffers()[1], _VIEW, len(ends)).reshape(-1, COLUMNS)


def _parse_views(views: np.ndarray, columns: Fields) -> bool:
    """Parse fields into the columns; return whether they are well-formed."""
    labels, counts, hashes = np.split(views, (1, 1 + NUM_DENSE), axis=1)
    values = labels["word"][:, 0].astype(np.uint8) - np.uint8(ord("0"))
    if not (labels["size"] == 2).all() or not (values <= 1).all():
        return False
    columns.labels[:] = values

    numbers = _integers(counts)
    if numbers is None:
        return False
    columns.counts[:] = numbers.T

    lengths = hashes["size"] - 1
    if np.bitwise_or.reduce(lengths, axis=None) & ~HEX_DIGITS:  # 0 or 8
        return False
    words = hashes["word"].copy()
    np.copyto(words, _repeated(b"0"), where=lengths == 0)
    if not _parse_hexadecimals(words):
        return False
    columns.hashes[:] = words.T
    return True


def _repeated(character: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(character * _WORD, "little"))


def _integers(fields: np.ndarray) -> Int[np.ndarray, "*shape"] | None:
    """Parse integers; empty fields are 0.

    Args:
        fields: ``[*shape]`` structures of `_VIEW`.

    Returns:
        The numbers; None if a field is not an integer of 32 bits in up to 11 characters.
    """
    words, lengths = fields["word"].copy(), fields["size"] - 1
    negative = np.nonzero(words.astype(np.uint8) == ord("-"))
    long = np.nonzero(lengths > _WORD)
    rest = lengths[long] - _WORD
    if (lengths[negative] == 1).any() or (rest > _LONGEST - _WORD).any():
        return None
    words[negative] ^= np.uint64(ord("-") ^ ord("0"))
    heads, tails = words[long], fields["rest"][long].astype(np.uint64)
    if not (
        _parse_decimals(words, lengths)
        and _parse_decimals(heads, np.full_like(rest, _WORD))
        and _parse_decimals(tails, rest)
    ):
        return None
    numbers = words.view(np.int64)
    numbers[long] = heads.view(np.int64) * 10**rest + tails.view(np.int64)
    numbers[negative] *= -1
    return numbers if (numbers[long] == numbers[long].astype(np.int32)).all() else None


def _parse_decimals(
    words: UInt64[np.ndarray, "*shape"], lengths: Int[np.ndarray, "*shape"]
) -> bool:
    """Parse the first characters of each word, in place; return whether all are digits.

    A length of 0, or of more than a word, gives 0.
    """
    words ^= _repeated(b"0")
    # Move the last character to the highest byte; zeros fill the word.
    words <<= ((_WORD - lengths) * 8).astype(np.uint64)
    wrong = (words + _repeated(b"\x06")) | words
    if np.bitwise_or.reduce(wrong, axis=None) & _repeated(b"\xf0"):
        return False
    _join_digits(words, 10)
    return True


def _parse_hexadecimals(words: UInt64[np.ndarray, "*shape"]) -> bool:
    """Parse eight hexadecimal digits in each word, in place; return whether all are digits."""
    characters = words.view(np.uint8)
    is_letter = (characters | np.uint8(0x20)) - np.uint8(ord("a")) < 6
    characters -= np.uint8(ord("0"))
    if not (is_letter | (characters < 10)).all():
        return False
    # The low half of the byte of a letter is its value less 9.
    characters &= np.uint8(0x0F)
    characters += is_letter * np.uint8(9)
    _join_digits(words, 16)
    return True


def _join_digits(words: UInt64[np.ndarray, "*shape"], base: int) -> None:
    """Replace the eight digits in the bytes of each word by their number, in place."""
    for bits in (8, 16, 32):
        # Each lane holds two digits of the base, the first in the low half.
        lanes = words.view(f"<u{bits // 4}")
        lanes *= lanes.dtype.type(base << bits | 1)
        lanes >>= lanes.dtype.type(bits)
        base *= base
