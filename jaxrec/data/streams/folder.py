"""A folder that is written to, as a source of rows."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa

from jaxrec.data.files import DataError, is_parquet_name
from jaxrec.data.files import natural_order as in_natural_order
from jaxrec.data.formats.base import WiderTypeError, without_descriptions
from jaxrec.data.formats.conversion import FORMATS
from jaxrec.data.formats.delimited import PART_BYTES
from jaxrec.data.parquet import ParquetGroups
from jaxrec.data.partitions import key_column, key_types, keys_of
from jaxrec.data.shuffled import Shard
from jaxrec.data.streams.source import (
    POLL_SECONDS,
    Position,
    Positions,
    Rows,
    Source,
    SourceReader,
    check_choices,
)
from jaxrec.data.structs import with_null_fields

Item = TypeVar("Item")

# Position of a file of which all rows are used; of another file, the row is the next one.
_DONE = Position(1)

# Advice in the error of a file that was read while it was written.
_RENAME = (
    "a file must be complete when it has its name: write it as .NAME and rename it, or give "
    "settle_seconds"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderSource(Source):
    """The files of a folder, and those that come while it is read.

    Files are Parquet, CSV, JSON lines or Arrow, by their names. A file is read once, when it is
    complete: writers give it another name first, one that begins with a dot or an underscore or
    ends otherwise, and rename it. Rows must not change afterwards. Files may be removed once a
    checkpoint has their rows. Directories in the folder are read too, and ``key=value`` ones are
    columns.

    With several processes each file belongs to one of them, by a hash of its name.

    Attributes:
        directory: The folder.
        order: Order of files that are there at the same time: by "name", ``day_2`` before
            ``day_10``, or by "time", that of the last change, then by name. A file that comes late
            is read as well, whatever its name or time.
        schema: Columns to read, with their types in CSV and JSON lines; None: all columns, with
            types by the values of each file.
        settle_seconds: Number of seconds for which a complete file has not changed, for writers
            that cannot rename. 0: every file is complete.
        deleted: "fail": a file that is removed before its rows are used is an error. "skip": it is
            left out, with a warning.
        poll_seconds: Seconds between two looks for new files.

    Raises:
        ValueError: An argument has another value.
    """

    directory: str | os.PathLike[str]
    order: Literal["name", "time"] = "name"
    schema: pa.Schema | None = None
    settle_seconds: float = 0.0
    deleted: Literal["fail", "skip"] = "fail"
    poll_seconds: float = 1.0

    def __post_init__(self) -> None:
        check_choices(self, {"order": ("name", "time"), "deleted": ("fail", "skip")})
        if self.settle_seconds < 0 or self.poll_seconds < 0:
            raise ValueError(
                "settle_seconds and poll_seconds are 0 or more, got "
                f"{self.settle_seconds} and {self.poll_seconds}"
            )

    def open(self, positions: Positions, shard: Shard, *, has_end: bool) -> FolderReader:
        """Look at the folder; see `Source.open`."""
        return FolderReader(self, positions, shard, has_end=has_end)


class FolderReader(SourceReader):
    """Reads the files of one process, one after another."""

    def __init__(
        self, source: FolderSource, positions: Positions, shard: Shard, *, has_end: bool
    ) -> None:
        self._source, self._shard, self._has_end = source, shard, has_end
        self._directory = pathlib.Path(source.directory)
        if not self._directory.is_dir():
            raise DataError(f"{self._directory} is no folder; make it before it is read")
        self._waiting: collections.deque[str] = collections.deque()
        self._rows: Iterator[Rows] = iter(())
        # Names of files that are waiting or were read.
        self._known = {name for name, position in positions.items() if position == _DONE}
        self._begun = {
            name: position.row
            for name, position in positions.items()
            if name not in self._known and self._is_own(name)
        }
        self._looked = -np.inf
        self._is_done = False
        self._there: set[str] = set()
        for name in [name for name in self._begun if not (self._directory / name).exists()]:
            self._on_removed(name)
            del self._begun[name]
        self._look()
        # A removed file never comes back: its name need not be saved any longer.
        self._starts = {
            name: position
            for name, position in positions.items()
            if self._is_own(name) and (self._directory / name).exists()
        }

    @property
    def starts(self) -> Positions:
        return self._starts

    @property
    def has_ended(self) -> bool:
        return self._is_done

    def read(self, rows: int) -> Rows | None:
        while (found := next(self._rows, None)) is None:
            if self._waiting:
                self._rows = self._read_file(self._waiting.popleft())
                continue
            if self._has_end:
                self._is_done = True
                return None
            if time.monotonic() - self._looked >= self._source.poll_seconds:
                self._look()
            if not self._waiting:
                time.sleep(POLL_SECONDS)
                return None
        return found

    def _look(self) -> None:
        """Add files that are new to those that wait."""
        self._looked = time.monotonic()
        files = self._files()
        self._there = set(files)
        new = [name for name in files if name not in self._known]
        # A file of which some rows are used comes first, as in the run that used them.
        new.sort(key=lambda name: name not in self._begun)
        self._known.update(new)
        self._waiting.extend(new)

    def _is_own(self, name: str) -> bool:
        """Return whether a file belongs to this process."""
        return zlib.crc32(name.encode()) % self._shard.count == self._shard.index

    def _files(self) -> list[str]:
        """Return the names of this process's complete files, in order."""
        source, now, paths = self._source, time.time(), {}
        for folder, directories, names in os.walk(self._directory):
            directories[:] = [name for name in directories if _is_final(name)]
            for name in filter(_is_data, names):
                path = pathlib.Path(folder, name)
                try:
                    changed = path.stat().st_mtime_ns
                except FileNotFoundError:  # removed meanwhile
                    continue
                if source.settle_seconds <= 0 or now - changed / 1e9 >= source.settle_seconds:
                    paths[path] = changed
        ordered = in_natural_order(without_descriptions(list(paths)))
        if source.order == "time":
            ordered.sort(key=lambda path: paths[path])
        shown = (path.relative_to(self._directory).as_posix() for path in ordered)
        return [name for name in shown if self._is_own(name)]

    def _read_file(self, name: str) -> Iterator[Rows]:
        """Yield the rows of a file that were not used before."""
        path, used = self._directory / name, self._begun.pop(name, 0)
        try:
            for (first, table), is_last in _with_last(_tables(path, self._source.schema, used)):
                yield _rows(name, self._read_columns(_with_keys(table, name)), first, is_last)
        except FileNotFoundError:
            self._on_removed(name)
        except (DataError, pa.ArrowException) as error:
            raise DataError(f"{_naming(path, error)}; {_RENAME}") from None

    def _read_columns(self, table: pa.Table) -> pa.Table:
        if (schema := self._source.schema) is None:
            return table
        table = with_null_fields(table, schema.names)
        return table.select([name for name in schema.names if name in table.column_names])

    def _on_removed(self, name: str) -> None:
        text = f"{self._directory / name} was removed before all of its rows were used"
        if self._source.deleted == "fail":
            raise DataError(
                f"{text}; remove files once a checkpoint has their rows, or leave the rows out "
                'with deleted="skip"'
            ) from None
        warnings.warn(f"{text}; they are left out", stacklevel=2)

    def describe(self, part: str, offset: int, row: int) -> str:
        return f"{self._directory / part}, row {row}"

    def lag(self, positions: Positions) -> dict[str, int]:
        done = {name for name, position in positions.items() if position == _DONE}
        return {"files": len(self._there - done)}

    def close(self) -> None:
        self._rows = iter(())


def _is_final(name: str) -> bool:
    # Spark and others name unfinished files and metadata so, and Hive columns such as _day=3.
    return not name.startswith((".", "_")) or "=" in name


def _is_data(name: str) -> bool:
    is_known = is_parquet_name(name) or any(kind.pattern.search(name) for kind in FORMATS)
    return _is_final(name) and is_known


def _tables(
    path: pathlib.Path, schema: pa.Schema | None, used: int
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the tables of a file with the number of their first row, from row ``used`` on."""
    first = 0
    for table in _parquet(path, used) if is_parquet_name(path.name) else _text(path, schema):
        rows = len(table) if isinstance(table, pa.Table) else table
        skipped = min(max(0, used - first), rows)
        if isinstance(table, pa.Table) and (rows > skipped or not rows):
            yield first + skipped, table[skipped:]
        first += rows
    if first < used:
        raise DataError(
            f"{path} has {first:,} rows, of which {used:,} were used before: it was changed"
        )
    if first == used:  # a file has one table or more
        yield first, pa.table({})


def _parquet(path: pathlib.Path, used: int) -> Iterator[pa.Table | int]:
    """Yield the row groups of a file; of those before row ``used``, only the number of rows."""
    groups, first = ParquetGroups((path,)), 0
    for group, rows in enumerate(groups.sizes):
        first += rows
        yield rows if first <= used else groups.read(group)


def _text(path: pathlib.Path, schema: pa.Schema | None) -> Iterator[pa.Table]:
    kind = next(kind for kind in FORMATS if kind.pattern.search(path.name))
    types = {} if schema is None else {field.name: field.type for field in schema}
    types = types if kind.takes_types else {}
    guesses: dict[str, pa.DataType] = {}
    # The types of all rows, since rows that are given cannot change theirs. Those of a small file
    # follow from its only part.
    is_small = path.suffix in kind.suffixes and path.stat().st_size < PART_BYTES
    while kind.guesses_types and not is_small:
        try:
            collections.deque(kind.tables(path, types, guesses), maxlen=0)
            break
        except WiderTypeError as wider:
            guesses[wider.column] = wider.kind
    yield from kind.tables(path, types, guesses)


def _with_last(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Yield each item and whether it is the last."""
    iterator = iter(items)
    item = next(iterator)
    for following in iterator:
        yield item, False
        item = following
    yield item, True


def _with_keys(table: pa.Table, name: str) -> pa.Table:
    """Add the columns of directories ``key=value`` on a file's path."""
    types = key_types([name])
    for key, value in keys_of(name).items():
        if key not in table.column_names:
            table = table.append_column(key, key_column(value, types[key], len(table)))
    return table


def _rows(name: str, table: pa.Table, first: int, is_last: bool) -> Rows:
    """Return rows of a file, which is a part with one message."""
    return Rows(
        table,
        (name,),
        part=np.zeros(1, np.int64),
        offset=np.zeros(1, np.int64),
        first=np.array([first], np.int64),
        stop=np.array([len(table)], np.int64),
        is_whole=np.array([is_last]),
        seconds=np.array([np.nan]),
    )


def _naming(path: pathlib.Path, error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if str(path) in text else f"{path}: {text}"
