"""Readers of npy and npz files, which are mapped into memory, and a writer of large npz files."""

from __future__ import annotations

import dataclasses
import functools
import os
import zipfile
from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa
from jaxtyping import Shaped

from jaxrec.data.files import DataError
from jaxrec.files.npz import NpzFile

# Rows of a group of files that have no row groups, unlike Parquet.
GROUP_ROWS = 1 << 16

# The oldest time that a zip file can have. With a fixed time, equal arrays make equal files.
_TIME = (1980, 1, 1, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class NpzMember:
    """An array of an npz file that `numpy.savez` wrote, without compression."""

    path: str | os.PathLike[str]
    name: str

    def open(self) -> Shaped[np.ndarray, "..."]:
        """Map the array into memory, read-only."""
        with NpzFile(self.path, DataError) as file:
            if self.name not in file.names:
                names = ", ".join(sorted(file.names))
                raise DataError(f"{self.path} has no array {self.name!r}; it has {names}")
            if file.is_compressed(self.name):
                raise DataError(
                    f"{self.path}: array {self.name!r} is compressed and cannot be mapped into "
                    "memory; write it by numpy.savez"
                )
            return file.map(self.name)


def npz_members(path: str | os.PathLike[str]) -> dict[str, NpzMember]:
    """Return the arrays of an npz file by name, in the order of the file, for `NpyGroups`.

    Raises:
        OSError: The file cannot be read.
        DataError: The file is not an npz file.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "ids.npz")
        >>> np.savez(path, a=np.arange(3), b=np.ones((3, 2)))
        >>> list(npz_members(path))
        ['a', 'b']
    """
    with NpzFile(path, DataError) as file:
        return {name: NpzMember(path, name) for name in file.names}


@dataclasses.dataclass(frozen=True)
class NpyGroups:
    """Rows of npy files, one file for each column, such as TorchRec's ``day_0_dense.npy``.

    An array ``[rows]`` becomes a column of numbers, an array ``[rows, k]`` a column of lists of
    ``k`` numbers. ``jaxrec.data.arrays.to_numpy`` converts such columns back. The files are
    memory-mapped. `npz_members` gives the arrays of an npz file for ``paths``.

    Attributes:
        paths: The file of each column by name, or a value of `npz_members`.
        group_rows: Number of rows of a group.

    Raises:
        OSError: A file cannot be read.
        DataError: An array has records or more than two axes, or numbers of rows differ.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "dense.npy")
        >>> np.save(path, np.arange(6, dtype=np.float32).reshape(3, 2))
        >>> groups = NpyGroups({"dense": path}, group_rows=2)
        >>> groups.sizes, to_numpy(groups.read(1)["dense"]).tolist()
        ((2, 1), [[4.0, 5.0]])
    """

    paths: Mapping[str, str | os.PathLike[str] | NpzMember]
    group_rows: int = GROUP_ROWS

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
        for name, array in arrays.items():
            if array.dtype.kind == "V":
                raise DataError(f"{self.paths[name]} holds {array.dtype}, expected numbers")
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
        return sizes_of_groups(len(next(iter(self._arrays.values()))), self.group_rows)

    def read(self, group: int) -> pa.Table:
        """Read the rows of a group."""
        # The end may be beyond the last row, where NumPy's slices stop.
        rows = slice(group * self.group_rows, (group + 1) * self.group_rows)
        return pa.table({name: as_column(array[rows]) for name, array in self._arrays.items()})


def sizes_of_groups(rows: int, group_rows: int) -> tuple[int, ...]:
    """Return the sizes of groups of ``group_rows`` rows; the last group may be smaller."""
    return tuple(min(group_rows, rows - start) for start in range(0, rows, group_rows))


def as_column(array: np.ndarray) -> pa.Array:
    """Convert an array ``[rows, ...]`` to a column of numbers, or of lists of numbers."""
    if array.dtype.kind == "V":  # bfloat16 and the like
        array = array.astype(np.float32)
    column = pa.array(np.ascontiguousarray(array).reshape(-1))
    for size in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def to_numpy(column: pa.ChunkedArray) -> np.ndarray:
    """Convert a column of numbers to ``[rows]``, or of lists of ``k`` numbers to ``[rows, k]``."""
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


class NpzWriter:
    """Writer of an npz file, array by array and part by part; `numpy.load` reads the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._archive = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True)

    def write(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.typing.DTypeLike,
        parts: Iterable[Shaped[np.ndarray, "_rows ..."]],
    ) -> None:
        """Write an array that comes in parts of rows, which are converted to ``dtype``."""
        # numpy.savez needs the whole array in memory. The npy format needs only its shape before
        # the rows.
        header = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
            "fortran_order": False,
            "shape": shape,
        }
        written = 0
        entry = zipfile.ZipInfo(f"{name}.npy", _TIME)
        with self._archive.open(entry, "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for part in parts:
                file.write(np.ascontiguousarray(part, dtype).tobytes())
                written += part.size
        if written != np.prod(shape, dtype=np.int64):
            raise ValueError(f"array {name!r} of shape {shape} got {written} elements")

    def __enter__(self) -> NpzWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()
