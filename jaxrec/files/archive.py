"""Entries of zip files that come from elsewhere, checked before they take memory."""

from __future__ import annotations

import contextlib
import os
import pathlib
import zipfile
from collections.abc import Iterator
from typing import IO

import numpy as np
from jaxtyping import UInt8

# Bytes that are read at once to compare a checksum.
_BUFFER_BYTES = 1 << 20

# Bytes of an entry's own header before its name and its extra field. Their lengths are at bytes 26
# and 28.
_HEADER_BYTES = 30

_IS_ENCRYPTED = 1  # of a zip entry's flags


class Archive:
    """Reader of a zip file whose damage, of any kind, raises ``error`` with the path of the file.

    The zip file is a whole file, or the ``size`` bytes of a file from byte ``start`` on. ``kind``
    says in errors what was expected, such as "an npz file". ``names`` are its entries, in order.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        kind: str,
        error: type[Exception],
        *,
        start: int = 0,
        size: int | None = None,
    ) -> None:
        self._path, self._error = pathlib.Path(path), error
        self._whole: set[str] = set()
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open(path, "rb"))
            left = os.fstat(file.fileno()).st_size - start
            if size is not None and size > left:
                raise error(
                    f"{path} is cut short: {size:,} bytes from byte {start:,} on are "
                    f"wanted, {max(left, 0):,} are there"
                )
            self._part = _Part(file, start, left if size is None else size)
            with self._damage(f"{path} is not {kind}, or is cut short"):
                self._zip = stack.enter_context(zipfile.ZipFile(self._part))
            self._resources = stack.pop_all()
        self.names = self._zip.namelist()
        if len(set(self.names)) != len(self.names):
            self.close()
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise error(f"{path} is damaged: it has the entry {twice[:80]!r} more than once")

    def size(self, name: str) -> int:
        """Return the number of bytes that an entry has after unpacking, as the file claims."""
        return self._entry(name).file_size

    def is_compressed(self, name: str) -> bool:
        """Return whether an entry is compressed; `map` needs one that is not."""
        return self._entry(name).compress_type != zipfile.ZIP_STORED

    def head(self, name: str, count: int) -> bytes:
        """Return the first ``count`` bytes of an entry, or all if it has fewer, unchecked."""
        with self._open(name) as file:
            return file.read(count)

    def read(self, name: str, limit: int) -> UInt8[np.ndarray, " bytes"]:
        """Return the unpacked bytes of an entry, read-only, after comparing its checksum.

        A compressed entry of more than ``limit`` bytes raises ``error``. An uncompressed entry is
        mapped into memory, so that its bytes change with the file.
        """
        if not self.is_compressed(name):
            # Several tensors may share an entry: one comparison is enough.
            if name not in self._whole:
                with self._open(name) as file:
                    while file.read(_BUFFER_BYTES):
                        pass
                self._whole.add(name)
            return self.map(name)
        # Memory follows what the caller wants, and not what the file claims: a few bytes may unpack
        # to terabytes.
        if (size := self.size(name)) > limit:
            raise self._error(
                f"{self._path}: entry {name!r} is compressed and has {size:,} bytes, more than the "
                f"{limit:,} that are read"
            )
        with self._open(name) as file:
            content = file.read(size)
            if len(content) != size:
                raise EOFError("it is cut short")
        return np.frombuffer(content, np.uint8)

    def map(self, name: str) -> UInt8[np.ndarray, " bytes"]:
        """Map an uncompressed entry into memory, without comparing its checksum."""
        entry = self._entry(name)
        self._part.seek(entry.header_offset)
        header = self._part.read(_HEADER_BYTES)
        lengths = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        start = entry.header_offset + _HEADER_BYTES + sum(lengths)
        if start + entry.file_size > self._part.size:
            raise self._error(f"{self._path} is damaged: entry {name!r} is cut short")
        if not entry.file_size:
            return np.empty(0, np.uint8)
        return np.memmap(self._path, np.uint8, "r", self._part.start + start, (entry.file_size,))

    def close(self) -> None:
        """Close the file; entries that were read stay valid."""
        self._resources.close()

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _entry(self, name: str) -> zipfile.ZipInfo:
        """Return the zip file's record of an entry; raise ``error`` if it cannot be read."""
        try:
            entry = self._zip.getinfo(name)
        except KeyError:
            raise self._error(f"{self._path} is damaged: it has no entry {name[:80]!r}") from None
        if entry.flag_bits & _IS_ENCRYPTED:
            raise self._error(f"{self._path}: entry {name!r} is encrypted, which is not read")
        is_stored = entry.compress_type == zipfile.ZIP_STORED
        if not is_stored and entry.compress_type != zipfile.ZIP_DEFLATED:
            raise self._error(
                f"{self._path}: entry {name!r} has compression {entry.compress_type}, which is not "
                "read"
            )
        if is_stored and entry.compress_size != entry.file_size:
            raise self._error(f"{self._path} is damaged: entry {name!r} has two sizes")
        return entry

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        entry = self._entry(name)
        with self._damage(f"{self._path} is damaged: {name!r}"), self._zip.open(entry) as file:
            yield file

    @contextlib.contextmanager
    def _damage(self, problem: str) -> Iterator[None]:
        """Turn an exception of `zipfile` or `zlib`, which may have any type, into ``error``."""
        try:
            yield
        except (self._error, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, _BeforeStart):
                raise
            raise self._error(f"{problem} ({' '.join(str(error).split())[:200]})") from None


class _BeforeStart(OSError):
    """A seek to before the beginning of a file; `zipfile` expects this error of small files."""


class _Part:
    """A file object for a range of bytes of another file, with the methods that `zipfile` calls."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file, self.start, self.size = file, start, size
        self._position = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        position = offset + (0, self._position, self.size)[whence]
        if position < 0:
            raise _BeforeStart("a place before the file's beginning")
        self._position = position
        return position

    def read(self, count: int | None = -1) -> bytes:
        """Return the next ``count`` bytes, or fewer at the end; None or -1: all that are left."""
        # Cut to what is left: Python allocates `count` bytes, and a damaged header may ask for any
        # number.
        left = max(self.size - self._position, 0)
        count = left if count is None or count < 0 else min(count, left)
        self._file.seek(self.start + self._position)
        content = self._file.read(count)
        self._position += len(content)
        return content
