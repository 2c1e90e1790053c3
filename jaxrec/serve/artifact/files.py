"""Files of an exported model: npy files that are mapped into memory, and checks of all files."""

from __future__ import annotations

import concurrent.futures
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrec.files.manifest import THREADS, Segment, segments_of
from jaxrec.serve.artifact.manifest import MANIFEST_FILE, Manifest, StoredArray, StoredFile


class ArtifactError(ValueError):
    """An exported model is missing, damaged, or cannot run here; the message names the file."""


def stored_dtype(dtype: str) -> np.dtype:
    """Return the type of an npy file's elements: unsigned integers for types that NumPy lacks."""
    kind = jnp.dtype(dtype)
    return kind if kind.isbuiltin == 1 else np.dtype(f"uint{8 * kind.itemsize}")


def write_array(path: pathlib.Path, array: np.ndarray) -> None:
    """Write a small array."""
    np.save(path, np.asarray(array, order="C").view(stored_dtype(array.dtype.name)))


def write_rows(
    path: pathlib.Path, shape: tuple[int, ...], dtype: str, parts: Iterable[tuple[int, np.ndarray]]
) -> None:
    """Write an array of rows by parts, so that it need not be in memory.

    Args:
        path: The file.
        shape: Shape of the array, whose elements are zeros where no part lies.
        dtype: Type of the array.
        parts: First row and rows of each part.
    """
    if 0 in shape:
        np.save(path, np.zeros(shape, stored_dtype(dtype)))
        return
    rows = np.lib.format.open_memmap(path, "w+", stored_dtype(dtype), shape)
    for first, part in parts:
        rows[first : first + len(part)] = part.view(stored_dtype(dtype))
    rows.flush()


def read_array(directory: pathlib.Path, stored: StoredArray) -> np.ndarray:
    """Return an array of the model, where it lies in the file or a copy.

    Raises:
        ArtifactError: The file holds no such array.
    """
    path = directory / stored.file
    dtype = stored_dtype(stored.dtype)
    try:
        with path.open("rb") as file:
            shape, is_fortran, found = _read_header(file)
            start, size = file.tell(), path.stat().st_size
    # A header is a Python expression, whose damage may raise anything.
    except Exception as error:
        raise ArtifactError(f"{path} is not an npy file, or is cut short ({error})") from None
    if (shape, found) != (stored.shape, dtype) or (is_fortran and len(shape) > 1):
        raise ArtifactError(
            f"{path} holds {found} of {shape}; the model has {stored.name} of {stored.dtype} and "
            f"{stored.shape}"
        )
    # Before memory is taken for it.
    if (wanted := start + math.prod(shape) * dtype.itemsize) != size:
        raise ArtifactError(
            f"{path} is not an npy file, or is cut short ({size:,} bytes instead of {wanted:,})"
        )
    is_mapped = stored.is_mapped and 0 not in stored.shape
    try:
        array = np.load(path, mmap_mode="r" if is_mapped else None, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ArtifactError(f"{path} is not an npy file, or is cut short ({error})") from None
    return array.view(jnp.dtype(stored.dtype))


def _read_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return the shape of an npy file's array, whether it is in Fortran's order, and its type."""
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    return read[version](file)


def describe_files(directory: pathlib.Path) -> dict[str, StoredFile]:
    """Return the sizes and checksums of the files of a folder, by path."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in paths}
    checksums: dict[str, list[str]] = {file: [] for file in sizes}
    segments = [segment for file, size in sizes.items() for segment in segments_of(file, size)]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda segment: segment.checksum(directory), segments)
        for segment, checksum in zip(segments, found, strict=True):
            checksums[segment.file].append(checksum)
    return {file: StoredFile(size, tuple(checksums[file])) for file, size in sizes.items()}


def read_manifest(directory: pathlib.Path) -> Manifest:
    """Read the manifest of an exported model.

    Raises:
        ArtifactError: There is none, or it is damaged.
    """
    path = directory / MANIFEST_FILE
    try:
        return Manifest.from_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(
            f"{directory} is not an exported model: {MANIFEST_FILE} is missing; jaxrec export and "
            "jaxrec.serve.export write one"
        ) from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ArtifactError(f"{path} cannot be used: {error or type(error).__name__}") from None


def check_files(
    directory: pathlib.Path, files: Mapping[str, StoredFile], *, with_checksums: bool = True
) -> None:
    """Check that the files of an exported model are those that were written.

    Args:
        directory: The model's folder.
        files: What the manifest says about its files.
        with_checksums: Whether the files are read and compared, or only their sizes.

    Raises:
        ArtifactError: A file is missing, or is not what was written; the message names it.
    """
    for file, stored in files.items():
        path = directory / file
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror}") from None
        if size != stored.bytes:
            raise ArtifactError(f"{path} has {size:,} bytes, but {stored.bytes:,} were exported")
    if not with_checksums:
        return
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        for damage in threads.map(
            lambda part: _damage(directory, *part), _checks(directory, files)
        ):
            if damage:
                raise ArtifactError(damage)


def _checks(
    directory: pathlib.Path, files: Mapping[str, StoredFile]
) -> Iterator[tuple[Segment, str]]:
    for file, stored in files.items():
        segments = segments_of(file, stored.bytes)
        if len(segments) != len(stored.crc32):
            raise ArtifactError(
                f"{directory / file} has {len(stored.crc32)} checksums in {MANIFEST_FILE}"
            )
        yield from zip(segments, stored.crc32, strict=True)


def _damage(directory: pathlib.Path, segment: Segment, checksum: str) -> str:
    try:
        is_same = segment.checksum(directory) == checksum
    except OSError as error:
        return f"{directory / segment.file} cannot be read: {error.strerror}"
    return "" if is_same else f"{directory / segment.file} does not have the bytes of the export"
