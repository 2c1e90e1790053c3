"""Reading of Criteo's click logs, plain or compressed, and the errors of malformed lines."""

from __future__ import annotations

import dataclasses
import gzip
import pathlib
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt32

from jaxrec.data.criteo.fields import COLUMNS, HEX_DIGITS, parse_fields
from jaxrec.data.transforms import NUM_CATEGORICAL, NUM_DENSE

LABEL = "label"


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

    lines: bytes | bytearray
    first: int
    count: int
    end: int
    read: int


def parse_lines(block: Block, path: pathlib.Path, *, skip: bool = False) -> RawClicks:
    """Parse the lines of a block.

    A line is a label, 13 integers and 26 hexadecimal ids, separated by tabs. A missing value is an
    empty field. Integers may end in ``.0``, as pandas writes columns with missing values.

    Args:
        block: The lines.
        path: The lines' file, for errors.
        skip: Whether to leave out malformed lines and list them in ``bad``.

    Raises:
        DataError: A line is malformed and ``skip`` is False.
    """
    fields = parse_fields(block.lines, block.count)
    bad: list[BadLine] = []
    if fields is None:
        lines, bad = _examined(bytes(block.lines), path, block.first)
        if bad and not skip:
            raise DataError(str(bad[0]))
        fields = parse_fields(b"".join(lines), len(lines))
        assert fields is not None, "lines that were checked one by one are well-formed"
    return RawClicks(*fields, tuple(bad))


_INTEGER = re.compile(rb"(-?)0*(\d{1,10})")
_HEX = re.compile(rb"[0-9a-fA-F]{0,8}")


def _examined(block: bytes, path: pathlib.Path, first: int) -> tuple[list[bytes], list[BadLine]]:
    """Check lines one by one; return the good ones, as `parse_fields` takes them, and the bad."""
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
    """Return a text of what was expected of a field; None if the field is valid."""
    if column == 0:
        return None if field in (b"0", b"1") else "a label is 0 or 1"
    if column > NUM_DENSE:
        good = _HEX.fullmatch(field) is not None
        return None if good else f"expected a hexadecimal id of up to {HEX_DIGITS} digits"
    if field == b"" or _integer(field.removesuffix(b".0")) is not None:
        return None
    return "expected an integer of 32 bits"


def _integer(field: bytes) -> int | None:
    """Parse an integer of 32 bits; return None if the field is not one."""
    match = _INTEGER.fullmatch(field)
    number = None if match is None else int(match[1] + match[2])
    return number if number is not None and -(2**31) <= number < 2**31 else None


def is_compressed(path: pathlib.Path) -> bool:
    """Return whether a file begins as gzip files do."""
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


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
            while lines := _read(file, size):
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


def _read(file: Any, size: int) -> bytearray:
    """Read up to ``size`` bytes into an array that grows without a copy."""
    lines = bytearray(size)
    del lines[file.readinto(lines) :]
    return lines


def _ends_blank(lines: bytes | bytearray) -> bool:
    return lines.endswith((b"\n\n", b"\n\r\n")) or lines in (b"\n", b"\r\n")
