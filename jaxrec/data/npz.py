"""Arrays of npz files, mapped into memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zipfile
from collections.abc import Iterable, Iterator
from typing import IO

import numpy as np
from jaxtyping import Shaped

from jaxrec.data.text import DataError

# Bytes of a local header of a zip file, before its name and its extra field.
_HEADER_BYTES = 30

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
        with _archive(self.path) as archive:
            try:
                entry = archive.getinfo(f"{self.name}.npy")
            except KeyError:
                names = ", ".join(sorted(_names(archive)))
                raise DataError(f"{self.path} has no array {self.name!r}; it has {names}") from None
        if entry.compress_type != zipfile.ZIP_STORED:
            raise DataError(
                f"{self.path}: array {self.name!r} is compressed and cannot be mapped into memory; "
                "write it by numpy.savez"
            )
        with open(self.path, "rb") as file:
            file.seek(entry.header_offset)
            header = file.read(_HEADER_BYTES)
            lengths = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
            file.seek(sum(lengths), os.SEEK_CUR)
            try:
                shape, is_fortran, dtype = _read_header(file)
            except ValueError as error:
                raise DataError(
                    f"{self.path}: {self.name!r} is not an npy array ({error})"
                ) from None
            start = file.tell()
        return np.memmap(self.path, dtype, "r", start, shape, "F" if is_fortran else "C")


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
    with _archive(path) as archive:
        return {name: NpzMember(path, name) for name in _names(archive)}


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


@contextlib.contextmanager
def _archive(path: str | os.PathLike[str]) -> Iterator[zipfile.ZipFile]:
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise DataError(f"{path} is not an npz file, or is cut short ({error})") from None
    with archive:
        yield archive


def _names(archive: zipfile.ZipFile) -> list[str]:
    return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"version {version} of the format is unknown")
