"""Arrays of untrusted npz files: a header is compared with the file before memory is allocated."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pathlib
from typing import Literal

import numpy as np
from jaxtyping import Shaped

from jaxrec.files.archive import Archive

_SUFFIX = ".npy"

# NumPy refuses headers of more than 10,000 bytes.
_HEADER_BYTES = 1 << 14

# Largest number of axes of an array in NumPy 1.
_AXES = 32

_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@dataclasses.dataclass(frozen=True)
class NpyForm:
    """Header of an npy file: shape, type and order of its array, and the byte where it starts."""

    shape: tuple[int, ...]
    dtype: np.dtype
    order: Literal["C", "F"]
    start: int


def read_header(file: io.BufferedIOBase) -> NpyForm:
    """Read the header of an npy file."""
    version = np.lib.format.read_magic(file)
    if version not in _READERS:
        raise ValueError(f"version {version} of the format is unknown")
    # The header is a Python literal that NumPy evaluates, so that damage may raise anything.
    shape, is_fortran, dtype = _READERS[version](file)
    return NpyForm(shape, dtype, "F" if is_fortran else "C", file.tell())


class NpzFile:
    """An npz file whose arrays are read one at a time; damage raises ``error``.

    Attributes:
        names: Names of the arrays, in the order of the file.
    """

    def __init__(self, path: str | os.PathLike[str], error: type[Exception]) -> None:
        self._path, self._error = pathlib.Path(path), error
        self._archive = Archive(path, "an npz file", error)
        entries = [name for name in self._archive.names if name.endswith(_SUFFIX)]
        self.names = [name.removesuffix(_SUFFIX) for name in entries]

    def is_compressed(self, name: str) -> bool:
        """Return whether an array is compressed; `map` needs one that is not."""
        return self._archive.is_compressed(name + _SUFFIX)

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Return a copy of an array in the machine's byte order, after comparing its checksum."""
        form = self.form(name)
        content = self._archive.read(name + _SUFFIX, limit=self._archive.size(name + _SUFFIX))
        array = content[form.start :].view(form.dtype).reshape(form.shape, order=form.order)
        return np.array(array, form.dtype.newbyteorder("="))

    def map(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Map an uncompressed array into memory, without comparing its checksum."""
        form = self.form(name)
        content = self._archive.map(name + _SUFFIX)
        return content[form.start :].view(form.dtype).reshape(form.shape, order=form.order)

    def form(self, name: str) -> NpyForm:
        """Return the header of an array, after comparing it with the size of the file's entry."""
        entry = name + _SUFFIX
        head, size = io.BytesIO(self._archive.head(entry, _HEADER_BYTES)), self._archive.size(entry)
        try:
            form = read_header(head)
            shape, dtype = form.shape, form.dtype
            if dtype.hasobject or dtype.subdtype or not dtype.itemsize or len(shape) > _AXES:
                raise ValueError(f"it has type {dtype} and shape {shape}")
            wanted = math.prod(shape) * dtype.itemsize
            # NumPy multiplies the sizes except 0 and refuses too large products, also of arrays
            # without elements.
            largest = math.prod(filter(None, shape)) * dtype.itemsize
            if min(shape, default=0) < 0 or largest >= 1 << 63 or size - form.start != wanted:
                raise ValueError(
                    f"{dtype} of shape {shape} is {wanted:,} bytes, {size - form.start:,} are there"
                )
        except Exception as error:  # a damaged header raises anything
            problem = " ".join(str(error).split())[:200]
            raise self._error(f"{self._path}: {name!r} is not an npy array ({problem})") from None
        return form

    def close(self) -> None:
        """Close the file; arrays that were read stay valid."""
        self._archive.close()

    def __enter__(self) -> NpzFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
