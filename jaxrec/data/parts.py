"""The Parquet files that a click log becomes, each saying where in the text it stands."""

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

from jaxrec.data.text import LABEL, Block, DataError, RawClicks
from jaxrec.data.transforms import CATEGORICAL_NAMES, DENSE_NAMES, NUM_CATEGORICAL

# Blocks of text that make a row group.
GROUP_BLOCKS = 8

# Bad lines that a file remembers by number; all are counted.
REMEMBERED = 1000

_METADATA_KEY = b"jaxrec"


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What becomes of a log.

    The Parquet files have the columns ``label``, ``int_0`` to ``int_12`` (the counts as they stand
    in the log, 0 where missing) and ``cat_0`` to ``cat_25``.

    Attributes:
        ids: What the hexadecimal ids become. "hash": themselves modulo ``table_rows``, int32.
            "contiguous": row numbers from 2 in order of first appearance, 1 for ids seen fewer than
            ``threshold`` times, int32; the maps are kept in ``maps/``. "raw": themselves, uint32.
            A missing id is 0 in the log, and an id like any other.
        table_rows: For "hash": rows of the tables, one number for all or one for each.
        threshold: For "contiguous".
        bad_rows: "fail" at the first line that is no row, or "skip", count and report them.
        compression: Of the Parquet files.

    Raises:
        ValueError: A number is below 1, or there are neither 1 nor 26 ``table_rows``.
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
        """``table_rows``, one for each table."""
        return self.table_rows * (NUM_CATEGORICAL // len(self.table_rows))


@dataclasses.dataclass(frozen=True)
class Part:
    """What a Parquet file says about where it comes from, in its own metadata.

    Attributes:
        source: Name of the text file.
        end: Bytes of the text (decompressed) up to its last line's end.
        read: Bytes of the text file, as it lies on the disk, that were read by then.
        lines: Lines of the text up to there.
        rows: Rows of this Parquet file.
        smallest: Its smallest count; TorchRec's preprocessing goes by that of a text file.
        bad_lines: How many lines were left out.
        bad: The first of them.
        last: Whether the text ends with it.
        conversion: How it was made.
        source_bytes: Size of the text file; None where an earlier version did not write it down.
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
    """Raises `DataError` if something was made in another way."""
    if made != as_json(wanted):
        changed = sorted(name for name, x in as_json(wanted).items() if made.get(name) != x)
        raise DataError(
            f"{path} holds the result of another conversion ({', '.join(changed)} differs); "
            "give another output, or remove it"
        )


def as_json(conversion: Conversion) -> dict[str, Any]:
    """The conversion as it is written down."""
    return json.loads(json.dumps(dataclasses.asdict(conversion)))


def is_part(path: pathlib.Path) -> bool:
    """Whether `convert` wrote a file.

    Raises:
        DataError: It is no Parquet file.
    """
    try:
        return _METADATA_KEY in (pq.read_metadata(path).metadata or {})
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is no Parquet file ({error})") from None


def read_part(path: pathlib.Path) -> Part:
    """What a Parquet file that `convert` wrote says about itself.

    Raises:
        DataError: `convert` did not write it.
    """
    try:
        metadata = pq.read_metadata(path).metadata or {}
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is no Parquet file ({error})") from None
    if _METADATA_KEY not in metadata:
        raise DataError(f"{path} was not written by `jaxrec data criteo`; give another output")
    content = json.loads(metadata[_METADATA_KEY])
    return Part(**content | {"bad": tuple(content["bad"])})


class PartWriter:
    """Writes one Parquet file, under another name until it is complete.

    A thread writes one row group while the next is gathered: `add` and `finish` raise what it met.
    """

    def __init__(self, path: pathlib.Path, source: pathlib.Path, conversion: Conversion):
        self._path, self._source, self._conversion = path, source, conversion
        self._source_bytes = source.stat().st_size
        self._unfinished = path.with_name(f".{path.name}.unfinished")
        ids = pa.uint32() if conversion.ids != "hash" else pa.int32()
        types = [(LABEL, pa.int32())]
        types += [(name, pa.int32()) for name in DENSE_NAMES]
        types += [(name, ids) for name in CATEGORICAL_NAMES]
        self._schema = pa.schema([pa.field(*of, nullable=False) for of in types])
        self._file = self._unfinished.open("wb")
        self._writer = parquet_writer(self._file, self._schema, conversion.compression)
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._written: concurrent.futures.Future[None] | None = None
        self._group: list[RawClicks] = []
        self._rows = self._bad_lines = self._lines = self._end = self._read = 0
        self._smallest = 2**31 - 1
        self._bad: list[str] = []

    def add(self, block: Block, rows: RawClicks) -> None:
        """Adds a block of lines and the rows in it."""
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
            # The remainder; NumPy divides by one number much faster than it takes that.
            tables = zip(ids, map(np.uint32, self._conversion.rows_of_tables), strict=True)
            ids = [(column - column // count * count).view(np.int32) for column, count in tables]
        return [rows.labels, *rows.counts, *ids]

    def finish(self, *, last: bool) -> Part:
        """Gives the file its name; ``last``: the text ends here."""
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
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._unfinished.replace(self._path)
        return part

    def discard(self) -> None:
        """Leaves nothing behind."""
        self._thread.shutdown()
        with contextlib.suppress(OSError):  # the disk may be full
            self._writer.close()
            self._file.close()
        self._unfinished.unlink(missing_ok=True)


def parquet_writer(file: Any, schema: pa.Schema, compression: str) -> pq.ParquetWriter:
    """For columns of integers that are read whole: no dictionaries, no statistics.

    What is compressed has the low bytes of all numbers first, then the next, and so on
    (BYTE_STREAM_SPLIT): the high bytes are nearly all zero, which takes less time both ways. Pages
    have checksums, which readers of this package verify.
    """
    return pq.ParquetWriter(
        file,
        schema,
        compression=compression,
        use_dictionary=False,
        write_statistics=False,
        use_byte_stream_split=compression != "none",
        write_page_checksum=True,
    )
