"""Manifests: JSON files with a checksum of themselves and checksums of the files beside them.

CRC-32 detects every change of up to 32 adjacent bits and misses one in 2^32 of other changes.
Python computes it at 1 to 4 GB/s per thread.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

# Bytes of a checksum's segment, which are part of the file formats, and of a thread's buffer.
_SEGMENT_BYTES = 1 << 26
_BUFFER_BYTES = 1 << 20

_THREADS = min(16, os.cpu_count() or 1)

_CHECKSUM = "crc32"


def seal(content: Mapping[str, Any], *, is_hex: bool = False) -> bytes:
    """Return the bytes of a JSON file with ``content`` and, as its last entry, its CRC-32.

    ``is_hex``: the CRC-32 is written as eight hex digits instead of a number.
    """
    crc = zlib.crc32(json.dumps(content).encode())
    return json.dumps({**content, _CHECKSUM: f"{crc:08x}" if is_hex else crc}, indent=1).encode()


def unseal(text: bytes, format: str) -> dict[str, Any]:
    """Return the object that `seal` wrote, without its checksum and its ``format``.

    Raises:
        ValueError: The content was changed, or has another format.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or "format" not in content:
        raise ValueError(f"it is not a manifest of format {format!r}")
    check_seal(content)
    if (found := content.pop("format")) != format:
        raise ValueError(f"its format is {found!r}, and this jaxrec reads {format!r}")
    return content


def check_seal(content: dict[str, Any]) -> None:
    """Remove the checksum from the JSON object of a manifest; raise a ValueError if it differs."""
    written = content.pop(_CHECKSUM, None)
    # The checksum is computed from the text that Python writes, so that spaces in the file do not
    # matter.
    crc = zlib.crc32(json.dumps(content).encode())
    if written not in (crc, f"{crc:08x}"):
        raise ValueError("its checksum does not match: the file was changed")


class StoredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size of a file, and the CRC-32 of each 64 MiB as eight hex digits."""

    bytes: int
    crc32: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Segment:
    """A range of bytes of a file, which one thread reads at a time."""

    file: str
    start: int
    size: int

    def checksum(self, directory: pathlib.Path) -> str:
        """Return the CRC-32 of the segment as eight hex digits."""
        crc, left = 0, self.size
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, self.size)))
        with (directory / self.file).open("rb", buffering=0) as opened:
            opened.seek(self.start)
            while left and (count := opened.readinto(buffer[:left])):
                crc = zlib.crc32(buffer[:count], crc)
                left -= count
        return f"{crc:08x}"


def segments_of(file: str, size: int) -> list[Segment]:
    """Cut a file of ``size`` bytes into segments of 64 MiB."""
    return [
        Segment(file, start, min(_SEGMENT_BYTES, size - start))
        for start in range(0, size, _SEGMENT_BYTES)
    ]


def describe_files(
    directory: pathlib.Path, files: Iterable[str] | None = None
) -> dict[str, StoredFile]:
    """Return the size and checksums of each file of a folder, by its path relative to the folder.

    ``files`` are these paths; None: all files, also those in subfolders.
    """
    if files is None:
        paths = sorted(path for path in directory.rglob("*") if path.is_file())
        files = [path.relative_to(directory).as_posix() for path in paths]
    sizes = {file: (directory / file).stat().st_size for file in files}
    checksums: dict[str, list[str]] = {file: [] for file in sizes}
    segments = [segment for file, size in sizes.items() for segment in segments_of(file, size)]
    # Threads, since neither reading nor zlib.crc32 holds Python's lock.
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda segment: segment.checksum(directory), segments)
        for segment, checksum in zip(segments, found, strict=True):
            checksums[segment.file].append(checksum)
    return {file: StoredFile(size, tuple(checksums[file])) for file, size in sizes.items()}


def find_damage(
    directory: pathlib.Path,
    files: Mapping[str, StoredFile],
    verb: str,
    *,
    with_checksums: bool = True,
    share: slice = slice(None),
) -> str:
    """Return the path of the first damaged file of a folder and its damage; empty if there is none.

    ``verb`` says what was done with the files, such as "saved". ``share`` has the segments to read
    where several processes share the work; without ``with_checksums`` only sizes are compared.
    """
    # Sizes first: a file that was cut is found without reading a terabyte of others.
    for file, stored in files.items():
        try:
            size = (directory / file).stat().st_size
        except OSError as error:
            return _unreadable(file, error)
        if size != stored.bytes:
            return f"{file} has {size:,} bytes, but {stored.bytes:,} were {verb}"
        if len(segments_of(file, size)) != len(stored.crc32):
            return f"{file} has {size:,} bytes, but {len(stored.crc32)} checksums were {verb}"
    if not with_checksums:
        return ""
    parts = [
        (segment, checksum)
        for file, stored in files.items()
        for segment, checksum in zip(segments_of(file, stored.bytes), stored.crc32, strict=True)
    ]

    def check(part: tuple[Segment, str]) -> str:
        segment, checksum = part
        try:
            is_same = segment.checksum(directory) == checksum
        except OSError as error:
            return _unreadable(segment.file, error)
        return "" if is_same else f"{segment.file} does not have the bytes that were {verb}"

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        return next(filter(None, threads.map(check, parts[share])), "")


def _unreadable(file: str, error: OSError) -> str:
    return f"{file} cannot be read: {error.strerror}"


class CheckedStream(io.RawIOBase):
    """Wraps a stream and counts the bytes written to it, and computes their CRC-32."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.bytes = self.crc32 = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._stream.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self.bytes += size
        return size
