"""Rows on the disk in groups that are read as a whole: of Parquet files, and of npy arrays."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrec.data.text import DataError

# Rows of a group where the files have none of their own.
NPY_GROUP_ROWS = 1 << 16


@runtime_checkable
class RowGroups(Protocol):
    """Rows that are read group by group.

    Attributes:
        sizes: Rows of each group.
    """

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def read(self, group: int) -> pa.Table:
        """The rows of a group."""


@runtime_checkable
class PlacedGroups(RowGroups, Protocol):
    """Row groups that know where they stand."""

    def place(self, group: int) -> tuple[pathlib.Path, int]:
        """The file of a group, and the rows of the file before it."""


@dataclasses.dataclass(frozen=True)
class ParquetGroups:
    """The row groups of Parquet files.

    Attributes:
        paths: The files, in order.
        columns: Those that are read; None: all.

    Raises:
        OSError: A file cannot be read.
        DataError: A file is no Parquet file, or lacks a column; or there is no file.

    Example:
        >>> import tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "rows.parquet")
        >>> pq.write_table(pa.table({"id": [1, 2, 3]}), path, row_group_size=2)
        >>> groups = ParquetGroups((path,))
        >>> groups.sizes, groups.read(1)["id"].to_pylist()
        ((2, 1), [3])
    """

    paths: tuple[str | os.PathLike[str], ...]
    columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.paths:
            raise DataError("there are no Parquet files to read")

    @classmethod
    def of_directory(
        cls, directory: str | os.PathLike[str], columns: Sequence[str] | None = None
    ) -> ParquetGroups:
        """The Parquet files of a directory, in the order of their names.

        Raises:
            DataError: There is none.
        """
        paths = tuple(sorted(pathlib.Path(directory).glob("*.parquet")))
        if not paths:
            raise DataError(f"{directory}: there are no Parquet files in this directory")
        return cls(paths, None if columns is None else tuple(columns))

    @functools.cached_property
    def _places(self) -> tuple[tuple[pathlib.Path, int, int, int], ...]:
        """File, number within it, rows before it there, and rows of each group."""
        places = []
        for path in map(pathlib.Path, self.paths):
            try:
                metadata = pq.read_metadata(path)
            except pa.ArrowInvalid as error:
                raise DataError(f"{path} is no Parquet file ({error})") from None
            for name in self.columns or ():
                if name not in metadata.schema.to_arrow_schema().names:
                    raise DataError(
                        f"{path} has no column {name!r}; its columns are "
                        f"{', '.join(metadata.schema.to_arrow_schema().names)}"
                    )
            first = 0
            for group in range(metadata.num_row_groups):
                rows = metadata.row_group(group).num_rows
                places.append((path, group, first, rows))
                first += rows
        return tuple(places)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each group."""
        return tuple(rows for *_, rows in self._places)

    def read(self, group: int) -> pa.Table:
        """The rows of a group.

        Raises:
            OSError: The file cannot be read.
            DataError: It is damaged: it is no Parquet file, or a page's checksum differs.
        """
        path, number, *_ = self._places[group]
        columns = None if self.columns is None else list(self.columns)
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                return file.read_row_group(number, columns=columns, use_threads=False)
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the system's, which names the file
            raise DataError(f"{path}, row group {number}: it cannot be read ({error})") from None

    def place(self, group: int) -> tuple[pathlib.Path, int]:
        """The file of a group, and the rows of the file before it."""
        path, _, first, _ = self._places[group]
        return path, first


@dataclasses.dataclass(frozen=True)
class GroupRange:
    """Some rows of others, such as those to train on and those that are held out.

    Attributes:
        groups: The others.
        start, stop: The rows, counted over all groups.

    Raises:
        ValueError: There are no such rows.
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
        """The groups that have some of the rows, and which of their own rows those are."""
        cuts, first = [], 0
        for group, rows in enumerate(self.groups.sizes):
            low, high = max(self.start - first, 0), min(self.stop - first, rows)
            if low < high:
                cuts.append((group, low, high))
            first += rows
        return tuple(cuts)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each group."""
        return tuple(high - low for _, low, high in self._cuts)

    def read(self, group: int) -> pa.Table:
        """The rows of a group."""
        number, low, high = self._cuts[group]
        return self.groups.read(number).slice(low, high - low)

    def place(self, group: int) -> tuple[pathlib.Path, int]:
        """The file of a group, and the rows of the file before it.

        Raises:
            TypeError: The others do not know.
        """
        if not isinstance(self.groups, PlacedGroups):
            raise TypeError(f"{type(self.groups).__name__} does not know where its rows stand")
        number, low, _ = self._cuts[group]
        path, first = self.groups.place(number)
        return path, first + low


@dataclasses.dataclass(frozen=True)
class NpyGroups:
    """Arrays of npy files side by side, such as TorchRec's ``day_0_dense.npy`` and its kin.

    An array of ``[rows]`` becomes a column of numbers, one of ``[rows, k]`` a column of lists of
    ``k`` (`to_numpy` makes arrays of them again). The files are mapped, not read.

    Attributes:
        paths: The file of each column.
        group_rows: Rows of a group.

    Raises:
        OSError: A file cannot be read.
        DataError: The arrays differ in their rows, or have other shapes.

    Example:
        >>> import tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "dense.npy")
        >>> np.save(path, np.arange(6, dtype=np.float32).reshape(3, 2))
        >>> groups = NpyGroups({"dense": path}, group_rows=2)
        >>> groups.sizes, to_numpy(groups.read(1)["dense"]).tolist()
        ((2, 1), [[4.0, 5.0]])
    """

    paths: Mapping[str, str | os.PathLike[str]]
    group_rows: int = NPY_GROUP_ROWS

    @functools.cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {}
        for name, path in self.paths.items():
            try:
                arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
            except ValueError as error:
                raise DataError(f"{path} is no npy file ({error})") from None
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
        """Rows of each group."""
        rows = len(next(iter(self._arrays.values())))
        return tuple(
            min(self.group_rows, rows - start) for start in range(0, rows, self.group_rows)
        )

    def read(self, group: int) -> pa.Table:
        """The rows of a group."""
        rows = slice(group * self.group_rows, (group + 1) * self.group_rows)
        return pa.table({name: _column(array[rows]) for name, array in self._arrays.items()})


def _column(array: np.ndarray) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    return flat if array.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, array.shape[1])


def to_numpy(column: pa.ChunkedArray) -> np.ndarray:
    """A column of numbers as ``[rows]``, one of lists of ``k`` as ``[rows, k]``.

    Raises:
        DataError: A value is missing, or lists differ in their lengths.

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
            raise DataError("lists of different lengths are no array; KeyedJaggedArray.from_arrow")
    return values.reshape(len(column), -1) if len(column) else values.reshape(0, 0)
