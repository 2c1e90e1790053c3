"""Criteo's click logs as they are published: tab-separated text."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import Literal

from jaxrec.data.clicks import Clicks
from jaxrec.data.text import Block, DataError, RawClicks, blocks_of_lines, parse_lines
from jaxrec.data.transforms import NUM_CATEGORICAL, NUM_DENSE, log_counts, table_ids

BLOCK_BYTES = 1 << 23


@dataclasses.dataclass(frozen=True)
class CriteoFile:
    """A click log in Criteo's format: label, 13 integers and 26 hexadecimal ids a line.

    What a line may be, `jaxrec.data.text.parse_lines` says. The counts become ``log(x + 3)``
    (`log_counts`) and the ids modulo the rows of their tables (`table_ids`). Compressed by gzip or
    not is seen from the file's first bytes.

    Attributes:
        path: The file.
        table_rows: Number of rows of each of the 26 tables.
        bad_rows: "fail" at a line that is no row, or "skip" and count it (`bad_lines`); then lines
            are parsed, not only counted, to know the number of rows.

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

    path: str | os.PathLike[str]
    table_rows: tuple[int, ...]
    bad_rows: Literal["fail", "skip"] = "fail"
    num_dense: int = dataclasses.field(default=NUM_DENSE, init=False)

    def __post_init__(self) -> None:
        if len(self.table_rows) != NUM_CATEGORICAL or min(self.table_rows) < 1:
            raise ValueError(
                f"Criteo's log has {NUM_CATEGORICAL} categorical features, each with a table of "
                f"1 row or more; got table_rows={self.table_rows}"
            )

    @functools.cached_property
    def _counts(self) -> tuple[int, int]:
        """Rows, and lines that are left out."""
        rows = bad = 0
        for block in blocks_of_lines(pathlib.Path(self.path), BLOCK_BYTES):
            left_out = len(self._parse(block).bad) if self.bad_rows == "skip" else 0
            rows += block.count - left_out
            bad += left_out
        if rows == 0:
            problem = f"none of its {bad} lines is a row" if bad else "the file is empty"
            raise DataError(f"{self.path}: {problem}")
        return rows, bad

    @property
    def num_rows(self) -> int:
        """Rows of the file; counting them reads it once.

        Raises:
            OSError: The file cannot be read.
            DataError: It is no whole gzip file, or has no rows.
        """
        return self._counts[0]

    @property
    def bad_lines(self) -> int:
        """The malformed lines that are left out; raises as `num_rows` does."""
        return self._counts[1]

    def chunks(self, start: int, stop: int) -> Iterator[Clicks]:
        """The rows ``[start, stop)`` in order; see `ClickLog`.

        Raises:
            OSError: The file cannot be read.
            DataError: A line before ``stop`` is malformed.
        """
        first = 0
        for block in blocks_of_lines(pathlib.Path(self.path), BLOCK_BYTES):
            if first >= stop:
                return
            rows = block.count
            if first + rows > start or self.bad_rows == "skip":
                raw = self._parse(block)
                rows = len(raw)
                if first + rows > start:
                    yield self._clicks(raw)[max(start - first, 0) : stop - first]
            first += rows

    def _parse(self, block: Block) -> RawClicks:
        return parse_lines(
            block.lines, pathlib.Path(self.path), block.first, skip=self.bad_rows == "skip"
        )

    def _clicks(self, raw: RawClicks) -> Clicks:
        return Clicks(
            labels=raw.labels.astype("float32"),
            dense=log_counts(raw.counts.T),
            ids=table_ids(raw.hashes.T, self.table_rows),
        )
