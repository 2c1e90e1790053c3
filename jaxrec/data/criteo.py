"""Criteo's click logs: tab-separated text."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import io
import pathlib
import zlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Int, UInt8

from jaxrec.data.clicks import Clicks
from jaxrec.data.transforms import NUM_CATEGORICAL, NUM_DENSE, log_counts, table_ids

COLUMNS = 1 + NUM_DENSE + NUM_CATEGORICAL
BLOCK_BYTES = 1 << 24

# More digits than these might not fit the integers that they become.
MAX_DECIMALS = 18
MAX_HEX_DIGITS = 8

_NO_DIGIT = 255


class DataError(ValueError):
    """A file is not what it should be; says which file and line, and what is wrong."""


@dataclasses.dataclass(frozen=True)
class CriteoFile:
    """A click log in Criteo's format: label, 13 integers and 26 hexadecimal ids a line.

    Fields are separated by tabs, lines end with a newline; a missing value is an empty field.
    Integers may end in ``.0``, as pandas writes them where some are missing. The counts become
    ``log(x + 3)`` (`log_counts`) and the ids modulo the rows of their tables (`table_ids`).
    Compressed by gzip or not is seen from the file's first bytes.

    Attributes:
        path: The file.
        table_rows: Number of rows of each of the 26 tables.

    Raises:
        ValueError: There are not 26 tables, or one has no rows.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "day_0")
        >>> _ = path.write_text("\\t".join(["1", *["17"] * 13, *["68fd1e64"] * 26]) + "\\n")
        >>> log = CriteoFile(path, table_rows=(1000,) * 26)
        >>> clicks = next(log.chunks(0, log.num_rows))
        >>> clicks.labels.tolist(), clicks.ids[0, 0].item()
        ([1.0], 852)
    """

    path: pathlib.Path
    table_rows: tuple[int, ...]
    num_dense: int = dataclasses.field(default=NUM_DENSE, init=False)

    def __post_init__(self) -> None:
        if len(self.table_rows) != NUM_CATEGORICAL or min(self.table_rows) < 1:
            raise ValueError(
                f"Criteo's log has {NUM_CATEGORICAL} categorical features, each with a table of "
                f"1 row or more; got table_rows={self.table_rows}"
            )

    @functools.cached_property
    def num_rows(self) -> int:
        """Lines of the file; counting them reads it once.

        Raises:
            OSError: The file cannot be read.
            DataError: It is no whole gzip file, or empty.
        """
        count = sum(block.count(b"\n") for block in self._blocks())
        if count == 0:
            raise DataError(f"{self.path}: the file is empty")
        return count

    def chunks(self, start: int, stop: int) -> Iterator[Clicks]:
        """The rows ``[start, stop)`` in order; see `ClickLog`.

        Raises:
            OSError: The file cannot be read.
            DataError: A line before ``stop`` is malformed.
        """
        first = 0
        for block in self._blocks():
            count = block.count(b"\n")
            if first + count > start:
                clicks = self._parsed(block, first)
                yield clicks[max(start - first, 0) : stop - first]
            first += count
            if first >= stop:
                return

    def _parsed(self, block: bytes, first: int) -> Clicks:
        fields = Fields.of(block, self.path, first)
        return Clicks(
            labels=fields.labels(0).astype(np.float32),
            dense=log_counts(fields.integers(slice(1, 1 + NUM_DENSE))),
            ids=table_ids(fields.hexadecimals(slice(1 + NUM_DENSE, COLUMNS)), self.table_rows),
        )

    def _blocks(self) -> Iterator[bytes]:
        """The file in pieces of whole lines; the last gets the newline it may lack."""
        rest = b""
        try:
            with _open(self.path) as file:
                while piece := file.read(BLOCK_BYTES):
                    cut = piece.rfind(b"\n") + 1
                    if cut:
                        yield (rest + piece[:cut]).replace(b"\r\n", b"\n")
                        rest = piece[cut:]
                    else:
                        rest += piece
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{self.path}: the gzip file is cut short or damaged ({error})"
            ) from None
        if rest:
            yield rest + b"\n"


def _open(path: pathlib.Path) -> io.BufferedIOBase:
    with open(path, "rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if compressed else open(path, "rb")


@dataclasses.dataclass(frozen=True, eq=False)
class Fields:
    """Where the fields of a block of lines are, and what they say.

    Parses all rows of a column together, digit by digit.

    Attributes:
        text: The block's bytes.
        starts, ends: ``[rows, COLUMNS]`` where in the text each field starts and ends.
        path, first: The file, and the number of lines of it before the block.
    """

    text: UInt8[np.ndarray, " bytes"]
    starts: Int[np.ndarray, "rows columns"]
    ends: Int[np.ndarray, "rows columns"]
    path: pathlib.Path
    first: int

    @classmethod
    def of(cls, block: bytes, path: pathlib.Path, first: int) -> Fields:
        """Finds the fields of whole lines.

        Raises:
            DataError: A line has another number of columns.
        """
        text = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero((text == ord("\t")) | (text == ord("\n")))
        lines = np.flatnonzero(text[ends] == ord("\n"))
        columns = np.diff(lines, prepend=-1)
        if (wrong := np.flatnonzero(columns != COLUMNS)).size:
            raise DataError(
                f"{path}, line {first + wrong[0] + 1}: {columns[wrong[0]]} columns, but "
                f"Criteo's format has {COLUMNS}, separated by tabs: the label, {NUM_DENSE} "
                f"integers, {NUM_CATEGORICAL} hexadecimal ids"
            )
        starts = np.concatenate([[0], ends[:-1] + 1])
        return cls(text, starts.reshape(-1, COLUMNS), ends.reshape(-1, COLUMNS), path, first)

    def labels(self, column: int) -> UInt8[np.ndarray, " rows"]:
        """A column of zeros and ones."""
        starts, ends = self.starts[:, column], self.ends[:, column]
        values = self.text[starts] - ord("0")
        self._check((ends - starts != 1) | (values > 1), column, "a label is 0 or 1")
        return values

    def integers(self, columns: slice) -> Int[np.ndarray, "rows columns"]:
        """Columns of decimal integers, 0 where they are missing."""
        starts, ends = self.starts[:, columns], self.ends[:, columns]
        negative = self.text[starts] == ord("-")
        starts = starts + negative
        # The last characters of too short a field are its neighbours'; its length tells.
        fraction = (
            (ends - starts > 2)
            & (self.text[ends - 1] == ord("0"))
            & (self.text[ends - 2] == ord("."))
        )
        lengths = ends - starts - 2 * fraction
        wrong = (lengths > MAX_DECIMALS) | (negative & (lengths == 0))
        values, no_number = self._digits(starts, np.minimum(lengths, MAX_DECIMALS), 10)
        self._check(
            wrong | no_number, columns.start, f"expected an integer of up to {MAX_DECIMALS} digits"
        )
        return np.where(negative, -values, values)

    def hexadecimals(self, columns: slice) -> Int[np.ndarray, "rows columns"]:
        """Columns of hexadecimal integers, 0 where they are missing."""
        starts = self.starts[:, columns]
        lengths = self.ends[:, columns] - starts
        values, no_number = self._digits(starts, np.minimum(lengths, MAX_HEX_DIGITS), 16)
        self._check(
            (lengths > MAX_HEX_DIGITS) | no_number,
            columns.start,
            f"expected a hexadecimal id of up to {MAX_HEX_DIGITS} digits",
        )
        return values

    def _digits(
        self,
        starts: Int[np.ndarray, "rows columns"],
        lengths: Int[np.ndarray, "rows columns"],
        base: int,
    ) -> tuple[Int[np.ndarray, "rows columns"], Bool[np.ndarray, "rows columns"]]:
        """The numbers that the fields spell, and where they spell none."""
        values = np.zeros(starts.shape, np.int64)
        wrong = np.zeros(starts.shape, bool)
        for place in range(int(lengths.max(initial=0))):
            inside = place < lengths
            digits = _DIGITS[self.text[np.where(inside, starts + place, starts)]]
            wrong |= inside & (digits >= base)
            values = np.where(inside, values * base + digits, values)
        return values, wrong

    def _check(self, wrong: Bool[np.ndarray, "..."], column: int, expected: str) -> None:
        """Raises an error for the first field that is wrong, line by line."""
        if not wrong.any():
            return
        row, offset = divmod(int(np.flatnonzero(wrong)[0]), wrong[0].size)
        column += offset
        field = self.text[self.starts[row, column] : self.ends[row, column]].tobytes()
        raise DataError(
            f"{self.path}, line {self.first + row + 1}, column {column + 1} "
            f"({_column_name(column)}): {expected}, got {field.decode(errors='replace')!r}"
        )


def _digit_table() -> UInt8[np.ndarray, " bytes"]:
    table = np.full(256, _NO_DIGIT, np.uint8)
    for digit in b"0123456789abcdefABCDEF":
        table[digit] = int(chr(digit), 16)
    return table


_DIGITS = _digit_table()


def _column_name(column: int) -> str:
    if column == 0:
        return "label"
    return f"I{column}" if column <= NUM_DENSE else f"C{column - NUM_DENSE}"
