"""Parsing of Criteo's click logs by Arrow."""

from __future__ import annotations

import dataclasses
import gzip
import pathlib
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from jaxtyping import Int, UInt32

from jaxrec.data.transforms import CATEGORICAL_NAMES, DENSE_NAMES, NUM_CATEGORICAL, NUM_DENSE

LABEL = "label"
NAMES = (LABEL, *DENSE_NAMES, *CATEGORICAL_NAMES)
COLUMNS = len(NAMES)
HEX_DIGITS = 8

# Types of the columns. Arrow refuses other values, but its errors do not always name the field.
_TYPES = {
    **dict.fromkeys((LABEL, *DENSE_NAMES), pa.int32()),
    **dict.fromkeys(CATEGORICAL_NAMES, pa.binary(HEX_DIGITS)),
}

# Arrow ignores blanks in integers and accepts 0x1f as one.
_ACCEPTED_BY_ARROW = (b" ", b"x", b"X")


class DataError(ValueError):
    """A file is malformed; the message names the file, the line and the problem."""


@dataclasses.dataclass(frozen=True)
class BadLine:
    """A malformed line.

    Attributes:
        path: The file.
        number: Number of the line, from 1.
        problem: Text that describes the problem.
    """

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
        counts: ``[13, rows]`` int32; missing ones are 0, as with TorchRec.
        hashes: ``[26, rows]`` uint32; missing ones are 0, as with TorchRec.
        bad: The malformed lines, which are left out.
    """

    labels: Int[np.ndarray, " rows"]
    counts: Int[np.ndarray, "num_dense rows"]
    hashes: UInt32[np.ndarray, "num_categorical rows"]
    bad: tuple[BadLine, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)


def parse_lines(block: bytes, path: pathlib.Path, first: int, *, skip: bool = False) -> RawClicks:
    """Parse lines.

    A line is a label, 13 integers and 26 hexadecimal ids, separated by tabs. A missing value is an
    empty field. Integers may end in ``.0``, as pandas writes columns with missing values.

    Args:
        block: Lines, each with its newline.
        path: The lines' file, for errors.
        first: Number of lines of the file before the block.
        skip: Whether to leave out malformed lines and list them in ``bad``.

    Raises:
        DataError: A line is malformed and ``skip`` is False.

    Example:
        >>> line = b"\\t".join([b"1", *[b"17"] * 13, *[b"0000001f"] * 26])
        >>> rows = parse_lines(line + b"\\n", pathlib.Path("day_0"), 0)
        >>> rows.counts[0].tolist(), rows.hashes[0].tolist()
        ([17], [31])
    """
    rows = _arrow(block)
    if rows is not None:
        return rows
    lines, bad = _examined(block, path, first)
    if bad and not skip:
        raise DataError(str(bad[0]))
    if not lines:
        none = np.empty((COLUMNS, 0), np.int32)
        return RawClicks(none[0], none[:NUM_DENSE], none[-NUM_CATEGORICAL:].view("u4"), tuple(bad))
    rows = _arrow(b"\n".join(lines) + b"\n")
    assert rows is not None, "Arrow parses lines that were checked one by one"
    return dataclasses.replace(rows, bad=tuple(bad))


def _arrow(block: bytes) -> RawClicks | None:
    """Parse lines by Arrow; None if a line is malformed or might be."""
    if any(sign in block for sign in _ACCEPTED_BY_ARROW):
        return None
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(block),
            read_options=pyarrow.csv.ReadOptions(
                use_threads=False, column_names=NAMES, block_size=len(block) + 1
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter="\t", quote_char=False, ignore_empty_lines=False
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=_TYPES, null_values=[""], strings_can_be_null=True, check_utf8=False
            ),
        )
    except pa.ArrowInvalid:
        return None
    labels = table[LABEL]
    if labels.null_count or not {0, 1}.issuperset(pc.unique(labels).to_pylist()):
        return None
    counts = np.stack([table[name].fill_null(0).to_numpy() for name in DENSE_NAMES])
    hashes = np.empty((NUM_CATEGORICAL, len(table)), np.uint32)
    for row, name in zip(hashes, CATEGORICAL_NAMES, strict=True):
        numbers = _hexadecimals(_characters(table[name]))
        if numbers is None:
            return None
        row[:] = numbers
    return RawClicks(labels.to_numpy(), counts, hashes)


def _characters(column: pa.ChunkedArray) -> np.ndarray:
    """Return eight characters as one number, the first in the lowest byte; "00000000" for null."""
    array = column.combine_chunks().view(pa.uint64())
    return array.fill_null(pa.scalar(_repeated(ord("0")).item(), pa.uint64())).to_numpy()


def _repeated(byte: int) -> np.uint64:
    return np.uint64(int.from_bytes(bytes([byte]) * HEX_DIGITS, "little"))


_ONE, _SIX, _LOW, _CARRY, _ZERO = map(_repeated, (0x01, 0x06, 0x0F, 0x10, 0x30))


def _hexadecimals(characters: np.ndarray) -> UInt32[np.ndarray, " rows"] | None:
    """Parse eight hexadecimal digits in each word, all bytes of a word at once.

    Returns:
        The numbers; None if a character is not a digit (0x30-0x39, 0x41-0x46 and 0x61-0x66).
    """
    letters = (characters >> np.uint64(6)) & _ONE
    # The low half of the byte is the value of a digit, and the value less 9 of a letter.
    digits = (characters & _LOW) + letters * np.uint64(9)
    # Compare with the characters of these values; bit 0x20 distinguishes small letters.
    wrong = digits + letters * np.uint64(ord("a") - ord("0") - 10) + _ZERO
    wrong ^= characters | letters << np.uint64(5)
    # Only letters have values from 10 to 15.
    wrong |= (((digits + _SIX) ^ (letters << np.uint64(4))) | digits) & _CARRY
    if wrong.any():
        return None
    pairs = (digits | digits << np.uint64(12)) >> np.uint64(8) & np.uint64(0x00FF00FF00FF00FF)
    fours = (pairs | pairs >> np.uint64(8)) & np.uint64(0x0000FFFF0000FFFF)
    return (fours | fours >> np.uint64(16)).astype("<u4").byteswap()


_INTEGER = re.compile(rb"(-?\d+)(\.0)?")
_HEX = re.compile(rb"[0-9a-fA-F]{0,8}")


def _examined(block: bytes, path: pathlib.Path, first: int) -> tuple[list[bytes], list[BadLine]]:
    """Check lines one by one; return the good ones, as Arrow parses them, and the bad ones."""
    good, bad = [], []
    for number, line in enumerate(block.split(b"\n")[:-1], start=first + 1):
        fields = line.removesuffix(b"\r").split(b"\t")
        problem = _problem(fields)
        if problem is not None:
            bad.append(BadLine(path, number, problem))
            continue
        integers = [field.removesuffix(b".0") for field in fields[1 : 1 + NUM_DENSE]]
        ids = [field and field.zfill(HEX_DIGITS) for field in fields[1 + NUM_DENSE :]]
        good.append(b"\t".join([fields[0], *integers, *ids]))
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
    """Return a text of what was expected of a field; None if the field is valid."""
    if column == 0:
        return None if field in (b"0", b"1") else "a label is 0 or 1"
    if column > NUM_DENSE:
        good = _HEX.fullmatch(field) is not None
        return None if good else f"expected a hexadecimal id of up to {HEX_DIGITS} digits"
    number = _INTEGER.fullmatch(field)
    if field == b"" or (number is not None and -(2**31) <= int(number[1]) < 2**31):
        return None
    return "expected an integer of 32 bits"


def is_compressed(path: pathlib.Path) -> bool:
    """Return whether a file begins as gzip files do."""
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


@dataclasses.dataclass(frozen=True)
class Block:
    """Some whole lines of a file.

    Attributes:
        lines: The lines, each with its newline.
        first: Number of lines before the block.
        count: Number of lines of the block.
        end: Number of decompressed bytes of the file up to the end of the block.
        read: Number of bytes on disk, possibly compressed, that were read.
    """

    lines: bytes
    first: int
    count: int
    end: int
    read: int


def blocks_of_lines(
    path: pathlib.Path, size: int, start: int = 0, first: int = 0
) -> Iterator[Block]:
    """Yield the lines of a file, plain or gzip, in blocks of about ``size`` bytes.

    A missing newline at the end is added, and Windows' line ends are converted. Blank lines at the
    end of the file are left out.

    Args:
        path: The file.
        size: Number of bytes of a block, without the rest of its last line.
        start: Number of decompressed bytes to skip: the ``end`` of an earlier block.
        first: Number of lines to skip.

    Raises:
        OSError: The file cannot be read.
        DataError: The gzip file is cut short or damaged.
    """
    with open(path, "rb") as plain:
        file: Any = gzip.GzipFile(fileobj=plain) if is_compressed(path) else plain
        try:
            file.seek(start)
            end = start
            while lines := file.read(size):
                lines += file.readline()
                # Only the last block may end with a blank line.
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


def _ends_blank(lines: bytes) -> bool:
    return lines.endswith((b"\n\n", b"\n\r\n")) or lines in (b"\n", b"\r\n")
