"""Criteo's click logs as they are published: tab-separated text."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator

from jaxrec.data.clicks import Clicks
from jaxrec.data.text import DataError, blocks_of_lines, parse_lines
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
        blocks = blocks_of_lines(self.path, BLOCK_BYTES)
        count = sum(block.count for block in blocks)
        if count == 0:
            raise DataError(f"{self.path}: the file is empty")
        return count

    def chunks(self, start: int, stop: int) -> Iterator[Clicks]:
        """The rows ``[start, stop)`` in order; see `ClickLog`.

        Raises:
            OSError: The file cannot be read.
            DataError: A line before ``stop`` is malformed.
        """
        for block in blocks_of_lines(self.path, BLOCK_BYTES):
            if block.first >= stop:
                return
            if block.first + block.count > start:
                clicks = self._parsed(block.lines, block.first)
                yield clicks[max(start - block.first, 0) : stop - block.first]

    def _parsed(self, lines: bytes, first: int) -> Clicks:
        raw = parse_lines(lines, self.path, first)
        return Clicks(
            labels=raw.labels.astype("float32"),
            dense=log_counts(raw.counts.T),
            ids=table_ids(raw.hashes.T, self.table_rows),
        )
