"""Arrays of npz files, mapped into memory."""

from __future__ import annotations

import dataclasses
import os
import zipfile
from collections.abc import Iterable

import numpy as np
from jaxtyping import Shaped

from jaxrec.data.criteo.text import DataError
from jaxrec.npz import NpzFile

# The oldest time that a zip file can have: equal arrays make equal files.
_TIME = (1980, 1, 1, 0, 0, 0)


@dataclasses.dataclass(frozen=True)
class NpzMember:
    """An array of an npz file that `numpy.savez` wrote, without compression.

    Attributes:
        path: The file.
        name: Name of the array.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "ids.npz")
        >>> np.savez(path, first=np.arange(3), second=np.ones((2, 2)))
        >>> NpzMember(path, "second").open().shape
        (2, 2)
    """

    path: str | os.PathLike[str]
    name: str

    def open(self) -> Shaped[np.ndarray, "..."]:
        """Map the array into memory, read-only.

        Raises:
            OSError: The file cannot be read.
            DataError: The file is not an npz file, is cut short or compressed, or lacks the array.
        """
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


class NpzWriter:
    """Writer of an npz file, array by array and part by part; `numpy.load` reads the file.

    Args:
        path: The file.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "ids.npz")
        >>> with NpzWriter(path) as writer:
        ...     writer.write("a", (5,), np.int32, [np.arange(3), np.arange(2)])
        >>> np.load(path)["a"].tolist()
        [0, 1, 2, 0, 1]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._archive = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True)

    def write(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.typing.DTypeLike,
        parts: Iterable[Shaped[np.ndarray, "_rows ..."]],
    ) -> None:
        """Write an array that comes in parts of rows.

        Args:
            name: Name of the array.
            shape: Its shape.
            dtype: Its type; parts are converted to it.
            parts: Rows, in order.

        Raises:
            ValueError: The parts have another number of elements than the shape.
        """
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
