"""Parser of the text of Criteo's click logs, with errors that name the line and the column.

NumPy parses all fields of a well-formed block at once. Any other block is examined line by line to
find the malformed lines.
"""

from __future__ import annotations

import dataclasses
import gzip
import pathlib
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from jaxtyping import Int, UInt32, UInt64

from jaxrec.data.files import DataError, is_compressed
from jaxrec.data.transforms import COLUMNS, NUM_CATEGORICAL, NUM_DENSE

HEX_DIGITS = 8

# Number of characters in a word.
_WORD = 8

# Bytes of text that are parsed at once: large enough for NumPy, small enough for caches.
_PIECE_BYTES = 1 << 19

# Arrow's view of a field and its separator, 16 bytes: the size, then up to 12 characters in two
# words. Well-formed fields have at most 11 characters and a separator, so that a view holds them.
_VIEW = np.dtype({"names": ["size", "word", "rest"], "formats": ["<i4", "<u8", "<u4"]})

# Number of characters of -2147483648, the longest integer without leading zeros.
_LONGEST = 11

_INTEGER = re.compile(rb"(-?)0*(\d{1,10})")
_HEX = re.compile(rb"[0-9a-fA-F]{0,8}")

# Labels, counts and hashes of `RawClicks`.
Columns: TypeAlias = tuple[
    Int[np.ndarray, " rows"],
    Int[np.ndarray, "num_dense rows"],
    UInt32[np.ndarray, "num_categorical rows"],
]


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A malformed line of a file; ``number`` counts from 1."""

    path: pathlib.Path
    number: int
    problem: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.number}{self.problem}"


@dataclasses.dataclass(frozen=True, eq=False)
class RawClicks:
    """Rows with the values of the log.

    Attributes:
        labels: ``[rows]`` int32, 0 or 1.
        counts: ``[13, rows]`` int32; a missing count is 0, as in TorchRec.
        hashes: ``[26, rows]`` uint32; a missing id is 0, as in TorchRec.
        bad: The malformed lines, which have no row.
    """

    labels: Int[np.ndarray, " rows"]
    counts: Int[np.ndarray, "num_dense rows"]
    hashes: UInt32[np.ndarray, "num_categorical rows"]
    bad: tuple[BadLine, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)


@dataclasses.dataclass(frozen=True)
class Block:
    """Some whole lines of a file, each with its newline.

    Attributes:
        first: Number of lines before the block.
        count: Number of lines of the block.
        end: Number of decompressed bytes of the file up to the end of the block.
        read: Number of bytes of the file on disk, possibly compressed, that have been read.
    """

    lines: bytes | bytearray
    first: int
    count: int
    end: int
    read: int


def blocks_of_lines(
    path: pathlib.Path, size: int, start: int = 0, first: int = 0
) -> Iterator[Block]:
    """Yield the lines of a file, plain or gzip, in blocks of about ``size`` bytes.

    To go on after an earlier block, skip ``start`` decompressed bytes, its ``end``, and number the
    lines from ``first``.
    """
    # Editors and Windows change line ends and the end of a file: a missing last newline, "\r\n" and
    # blank lines at the end are accepted.
    with open(path, "rb") as plain:
        file: Any = gzip.GzipFile(fileobj=plain) if is_compressed(path) else plain
        try:
            file.seek(start)
            end = start
            while lines := _read(file, size):
                lines += file.readline()
                # A blank line inside of the file is an error, and must not end a block: only at the
                # end of the last block it is left out.
                while _ends_blank(lines) and (line := file.readline()):
                    lines += line
                end += len(lines)
                if _ends_blank(lines):
                    lines = lines.rstrip(b"\r\n")
                    if not lines:
                        return
                if not lines.endswith(b"\n"):
                    lines += b"\n"
                if b"\r" in lines:
                    lines = lines.replace(b"\r\n", b"\n")
                # Faster than bytes.count, which stops at every line.
                count = int(np.count_nonzero(np.frombuffer(lines, np.uint8) == ord("\n")))
                yield Block(lines, first, count, end, plain.tell())
                first += count
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: the gzip file is cut short or damaged ({error})") from None


def _read(file: Any, size: int) -> bytearray:
    """Read up to ``size`` bytes."""
    # A bytearray, since the rest of the last line is appended to it: bytes would be copied.
    lines = bytearray(size)
    del lines[file.readinto(lines) :]
    return lines


def _ends_blank(lines: bytes | bytearray) -> bool:
    return lines.endswith((b"\n\n", b"\n\r\n")) or lines in (b"\n", b"\r\n")


def parse_lines(block: Block, path: pathlib.Path, *, skip: bool = False) -> RawClicks:
    """Parse the lines of a block; ``skip`` leaves out malformed lines and lists them in ``bad``.

    A line is a label, 13 integers and 26 hexadecimal ids, separated by tabs. A missing value is an
    empty field. Integers may end in ``.0``, as pandas writes columns with missing values.
    """
    columns = parse_fields(block.lines, block.count)
    bad: list[BadLine] = []
    if columns is None:
        lines, bad = _examined(bytes(block.lines), path, block.first)
        if bad and not skip:
            raise DataError(str(bad[0]))
        columns = parse_fields(b"".join(lines), len(lines))
        assert columns is not None, "lines that were checked one by one are well-formed"
    return RawClicks(*columns, tuple(bad))


def _examined(block: bytes, path: pathlib.Path, first: int) -> tuple[list[bytes], list[BadLine]]:
    """Check the lines of a block one by one; return well-formed and malformed ones.

    Well-formed lines are rewritten so that `parse_fields` takes them. ``first`` is the number of
    lines before the block.
    """
    good, bad = [], []
    for number, line in enumerate(block.split(b"\n")[:-1], start=first + 1):
        fields = line.removesuffix(b"\r").split(b"\t")
        problem = _problem(fields)
        if problem is not None:
            bad.append(BadLine(path, number, problem))
            continue
        integers = [
            field and str(_integer(field.removesuffix(b".0"))).encode()
            for field in fields[1 : 1 + NUM_DENSE]
        ]
        ids = [field and field.zfill(HEX_DIGITS) for field in fields[1 + NUM_DENSE :]]
        good.append(b"\t".join([fields[0], *integers, *ids]) + b"\n")
    return good, bad


def _problem(fields: Sequence[bytes]) -> str | None:
    if len(fields) != COLUMNS:
        return (
            f": {len(fields)} columns, but Criteo's format has {COLUMNS}, separated by tabs: the "
            f"label, {NUM_DENSE} integers, {NUM_CATEGORICAL} hexadecimal ids"
        )
    for column, field in enumerate(fields):
        expected = _expected(column, field)
        if expected is not None:
            name = "label" if column == 0 else f"I{column}"
            name = name if column <= NUM_DENSE else f"C{column - NUM_DENSE}"
            text = field.decode(errors="replace")
            return f", column {column + 1} ({name}): {expected}, got {text!r}"
    return None


def _expected(column: int, field: bytes) -> str | None:
    """Return what a column's field must be, as text; None if the field is valid."""
    if column == 0:
        return None if field in (b"0", b"1") else "a label is 0 or 1"
    if column > NUM_DENSE:
        good = _HEX.fullmatch(field) is not None
        return None if good else f"expected a hexadecimal id of up to {HEX_DIGITS} digits"
    if field == b"" or _integer(field.removesuffix(b".0")) is not None:
        return None
    return "expected an integer of 32 bits"


def _integer(field: bytes) -> int | None:
    """Parse a field as an integer; return None unless it is one of 32 bits."""
    match = _INTEGER.fullmatch(field)
    number = None if match is None else int(match[1] + match[2])
    return number if number is not None and -(2**31) <= number < 2**31 else None


def parse_fields(lines: bytes | bytearray, rows: int) -> Columns | None:
    """Parse ``rows`` well-formed lines; return None if one is not well-formed.

    A well-formed line is a label, 13 integers of 32 bits in up to 11 characters and 26 ids of eight
    hexadecimal digits, separated by tabs. A missing integer or id is an empty field.
    """
    columns = (
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
        labels, counts, hashes = (column[..., row : row + len(views)] for column in columns)
        if not _parse_views(views, labels, counts, hashes):
            return None
        start, row = stop, row + len(views)
    return columns if row == rows else None


def _views(lines: bytes | bytearray, start: int, stop: int) -> np.ndarray | None:
    """Return the fields ``[rows, 40]`` of the bytes ``[start, stop)``, each a `_VIEW`.

    None: a line has not 40 fields.
    """
    characters = np.frombuffer(lines, np.uint8, stop - start, start)
    # Arrow's cast to views copies the start of each field into 16 bytes of its own. NumPy then has
    # aligned words to compute with, however long the fields are.
    # Tab is 9 and newline 10: one unsigned comparison finds both, as smaller bytes wrap around.
    ends = np.flatnonzero(characters - np.uint8(ord("\t")) <= ord("\n") - ord("\t"))
    if len(ends) % COLUMNS or not (characters[ends[COLUMNS - 1 :: COLUMNS]] == ord("\n")).all():
        return None
    # A field includes its separator: its size is the number of its characters and 1.
    offsets = np.zeros(len(ends) + 1, np.int32)
    offsets[1:] = ends + 1
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(characters)]
    fields = pa.Array.from_buffers(pa.binary(), len(ends), buffers).cast(pa.binary_view())
    return np.frombuffer(fields.buffers()[1], _VIEW, len(ends)).reshape(-1, COLUMNS)


def _parse_views(
    views: np.ndarray, labels: np.ndarray, counts: np.ndarray, hashes: np.ndarray
) -> bool:
    """Parse fields ``[rows, 40]`` into the arrays of columns; return whether they are well-formed.

    ``labels`` are ``[rows]``, ``counts`` ``[13, rows]`` and ``hashes`` ``[26, rows]``.
    """
    of_labels, of_counts, of_hashes = np.split(views, (1, 1 + NUM_DENSE), axis=1)
    # The lowest byte of the word is the first character. Size 2: one digit and the separator.
    values = of_labels["word"][:, 0].astype(np.uint8) - np.uint8(ord("0"))
    if not (of_labels["size"] == 2).all() or not (values <= 1).all():
        return False
    labels[:] = values

    numbers = _integers(of_counts)
    if numbers is None:
        return False
    counts[:] = numbers.T

    lengths = of_hashes["size"] - 1
    # The union of the bits of all lengths has no other bit than that of 8: all are 0 or 8.
    if np.bitwise_or.reduce(lengths, axis=None) & ~HEX_DIGITS:
        return False
    words = of_hashes["word"].copy()
    np.copyto(words, _repeated(b"0"), where=lengths == 0)
    if not _parse_hexadecimals(words):
        return False
    hashes[:] = words.T
    return True


def _repeated(character: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(character * _WORD, "little"))


def _integers(fields: np.ndarray) -> Int[np.ndarray, "*shape"] | None:
    """Parse fields ``[*shape]``; an empty field is 0.

    None: a field is not an integer of 32 bits in up to 11 characters.
    """
    words, lengths = fields["word"].copy(), fields["size"] - 1
    negative = np.nonzero(words.astype(np.uint8) == ord("-"))
    # Few counts have more than eight digits: only these have a second word.
    long = np.nonzero(lengths > _WORD)
    rest = lengths[long] - _WORD
    if (lengths[negative] == 1).any() or (rest > _LONGEST - _WORD).any():
        return None
    # A zero in the place of the sign, so that the digits parse as they stand.
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
    """Parse the first ``lengths`` characters of each word, in place; return whether all are digits.

    A length of 0, or of more than a word, gives 0.
    """
    # Eight characters at once, as bytes of a 64-bit integer.
    words ^= _repeated(b"0")
    # Move the last character to the highest byte; zeros fill the word.
    words <<= ((_WORD - lengths) * 8).astype(np.uint64)
    # Adding 6 carries a byte of 10 to 15 into its high half; a byte above has a high half already.
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
    # Three steps join 8 digits to 4 numbers, to 2, to 1, as in simdjson's parser of integers.
    for bits in (8, 16, 32):
        # Each lane holds two digits of the base, the first in the low half. The product's high half
        # is first * base + second.
        lanes = words.view(f"<u{bits // 4}")
        lanes *= lanes.dtype.type(base << bits | 1)
        lanes >>= lanes.dtype.type(bits)
        base *= base
