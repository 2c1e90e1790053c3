"""The Parquet files of a converted click log, whose metadata name their range of the text."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrec.data.criteo.text import Block, RawClicks
from jaxrec.data.files import DataError
from jaxrec.data.parquet import open_parquet
from jaxrec.data.transforms import CATEGORICAL_NAMES, DENSE_NAMES, LABEL, NUM_CATEGORICAL

# Number of blocks of 2 MB of text in a row group.
GROUP_BLOCKS = 8

# Number of bad lines that a file's metadata list; all are counted.
REMEMBERED = 1000

_METADATA_KEY = b"jaxrec"


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Options of the conversion of a log to Parquet files.

    The Parquet files have the columns ``label``, ``int_0`` to ``int_12`` (the counts of the log, 0
    for missing ones) and ``cat_0`` to ``cat_25``.

    Attributes:
        ids: How hexadecimal ids are converted. "hash": int32, the id modulo ``table_rows``.
            "contiguous": int32, row numbers from 2 in order of first appearance, and 1 for ids with
            fewer than ``threshold`` appearances; ``maps/`` holds the row numbers. "raw": uint32,
            the id itself. A missing id is id 0.
        table_rows: For "hash": number of rows of the tables, one number for all or one for each.
        threshold: For "contiguous": smallest number of appearances of an id with its own row.
        bad_rows: "fail" at the first malformed line, or "skip" and count malformed lines.
    """

    ids: Literal["hash", "contiguous", "raw"] = "hash"
    table_rows: tuple[int, ...] = (100_000,)
    threshold: int = 1
    bad_rows: Literal["fail", "skip"] = "fail"
    compression: Literal["lz4", "zstd", "none"] = "lz4"

    def __post_init__(self) -> None:
        rows = self.table_rows
        if len(rows) not in (1, NUM_CATEGORICAL) or not all(1 <= n < 2**31 for n in rows):
            raise ValueError(
                f"table-rows is one number for all tables or one for each of {NUM_CATEGORICAL}, "
                f"from 1 to 2^31 - 1; got {rows}"
            )
        if self.threshold < 1:
            raise ValueError(f"threshold is 1 or more, got {self.threshold}")

    @property
    def rows_of_tables(self) -> tuple[int, ...]:
        """``table_rows`` with one number for each table."""
        return self.table_rows * (NUM_CATEGORICAL // len(self.table_rows))


@dataclasses.dataclass(frozen=True)
class Part:
    """Metadata of a Parquet file: the end of its range of the text, and the conversion's options.

    Attributes:
        source: Name of the text file.
        end: Number of decompressed bytes of the text up to the end of the file's last line.
        read: Number of bytes on disk, possibly compressed, up to there.
        lines: Number of lines of the text up to there.
        rows: Number of rows of this Parquet file.
        smallest: Smallest count of this Parquet file.
        bad_lines: Number of malformed lines, which were left out.
        bad: The first malformed lines.
        last: Whether this file holds the end of the text.
        source_bytes: Size of the text file; None: an earlier version of jaxrec converted it.
    """

    source: str
    end: int
    read: int
    lines: int
    rows: int
    smallest: int
    bad_lines: int
    bad: tuple[str, ...]
    last: bool
    conversion: dict[str, Any]
    source_bytes: int | None = None


def same_conversion(made: dict[str, Any], wanted: Conversion, path: pathlib.Path) -> None:
    """Raise a DataError if the Parquet files at ``path`` were ``made`` with other options."""
    if made != as_json(wanted):
        changed = sorted(name for name, x in as_json(wanted).items() if made.get(name) != x)
        raise DataError(
            f"{path} holds the result of another conversion ({', '.join(changed)} differs); "
            "give another output, or remove it"
        )


def as_json(conversion: Conversion) -> dict[str, Any]:
    """Return the options as a Parquet file's metadata has them, in types of JSON."""
    # There and back: tuples become lists, as in the metadata that they are compared with.
    return json.loads(json.dumps(dataclasses.asdict(conversion)))


def is_part(path: pathlib.Path) -> bool:
    """Return whether a Parquet file was written by ``jaxrec data criteo``."""
    with open_parquet(path) as file:
        return _METADATA_KEY in (file.metadata.metadata or {})


def read_part(path: pathlib.Path) -> Part:
    """Read the metadata of a Parquet file of ``jaxrec data criteo``."""
    with open_parquet(path) as file:
        metadata = file.metadata.metadata or {}
    if _METADATA_KEY not in metadata:
        raise DataError(f"{path} was not written by `jaxrec data criteo`; give another output")
    content = json.loads(metadata[_METADATA_KEY])
    return Part(**content | {"bad": tuple(content["bad"])})


class PartWriter:
    """Writer of one Parquet file, which its ``with`` block closes.

    A thread writes one row group while the next is gathered; `add` and `finish` raise its errors.
    """

    def __init__(self, path: pathlib.Path, source: pathlib.Path, conversion: Conversion):
        self._source, self._conversion = source, conversion
        self._source_bytes = source.stat().st_size
        # Contiguous ids are raw here; `_renumber` replaces them.
        ids = pa.uint32() if conversion.ids != "hash" else pa.int32()
        types = [(LABEL, pa.int32())]
        types += [(name, pa.int32()) for name in DENSE_NAMES]
        types += [(name, ids) for name in CATEGORICAL_NAMES]
        self._schema = pa.schema([pa.field(*of, nullable=False) for of in types])
        self._file = path.open("wb")
        self._writer = parquet_writer(self._file, self._schema, conversion.compression)
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._written: concurrent.futures.Future[None] | None = None
        self._group: list[RawClicks] = []
        self._rows = self._bad_lines = self._lines = self._end = self._read = 0
        self._smallest = 2**31 - 1
        self._bad: list[str] = []

    def add(self, block: Block, rows: RawClicks) -> None:
        self._group.append(rows)
        self._rows += len(rows)
        self._bad_lines += len(rows.bad)
        self._bad += map(str, rows.bad[: REMEMBERED - len(self._bad)])
        self._lines = block.first + block.count
        self._end, self._read = block.end, block.read
        if len(rows):
            self._smallest = min(self._smallest, int(rows.counts.min()))
        if len(self._group) == GROUP_BLOCKS:
            self._start_writing()

    def _start_writing(self) -> None:
        self._wait()
        self._written = self._thread.submit(self._write, self._group)
        self._group = []

    def _wait(self) -> None:
        if self._written is not None:
            self._written.result()

    def _write(self, group: list[RawClicks]) -> None:
        columns = zip(*map(self._columns, group), strict=True)
        table = pa.table([pa.chunked_array(pieces) for pieces in columns], self._schema)
        if len(table):
            self._writer.write_table(table, row_group_size=len(table))

    def _columns(self, rows: RawClicks) -> list[np.ndarray]:
        ids = list(rows.hashes)
        if self._conversion.ids == "hash":
            # A remainder by division: NumPy vectorizes the division by a scalar, and not `%`.
            tables = zip(ids, map(np.uint32, self._conversion.rows_of_tables), strict=True)
            ids = [(column - column // count * count).view(np.int32) for column, count in tables]
        return [rows.labels, *rows.counts, *ids]

    def finish(self, *, last: bool) -> Part:
        """Write the last row group and the metadata, and return these.

        ``last`` says whether the text ends here.
        """
        if self._group:
            self._start_writing()
        self._wait()
        self._thread.shutdown()
        part = Part(
            self._source.name, self._end, self._read, self._lines, self._rows, self._smallest,
            self._bad_lines, tuple(self._bad), last, as_json(self._conversion), self._source_bytes,
        )  # fmt: skip
        self._writer.add_key_value_metadata(
            {_METADATA_KEY.decode(): json.dumps(dataclasses.asdict(part))}
        )
        self._writer.close()
        # The file gets its name next: its content must be on the disk before, or a power failure
        # leaves a complete name on an incomplete file.
        self._file.flush()
        os.fsync(self._file.fileno())
        return part

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        with contextlib.suppress(OSError):  # the disk may be full
            self._writer.close()
            self._file.close()


def parquet_writer(file: Any, schema: pa.Schema, compression: str) -> pq.ParquetWriter:
    """Return a Parquet writer for columns of integers that are read as a whole."""
    # Hashed ids have too many values for dictionaries, and a reader of whole columns needs no
    # statistics. BYTE_STREAM_SPLIT puts the low bytes of all numbers first, then the next bytes:
    # the high bytes are nearly all zero, which makes compression and decompression faster.
    return pq.ParquetWriter(
        file,
        schema,
        compression=compression,
        use_dictionary=False,
        write_statistics=False,
        use_byte_stream_split=compression != "none",
        write_page_checksum=True,
    )
