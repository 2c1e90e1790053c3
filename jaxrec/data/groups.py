"""Groups of rows that are read as a whole, from Parquet and npy files."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from jaxrec.data.arrays import NpzMember
from jaxrec.data.criteo.text import DataError
from jaxrec.data.files import key_column, key_types, keys_of, parquet_files
from jaxrec.data.parquet import columns_of, open_parquet

# Rows of a group of npy files, which have no groups of their own.
NPY_GROUP_ROWS = 1 << 16


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
        """Return the file of a group and the number of the group's first row in it."""


@dataclasses.dataclass(frozen=True)
class ParquetGroups:
    """The row groups of Parquet files.

    Attributes:
        paths: The files, in order.
        columns: Names of the columns that are read; None: all. The name of a directory
            ``key=value`` on a file's path is a column of the file, which has no such column itself.
        keys: Names of the directories' columns that are read if ``columns`` is None.

    Raises:
        OSError: A file cannot be read.
        DataError: A file is not a Parquet file, or lacks a column; or no file is given.

    Example:
        >>> import tempfile
        >>> import pyarrow.parquet as pq
        >>> path = pathlib.Path(tempfile.mkdtemp(), "rows.parquet")
        >>> pq.write_table(pa.table({"id": [1, 2, 3]}), path, row_group_size=2)
        >>> groups = ParquetGroups((path,))
        >>> groups.sizes, groups.read(1)["id"].to_pylist()
        ((2, 1), [3])
    """

    paths: tuple[str | os.PathLike[str], ...]
    columns: tuple[str, ...] | None = None
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.paths:
            raise DataError("there are no Parquet files to read")

    @classmethod
    def of_directory(
        cls, directory: str | os.PathLike[str], columns: Sequence[str] | None = None
    ) -> ParquetGroups:
        """Return the row groups of a directory's Parquet files, in the order of their numbers.

        Args:
            directory: The directory, which may have directories named ``key=value``; or a pattern
                of files or directories, such as ``parts/*.parquet``.
            columns: Names of the columns that are read; None: all.

        Raises:
            FileNotFoundError: There is no such file or directory.
            DataError: The directory has no Parquet files.
        """
        files = parquet_files(directory)
        return cls(files.paths, None if columns is None else tuple(columns), files.keys)

    @functools.cached_property
    def _key_types(self) -> dict[str, pa.DataType]:
        """Types of the columns that names of directories stand for."""
        return key_types(self.paths)

    def _keys(self, path: pathlib.Path, stored: Sequence[str]) -> dict[str, str | None]:
        """Return the keys that are columns of a file, which has the ``stored`` columns itself."""
        wanted = self.columns or self.keys
        return {n: x for n, x in keys_of(path).items() if n in wanted and n not in stored}

    @functools.cached_property
    def _files(self) -> tuple[tuple[pathlib.Path, pa.Schema, tuple[int, ...]], ...]:
        """Path, columns and sizes of the row groups of each file."""
        files = []
        for path in map(pathlib.Path, self.paths):
            with open_parquet(path) as file:
                columns, metadata = columns_of(file), file.metadata
            for name in self._keys(path, columns.names):
                columns = columns.append(pa.field(name, self._key_types[name]))
            for name in self.columns or ():
                if name not in columns.names:
                    raise DataError(
                        f"{path} has no column {name!r}; its columns are {', '.join(columns.names)}"
                    )
            numbers = range(metadata.num_row_groups)
            sizes = tuple(metadata.row_group(number).num_rows for number in numbers)
            files.append((path, columns, sizes))
        return tuple(files)

    @property
    def schemas(self) -> dict[pathlib.Path, pa.Schema]:
        """Names and types of the columns of each file, keys of its directories included.

        Raises:
            OSError: A file cannot be read.
            DataError: A file is not a Parquet file, or lacks a column.
        """
        return {path: columns for path, columns, _ in self._files}

    @functools.cached_property
    def _locations(self) -> tuple[tuple[pathlib.Path, int, int, int], ...]:
        """File, number in the file, first row in the file and number of rows of each group."""
        locations = []
        for path, _, sizes in self._files:
            stops = itertools.accumulate(sizes)
            locations += [
                (path, number, stop - rows, rows)
                for number, (rows, stop) in enumerate(zip(sizes, stops, strict=True))
            ]
        return tuple(locations)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each group."""
        return tuple(rows for *_, rows in self._locations)

    def read(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the rows of a group.

        Args:
            group: Number of the group.
            columns: Names of some of the columns; None: all that the groups have.

        Raises:
            OSError: The file cannot be read.
            DataError: The file is damaged: it is not a Parquet file, or a page's checksum differs.
        """
        path, number, _, rows = self._locations[group]
        columns = self.columns if columns is None else columns
        try:
            with open_parquet(path, page_checksum_verification=True) as file:
                stored = file.schema_arrow.names
                wanted = None if columns is None else [name for name in columns if name in stored]
                table = file.read_row_group(number, columns=wanted, use_threads=False)
        except DataError as error:
            raise DataError(f"{path}, row group {number}: it cannot be read ({error})") from None
        for name, value in self._keys(path, stored).items():
            if columns is None or name in columns:
                table = table.append_column(name, key_column(value, self._key_types[name], rows))
        return table if columns is None else table.select(list(columns))

    def location(self, group: int) -> tuple[pathlib.Path, int]:
        """Return the file of a group and the number of the group's first row in it."""
        path, _, first, _ = self._locations[group]
        return path, first


@dataclasses.dataclass(frozen=True)
class GroupRange:
    """The rows ``[start, stop)`` of row groups, such as the training rows or the held-out rows.

    Attributes:
        groups: The row groups.
        start, stop: First row, and row after the last, counted over all groups.

    Raises:
        ValueError: The range is empty or exceeds the rows.
    """

    groups: RowGroups
    start: int
    stop: int

    def __post_init__(self) -> None:
        total = sum(self.groups.sizes)
        if not 0 <= self.start < self.stop <= total:
            raise ValueError(f"rows {self.start} to {self.stop} are not among {total} rows")

    @functools.cached_property
    def _cuts(self) -> tuple[tuple[int, int, int], ...]:
        """Number of each group with rows of the range, and the range of its rows."""
        cuts, first = [], 0
        for group, rows in enumerate(self.groups.sizes):
            low, high = max(self.start - first, 0), min(self.stop - first, rows)
            if low < high:
                cuts.append((group, low, high))
            first += rows
        return tuple(cuts)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each group."""
        return tuple(high - low for _, low, high in self._cuts)

    def read(self, group: int) -> pa.Table:
        """Read the rows of a group."""
        number, low, high = self._cuts[group]
        return self.groups.read(number).slice(low, high - low)

    def location(self, group: int) -> tuple[pathlib.Path, int]:
        """Return the file of a group and the number of the group's first row in it.

        Raises:
            TypeError: ``groups`` have no locations.
        """
        if not isinstance(self.groups, LocatedGroups):
            raise TypeError(f"{type(self.groups).__name__} has no method location")
        number, low, _ = self._cuts[group]
        path, first = self.groups.location(number)
        return path, first + low


@dataclasses.dataclass(frozen=True)
class NpyGroups:
    """Rows of npy files, one file for each column, such as TorchRec's ``day_0_dense.npy``.

    An array ``[rows]`` becomes a column of numbers, an array ``[rows, k]`` a column of lists of
    ``k`` numbers; `to_numpy` is the inverse. The files are memory-mapped. Arrays of an npz file are
    columns, too (`npz_members`).

    Attributes:
        paths: The file of each column by name, or the `NpzMember`.
        group_rows: Number of rows of a group.

    Raises:
        OSError: A file cannot be read.
        DataError: The arrays have different numbers of rows, or more than two axes.

    Example:
        >>> import tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "dense.npy")
        >>> np.save(path, np.arange(6, dtype=np.float32).reshape(3, 2))
        >>> groups = NpyGroups({"dense": path}, group_rows=2)
        >>> groups.sizes, to_numpy(groups.read(1)["dense"]).tolist()
        ((2, 1), [[4.0, 5.0]])
    """

    paths: Mapping[str, str | os.PathLike[str] | NpzMember]
    group_rows: int = NPY_GROUP_ROWS

    @functools.cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {}
        for name, path in self.paths.items():
            if isinstance(path, NpzMember):
                arrays[name] = path.open()
                continue
            try:
                arrays[name] = np.lib.format.open_memmap(path, "r")
            except (ValueError, OverflowError, TypeError) as error:
                raise DataError(f"{path} is not an npy file ({error})") from None
        shapes = {name: array.shape for name, array in arrays.items()}
        if len({shape[:1] for shape in shapes.values()}) != 1 or any(
            len(shape) not in (1, 2) for shape in shapes.values()
        ):
            raise DataError(
                f"arrays side by side are [rows] or [rows, k] with equal rows: {shapes}"
            )
        return arrays

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each group."""
        rows = len(next(iter(self._arrays.values())))
        return tuple(
            min(self.group_rows, rows - start) for start in range(0, rows, self.group_rows)
        )

    def read(self, group: int) -> pa.Table:
        """Read the rows of a group."""
        rows = slice(group * self.group_rows, (group + 1) * self.group_rows)
        return pa.table({name: _column(array[rows]) for name, array in self._arrays.items()})


def _column(array: np.ndarray) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    return flat if array.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, array.shape[1])


def to_numpy(column: pa.ChunkedArray) -> np.ndarray:
    """Convert a column of numbers to ``[rows]``, a column of lists of ``k`` to ``[rows, k]``.

    Raises:
        DataError: A value is missing, or lists have different lengths.

    Example:
        >>> to_numpy(pa.chunked_array([[1, 2], [3]])).tolist()
        [1, 2, 3]
    """
    if column.null_count:
        raise DataError(
            f"a column has {column.null_count} missing values, which arrays cannot hold; fill "
            "them (pyarrow.compute.fill_null) before"
        )
    kind = column.type
    if not isinstance(kind, pa.ListType | pa.FixedSizeListType):
        return column.to_numpy()
    flat = pa.chunked_array([chunk.flatten() for chunk in column.chunks], kind.value_type)
    values = flat.to_numpy()
    if isinstance(kind, pa.ListType):
        lengths = {len(x) for x in column.to_pylist()}
        if len(lengths) > 1:
            raise DataError(
                "lists of different lengths are not an array; KeyedJaggedArray.from_arrow"
            )
    return values.reshape(len(column), -1) if len(column) else values.reshape(0, 0)
