"""Criteo's click logs as text, and the schema of their columns."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Literal

from jaxrec.data.clicks import Clicks
from jaxrec.data.criteo.text import Block, RawClicks, blocks_of_lines, parse_lines
from jaxrec.data.files import DataError
from jaxrec.data.schema import CategoricalColumn, DenseColumn, Schema
from jaxrec.data.transforms import (
    CATEGORICAL_NAMES,
    DENSE_NAMES,
    LABEL,
    NUM_DENSE,
    check_tables,
    log_counts,
    table_ids,
)

# Bytes of text that are parsed at once; about 30,000 rows.
BLOCK_BYTES = 1 << 23


@dataclasses.dataclass(frozen=True)
class CriteoFile:
    """A click log in Criteo's format, plain or compressed by gzip.

    A line is a label, 13 integer counts and 26 hexadecimal ids, separated by tabs. A missing value
    is an empty field, and is read as 0. Counts become ``log(x + 3)``. Ids are taken modulo the rows
    of their tables, or stay as they are.

    Attributes:
        path: The file.
        table_rows: Number of rows of each of the 26 tables.
        bad_rows: "fail" at a malformed line, or "skip" and count it (`bad_lines`). With "skip",
            `num_rows` parses the whole file; with "fail" it only counts lines.
        id_bits: 32: ids are row indices, int32. 64: ids are raw, int64.
        num_dense: Number of dense features, 13.

    Raises:
        ValueError: The number of tables is not 26, a table has no rows, or ``id_bits`` is neither
            32 nor 64.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "day_0")
        >>> _ = path.write_text("\\t".join(["1", *["17"] * 13, *["68fd1e64"] * 26]) + "\\n")
        >>> log = CriteoFile(path, table_rows=(1000,) * 26)
        >>> clicks = next(log.chunks(0, log.num_rows))
        >>> clicks.labels.tolist(), clicks.ids[0, 0].item()
        ([1.0], 852)
    """

    path: str | os.PathLike[str]
    table_rows: tuple[int, ...]
    bad_rows: Literal["fail", "skip"] = "fail"
    id_bits: Literal[32, 64] = 32
    num_dense: int = dataclasses.field(default=NUM_DENSE, init=False)

    def __post_init__(self) -> None:
        check_tables("Criteo's log", self.table_rows, self.id_bits)

    @functools.cached_property
    def _counts(self) -> tuple[int, int]:
        """Number of rows, and of malformed lines that are left out."""
        rows = bad = 0
        for block in self._blocks():
            left_out = len(self._parse(block).bad) if self.bad_rows == "skip" else 0
            rows += block.count - left_out
            bad += left_out
        if rows == 0:
            problem = f"none of its {bad} lines is a row" if bad else "the file is empty"
            raise DataError(f"{self.path}: {problem}")
        return rows, bad

    @property
    def num_rows(self) -> int:
        """Number of rows of the file; the first use reads the file.

        Raises:
            OSError: The file cannot be read.
            DataError: The gzip file is cut short, or the file has no rows.
        """
        return self._counts[0]

    @property
    def bad_lines(self) -> int:
        """Number of malformed lines that are left out; raises as `num_rows` does."""
        return self._counts[1]

    def chunks(self, start: int, stop: int) -> Iterator[Clicks]:
        """Yield the rows ``[start, stop)`` in order; see `ClickLog`.

        Raises:
            OSError: The file cannot be read.
            DataError: A line before ``stop`` is malformed.
        """
        first = 0
        for block in self._blocks():
            if first >= stop:
                return
            # Lines before `start` are only counted. With "skip" they are parsed, since malformed
            # lines do not count.
            rows = block.count
            if first + rows > start or self.bad_rows == "skip":
                raw = self._parse(block)
                rows = len(raw)
                if first + rows > start:
                    yield self._clicks(raw)[max(start - first, 0) : stop - first]
            first += rows

    def check(self, start: int) -> None:
        """Check that all lines from row ``start`` on are well-formed; with "skip" do nothing.

        Raises:
            OSError: The file cannot be read.
            DataError: A line from ``start`` on is malformed.
        """
        if self.bad_rows == "skip":
            return  # malformed lines are left out, and counting rows has parsed all lines
        for block in self._blocks():
            if block.first + block.count > start:
                for bad in parse_lines(block, pathlib.Path(self.path), skip=True).bad:
                    if bad.number > start:
                        raise DataError(str(bad))

    def _blocks(self) -> Iterator[Block]:
        return blocks_of_lines(pathlib.Path(self.path), BLOCK_BYTES)

    def _parse(self, block: Block) -> RawClicks:
        return parse_lines(block, pathlib.Path(self.path), skip=self.bad_rows == "skip")

    def _clicks(self, raw: RawClicks) -> Clicks:
        ids = raw.hashes.T
        ids = ids.astype("int64") if self.id_bits == 64 else table_ids(ids, self.table_rows)
        return Clicks(raw.labels.astype("float32"), log_counts(raw.counts.T), ids)


def criteo_schema(table_rows: Sequence[int], *, is_dynamic: bool = False) -> Schema:
    """Return the schema of the Parquet files that `jaxrec data criteo` writes.

    Ids are taken modulo ``table_rows``, or with ``is_dynamic`` the tables have open vocabularies.
    """
    encoding: Literal["dynamic", "modulo"] = "dynamic" if is_dynamic else "modulo"
    return Schema(
        LABEL,
        {name: DenseColumn("log_counts", "error") for name in DENSE_NAMES},
        {
            name: CategoricalColumn(encoding, rows, missing="error")
            for name, rows in zip(CATEGORICAL_NAMES, table_rows, strict=True)
        },
    )
