"""Addresses of files that other machines hold, such as ``s3://bucket/clicks``.

fsspec opens them: a package of each file system brings its credentials, its retries and its
settings. It is imported only when an address is read.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import pathlib
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Any

# "s3://" in a text, and "s3:" as the first part of a path, which keeps one slash alone.
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)
_LOCAL = ("file", "local")

# By scheme the extra of jaxrec with the package that reads it.
_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "hf": "hf",
    "http": "http",
    "https": "http",
}

# Names that file systems have for what changes with a file's content, best first.
_VERSIONS = (
    "ETag", "etag", "md5Hash", "content_md5", "blob_id", "generation", "LastModified",
    "Last-Modified", "last_modified", "mtime", "modified", "updated", "created",
)  # fmt: skip

# Bytes of a file that is read from its start on, as formats are told.
_BUFFER_BYTES = 1 << 16


class Address(pathlib.PosixPath):
    """Address of a file or directory in a file system of fsspec.

    Read it like a path of this machine: by `stat`, `is_dir`, `open`. Nothing can be written to it.

    Raises:
        FileNotFoundError: Reading raises it if the address names nothing.
        PermissionError: Reading raises it without credentials, or if they do not suffice.
        ImportError: Reading raises it if a package is missing; the message names the extra.
        OSError: Reading raises it for all other failures of the file system.

    Example:
        >>> address = Address("s3://bucket/day=1/part-0.csv")
        >>> str(address), address.name, str(address.parent)
        ('s3://bucket/day=1/part-0.csv', 'part-0.csv', 's3://bucket/day=1')
    """

    _known: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return _SCHEME.sub(r"\1://", super().__str__(), count=1)

    def __fspath__(self) -> str:
        return str(self)

    @property
    def name(self) -> str:
        """Last part of the address; that of a URL without its query, which may be a signature."""
        name = super().name
        return name.partition("?")[0] if self._is_url else name

    @property
    def _scheme(self) -> str:
        return str(self).partition(":")[0].lower()

    @property
    def _is_url(self) -> bool:
        return self._scheme in ("http", "https")

    @property
    def may_be_pattern(self) -> bool:
        """Whether the file system lists files, so that a pattern can name some."""
        return not self._is_url

    @functools.cached_property
    def _system(self) -> tuple[Any, str]:
        """The file system, and the name that the file has in it."""
        with self._explained():
            try:
                import fsspec

                return fsspec.core.url_to_fs(str(self))
            except ImportError as error:
                extra = _EXTRAS.get(self._scheme)
                advice = f"pip install 'jaxrec[{extra}]'" if extra else str(error)
                raise ImportError(
                    f"{self}: a package that reads {self._scheme}:// is missing; {advice}"
                ) from None
            except ValueError as error:
                raise OSError(errno.EINVAL, str(error), str(self)) from None

    @property
    def info(self) -> Mapping[str, Any]:
        """The file system's description of the file or directory, fetched once."""
        if self._known is None:
            system, name = self._system
            with self._explained():
                self._known = system.info(name)
        return self._known

    @property
    def version(self) -> tuple[int, str]:
        """Size of the file in bytes, and what changes with its content: a checksum or a time."""
        changing = (str(self.info[key]) for key in _VERSIONS if self.info.get(key))
        return self.stat().st_size, next(changing, "")

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the size and the kind of the file; other fields are 0."""
        kind = stat.S_IFDIR if self.info["type"] == "directory" else stat.S_IFREG
        return os.stat_result((kind, 0, 0, 0, 0, 0, self.info.get("size") or 0, 0, 0, 0))

    def exists(self, **_: Any) -> bool:
        """Return whether there is such a file or directory."""
        try:
            return bool(self.info)
        except FileNotFoundError:
            return False

    def is_dir(self, **_: Any) -> bool:
        """Return whether there is such a directory."""
        return self.exists() and stat.S_ISDIR(self.stat().st_mode)

    def is_file(self, **_: Any) -> bool:
        """Return whether there is such a file."""
        return self.exists() and stat.S_ISREG(self.stat().st_mode)

    def absolute(self) -> Address:
        """Return the address itself."""
        return self

    def resolve(self, strict: bool = False) -> Address:
        """Return the address itself."""
        return self

    def open(self, mode: str = "r", buffering: int = -1, *_: Any, **__: Any) -> Any:
        """Open the file for reading bytes; ``buffering`` is 0, or the smallest request in bytes."""
        if mode != "rb":
            raise OSError(errno.EROFS, "addresses are read as bytes, and never written", str(self))
        file: Any = RangeFile(self)
        return file if buffering == 0 else io.BufferedReader(file, max(buffering, _BUFFER_BYTES))

    def below(self) -> Iterator[Address]:
        """Yield all files in the directory and in its directories, by one listing."""
        system, name = self._system
        with self._explained():
            system.invalidate_cache(name)  # the files may have changed since the last listing
            found = system.find(name, detail=True)
        # A file system may have another name for the directory, such as that of a branch.
        yield from self._named(found, self.info["name"])

    def matches(self, pattern: str) -> Iterator[Address]:
        """Yield the files and directories below the directory that match a pattern."""
        system, name = self._system
        with self._explained():
            system.invalidate_cache(name)
            found = system.glob(f"{name.rstrip('/')}/{pattern}", detail=True)
        yield from self._named(found, name)

    def _named(self, found: Mapping[str, Mapping[str, Any]], name: str) -> Iterator[Address]:
        """Yield an `Address` for each path of a listing, in which this directory is ``name``."""
        for each, info in found.items():
            address = self / each.strip("/").removeprefix(name.strip("/")).lstrip("/")
            address._known = info
            yield address

    def download(self, path: pathlib.Path) -> None:
        """Copy the file to this machine."""
        system, name = self._system
        with self._explained():
            system.get_file(name, str(path))

    def read_range(self, start: int, stop: int) -> bytes:
        """Read some bytes of the file, with one request."""
        system, name = self._system
        # Other file systems read a range by opening the file, and would read more ahead.
        options = {} if system.async_impl else {"cache_type": "none"}
        with self._explained():
            content = system.cat_file(name, start=start, end=stop, **options)
        if len(content) != stop - start:
            raise OSError(
                errno.EIO,
                f"the server sent {len(content):,} bytes for a range of {stop - start:,}; copy the "
                "file to this machine",
                str(self),
            )
        return content

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Within this context, raise Python's errors in place of the file system's own ones."""
        try:
            yield
        except FileNotFoundError as error:
            # A web server's refusal is a missing file for fsspec.
            if getattr(error.__cause__, "status", None) in (401, 403):
                raise self._denied(str(error.__cause__)) from None
            raise FileNotFoundError(
                errno.ENOENT, "there is no such file or directory", str(self)
            ) from None
        except ImportError:
            raise
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, OSError) and (
                error.filename == str(self) or error.errno == errno.ENOSPC
            ):
                raise
            kind = type(error).__name__
            if isinstance(error, PermissionError) or "redential" in f"{kind} {text}":
                raise self._denied(text) from None
            raise OSError(errno.EIO, f"it cannot be read ({text})", str(self)) from None

    def _denied(self, reason: str) -> PermissionError:
        return PermissionError(
            errno.EACCES,
            f"access is denied ({reason}); give credentials that may read it, see "
            "docs/your_own_data.md",
            str(self),
        )


class RangeFile(io.RawIOBase):
    """A read-only file of which each read is a request for a range of bytes."""

    # Files of fsspec read ahead: two of ten columns of a Parquet file of 38 MB took a request for
    # 37 MB. Here they take eight requests for 7.6 MB, since PyArrow knows which ranges it needs.

    def __init__(self, address: Address):
        super().__init__()
        size = address.info.get("size")
        if size is None:
            raise OSError(
                errno.ESPIPE,
                "the server does not tell the size of the file; copy it to this machine",
                str(address),
            )
        self._address, self._size, self._position = address, int(size), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def size(self) -> int:
        """Return the size of the file in bytes, which Arrow asks for."""
        return self._size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._size - self._position)
        count = rest if size is None or size < 0 else min(size, rest)
        if not count:
            return b""
        content = self._address.read_range(self._position, self._position + count)
        self._position += count
        return content

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


def data_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Return a path of this machine, or an `Address`.

    ``file://`` is this machine. A `pathlib.Path` of an address, which has lost a slash, is the
    address.

    Raises:
        OSError: The address is a chain of addresses, such as ``zip://x.csv::s3://bucket/x.zip``.

    Example:
        >>> data_path("parts/0.csv"), data_path("file:///data/0.csv")
        (PosixPath('parts/0.csv'), PosixPath('/data/0.csv'))
        >>> data_path("s3://bucket/0.csv").name
        '0.csv'
    """
    if isinstance(path, Address):
        return path
    text = os.fspath(path)
    if "::" in text and "://" in text:
        raise OSError(errno.EINVAL, "a chain of addresses is not read; name one address", text)
    scheme = _SCHEME.match(text)
    if scheme is None or ("://" not in text and not isinstance(path, pathlib.PurePath)):
        return pathlib.Path(path)
    if scheme[1].lower() in _LOCAL:
        return pathlib.Path("/" + _without_scheme(text))
    return Address(text)


def _without_scheme(address: str) -> str:
    return _SCHEME.sub("", address, count=1)
