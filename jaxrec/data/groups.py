"""Row groups, the parts in which files are read: the interface of readers, and groups of files.

To add a file format, write a module with a subclass of `FileGroups` whose ``open`` opens a file;
`jaxrec.data.parquet` is the model. Everything above, from schemas to batches, sees only row groups.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

import pyarrow as pa

from jaxrec.data.addresses import data_path
from jaxrec.data.files import DataError
from jaxrec.data.partitions import has_value, key_column, key_types, keys_of
from jaxrec.data.structs import flat_schema


@runtime_checkable
class RowGroups(Protocol):
    """Rows that are read group by group.

    Attributes:
        sizes: Number of rows of each group.
    """

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def read(self, group: int) -> pa.Table:
        """Read the rows of a group."""


@runtime_checkable
class LocatedGroups(RowGroups, Protocol):
    """Row groups with a location in a file."""

    def location(self, group: int) -> tuple[pathlib.Path, int]:
        """Return the file of a group and the number of the group's first row in the file."""


@runtime_checkable
class ColumnGroups(LocatedGroups, Protocol):
    """Row groups of which some columns can be read."""

    def read(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the rows of a group, with some of its columns or all."""


class OpenFile(Protocol):
    """An open file of some format.

    Attributes:
        columns: Names and types of the file's columns.
        sizes: Number of rows of each group.
    """

    @property
    def columns(self) -> pa.Schema: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def read(self, group: int, columns: list[str] | None) -> pa.Table:
        """Read some columns of a group; None: all columns."""


@dataclasses.dataclass(frozen=True)
class FileGroups(abc.ABC):
    """The row groups of files of one format.

    Attributes:
        paths: The files, in order; also addresses, such as ``s3://bucket/part-0.parquet``.
        columns: Names of the columns to read; None: all. A directory ``key=value`` on a file's path
            is a column ``key`` of the file, unless the file has a column of this name.
        keys: Names of the directories' columns to read if ``columns`` is None. A file's own column
            of such a name must have the directory's value in all rows.
        sources: For each file its name in errors and in `schemas`, such as the one that it was
            converted from; (): its path.
    """

    paths: tuple[str | os.PathLike[str], ...]
    columns: tuple[str, ...] | None = None
    keys: tuple[str, ...] = ()
    sources: tuple[str | os.PathLike[str], ...] = ()

    format: ClassVar[str]

    def __post_init__(self) -> None:
        if not self.paths:
            raise DataError(f"no {self.format} files were given")

    @abc.abstractmethod
    def open(self, path: pathlib.Path) -> contextlib.AbstractContextManager[OpenFile]:
        """Open a file; raise DataError if it has another format, also inside the ``with`` block."""

    @functools.cached_property
    def _sources(self) -> dict[pathlib.Path, pathlib.Path]:
        """Each file's name in errors."""
        sources = self.sources or self.paths
        return dict(zip(map(data_path, self.paths), map(data_path, sources), strict=True))

    @functools.cached_property
    def _key_types(self) -> dict[str, pa.DataType]:
        """Type of each column that comes from ``key=value`` directories."""
        # Over all files: one file alone may have an integer where the data set has strings.
        return key_types(self.paths)

    def _keys(self, path: pathlib.Path, stored: Sequence[str]) -> dict[str, str | None]:
        """Return the values of ``key=value`` directories that are columns of the file ``path``.

        ``stored`` are the columns that the file has itself.
        """
        wanted = self.columns or self.keys
        return {n: x for n, x in keys_of(path).items() if n in wanted and n not in stored}

    @functools.cached_property
    def _files(self) -> tuple[tuple[pathlib.Path, pa.Schema, tuple[int, ...]], ...]:
        """Each file's path, the names and types of its columns, and the rows of each group."""
        # All footers are read before the first row: a file without a column fails now, not in the
        # middle of an epoch.
        files = []
        for path in self._sources:
            with self.open(path) as file:
                columns, sizes = file.columns, file.sizes
            for name in self._keys(path, columns.names):
                columns = columns.append(pa.field(name, self._key_types[name]))
            files.append((path, columns, sizes))
        names = dict.fromkeys(name for _, columns, _ in files for name in columns.names)
        names |= dict.fromkeys(self.columns or ())
        files = [(path, flat_schema(columns, names), sizes) for path, columns, sizes in files]
        is_empty = not any(any(sizes) for *_, sizes in files)
        for path, columns, sizes in files:
            for name in self.columns or ():
                if name not in columns.names and (is_empty or any(sizes)):
                    raise missing_column(self._sources[path], name, columns.names)
        return tuple(files)

    @property
    def schemas(self) -> dict[pathlib.Path, pa.Schema]:
        """Names and types of each file's columns; directories such as ``day=3`` are columns too."""
        return {self._sources[path]: columns for path, columns, _ in self._files}

    @property
    def schemas_of_rows(self) -> dict[pathlib.Path, pa.Schema]:
        """The `schemas` of files with rows; if no file has any, of all.

        Columns without rows have no types, as a table of names alone or an empty data frame.
        """
        filled = {self._sources[path]: x for path, x, sizes in self._files if sum(sizes)}
        return filled or self.schemas

    @functools.cached_property
    def _locations(self) -> tuple[tuple[pathlib.Path, int, int, int], ...]:
        """Each group's file, number in the file, first row in the file, and number of rows."""
        locations = []
        for path, _, sizes in self._files:
            stops = itertools.accumulate(sizes)
            locations += [
                (path, number, stop - rows, rows)
                for number, (rows, stop) in enumerate(zip(sizes, stops, strict=True))
                if rows
            ]
        return tuple(locations)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each group."""
        return tuple(rows for *_, rows in self._locations)

    def read(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the rows of a group, with some of its columns or all."""
        path, number, _, rows = self._locations[group]
        columns = self.columns if columns is None else columns
        source = self._sources[path]
        names = self.schemas[source].names
        if missing := [name for name in columns or () if name not in names]:
            raise missing_column(source, missing[0], names)
        # Opened for each group: threads read groups at the same time, and one open file has one
        # position.
        try:
            with self.open(path) as file:
                stored = file.columns.names
                wanted = None if columns is None else [name for name in columns if name in stored]
                table = file.read(number, wanted)
        except DataError as error:
            raise DataError(f"{source}, row group {number}: it cannot be read ({error})") from None
        # The fields of a struct that is null in all rows of this file.
        known = {*stored, *keys_of(path)}
        if fields := [n for n in (names if columns is None else columns) if n not in known]:
            for name in fields:
                table = table.append_column(name, pa.nulls(rows))
            table = table.select([name for name in table.column_names if name in names])
        for name, value in keys_of(path).items():
            if name in self.keys and name in table.column_names:
                check_key(table[name], name, value, source)
        # The value of a directory is not stored in the file, and is the same in all its rows.
        for name, value in self._keys(path, stored).items():
            if columns is None or name in columns:
                table = table.append_column(name, key_column(value, self._key_types[name], rows))
        return table if columns is None else table.select(list(columns))

    def location(self, group: int) -> tuple[pathlib.Path, int]:
        path, _, first, _ = self._locations[group]
        return self._sources[path], first


@dataclasses.dataclass(frozen=True, eq=False)
class TableGroups:
    """The rows of a table in memory, in groups.

    Attributes:
        table: The table.
        rows: Number of rows of a group.

    Raises:
        DataError: Reading a column that the table lacks raises it.
        ValueError: ``rows`` is below 1.

    Example:
        >>> groups = TableGroups(pa.table({"id": [1, 2, 3]}), rows=2)
        >>> groups.sizes, groups.read(1)["id"].to_pylist()
        ((2, 1), [3])
    """

    table: pa.Table
    rows: int = 4096

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows is 1 or more, got {self.rows}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each group."""
        full, rest = divmod(len(self.table), self.rows)
        return (self.rows,) * full + ((rest,) if rest else ())

    def read(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of a group, with some of its columns or all."""
        names = self.table.column_names
        if missing := [name for name in columns or () if name not in names]:
            raise missing_column("the table", missing[0], names)
        rows = self.table.slice(group * self.rows, self.rows)
        return rows if columns is None else rows.select(list(columns))

    def location(self, group: int) -> tuple[pathlib.Path, int]:
        return pathlib.Path("the table"), group * self.rows


@dataclasses.dataclass(frozen=True)
class GroupRange:
    """The rows ``[start, stop)`` of all groups, such as the training rows or the held-out rows."""

    groups: RowGroups
    start: int
    stop: int

    def __post_init__(self) -> None:
        total = sum(self.groups.sizes)
        if not 0 <= self.start < self.stop <= total:
            raise ValueError(f"rows {self.start} to {self.stop} are not among {total} rows")

    @functools.cached_property
    def _cuts(self) -> tuple[tuple[int, int, int], ...]:
        """Number of each group with rows of the range, and the range's start and end in it."""
        cuts, first = [], 0
        for group, rows in enumerate(self.groups.sizes):
            low, high = max(self.start - first, 0), min(self.stop - first, rows)
            if low < high:
                cuts.append((group, low, high))
            first += rows
        return tuple(cuts)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(high - low for _, low, high in self._cuts)

    def read(self, group: int) -> pa.Table:
        number, low, high = self._cuts[group]
        return self.groups.read(number).slice(low, high - low)

    def location(self, group: int) -> tuple[pathlib.Path, int]:
        if not isinstance(self.groups, LocatedGroups):
            raise TypeError(f"{type(self.groups).__name__} has no method location")
        number, low, _ = self._cuts[group]
        path, first = self.groups.location(number)
        return path, first + low


def missing_column(path: str | os.PathLike[str], column: str, columns: Sequence[str]) -> DataError:
    """Return the error of a file that lacks a column."""
    return DataError(f"{path} has no column {column!r}; its columns are {', '.join(columns)}")


def check_key(
    column: pa.ChunkedArray, name: str, value: str | None, path: str | os.PathLike[str]
) -> None:
    """Raise a DataError if a file's column has another value than its directory ``key=value``."""
    if not has_value(column, value):
        values = ", ".join(dict.fromkeys(map(str, column[:10].to_pylist())))
        raise DataError(
            f"{path}, column {name!r}: the file has the values {values}, and its directory says "
            f"{'null' if value is None else value}; leave the column out of the file, or rename "
            "the directory"
        )
