"""Parquet files and their row groups, also of files with Arrow types that PyArrow does not know."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrec.data.column_types import is_string
from jaxrec.data.files import DataError, parquet_files
from jaxrec.data.groups import FileGroups
from jaxrec.data.structs import flat_schema, flat_table
from jaxrec.files.atomic import write_atomically

# Bytes of the length of the footer and of the magic bytes after it.
_TAIL_BYTES = 8

# Key of the Arrow schema in a footer, and a key of the same length that nothing reads.
_KEY, _OTHER_KEY = b"ARROW:schema", b"arrow:SCHEMA"


@dataclasses.dataclass(frozen=True)
class ParquetGroups(FileGroups):
    """The row groups of Parquet files.

    Attributes:
        paths: The files, in order.
        columns: Names of the columns to read; None: all. A directory ``key=value`` on a file's path
            is a column ``key`` of the file, unless the file has a column of this name.
        keys: Names of the directories' columns to read if ``columns`` is None.
        sources: For each file its name in errors and in `schemas`; (): its path.
        dictionaries: Whether `read` returns columns of strings as dictionaries, as the file stores
            them where strings repeat. `TableEncoder` then looks up each string of a group once.

    Raises:
        OSError: A file cannot be read.
        DataError: A file is not a Parquet file, or lacks a column; or no file is given.

    Example:
        >>> import tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "rows.parquet")
        >>> pq.write_table(pa.table({"id": [1, 2, 3]}), path, row_group_size=2)
        >>> groups = ParquetGroups((path,))
        >>> groups.sizes, groups.read(1)["id"].to_pylist()
        ((2, 1), [3])
    """

    dictionaries: bool = False

    format: ClassVar[str] = "Parquet"

    @classmethod
    def of_directory(
        cls, directory: str | os.PathLike[str], columns: Sequence[str] | None = None
    ) -> ParquetGroups:
        """Return the row groups of a directory's Parquet files, in the order of their numbers.

        Args:
            directory: The directory, which may have directories named ``key=value``; or a pattern
                of files or directories, such as ``parts/*.parquet``.
            columns: Names of the columns to read; None: all.

        Raises:
            FileNotFoundError: The file or directory does not exist.
            DataError: The directory has no Parquet files.
        """
        files = parquet_files(directory)
        return cls(files.paths, None if columns is None else tuple(columns), files.keys)

    @contextlib.contextmanager
    def open(self, path: pathlib.Path) -> Iterator[_OpenParquet]:
        with contextlib.ExitStack() as stack:
            options: dict[str, Any] = {"page_checksum_verification": True}
            file = reader = stack.enter_context(open_parquet(path, **options))
            if self.dictionaries:
                texts = [x.name for x in file.schema_arrow if is_string(x.type)]
                options |= {"read_dictionary": texts, "metadata": file.metadata}
                reader = stack.enter_context(open_parquet(path, **options))
            yield _OpenParquet(file, reader)


class _OpenParquet(NamedTuple):
    """An open file, and the same file whose groups are read, with or without dictionaries."""

    file: pq.ParquetFile
    reader: pq.ParquetFile

    @property
    def columns(self) -> pa.Schema:
        return flat_schema(columns_of(self.file))

    @property
    def sizes(self) -> tuple[int, ...]:
        metadata = self.file.metadata
        return tuple(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups))

    def read(self, group: int, columns: list[str] | None) -> pa.Table:
        # Several threads read groups already: threads of PyArrow within them would only compete.
        # A struct's field is read by its path, without the other fields.
        return flat_table(self.reader.read_row_group(group, columns=columns, use_threads=False))


@contextlib.contextmanager
def open_parquet(path: str | os.PathLike[str], **options: Any) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file for the ``with`` block, with options of `pyarrow.parquet.ParquetFile`."""
    # Writers store an Arrow schema beside Parquet's own, and PyArrow refuses a file if it does not
    # know a type there, such as polars' Int128. Without the Arrow schema PyArrow reads the file by
    # Parquet's schema.
    try:
        with contextlib.ExitStack() as stack:
            try:
                file = pq.ParquetFile(path, **options)
            except OSError as error:
                if error.errno is None:
                    raise
                # PyArrow names the file only within a text of its own.
                raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
            except pa.ArrowException:
                if (opened := _without_arrow_schema(path)) is None:
                    raise
                source = pa.PythonFile(stack.enter_context(opened), "r")
                file = pq.ParquetFile(source, **options)
            yield stack.enter_context(file)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the operating system
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is not a Parquet file, or damaged ({reason})") from None


def write_checked(table: pa.Table, path: str | os.PathLike[str]) -> None:
    """Write a table to a Parquet file with checksums of its pages, complete or not at all."""
    with write_atomically(path) as unfinished:
        pq.write_table(table, unfinished, write_page_checksum=True)


def read_checked(path: str | os.PathLike[str]) -> pa.Table:
    """Read the table of a file that `write_checked` wrote, and compare its checksums."""
    with open_parquet(path, page_checksum_verification=True) as file:
        return file.read()


def columns_of(file: pq.ParquetFile) -> pa.Schema:
    """Return the names and types of an open file's columns."""
    columns = file.schema_arrow
    # If the Arrow schema is hidden, bytes of a fixed size may be numbers of an unknown type: as
    # opaque columns they are left out of the features, and not taken for ids.
    if _OTHER_KEY not in (file.metadata.metadata or {}):
        return columns
    for number, field in enumerate(columns):
        if pa.types.is_fixed_size_binary(field.type):
            unknown = pa.opaque(field.type, "unknown", "its writer")
            columns = columns.set(number, field.with_type(unknown))
    return columns


class _Patched(io.FileIO):
    """A read-only file whose last bytes are replaced by ``end``."""

    def __init__(self, path: str | os.PathLike[str], end: bytes):
        super().__init__(path)
        self._end = end
        self._start = pathlib.Path(path).stat().st_size - len(end)

    def readinto(self, buffer: Any) -> int:
        position = self.tell()
        count = super().readinto(buffer) or 0
        first = max(position, self._start)
        if (last := position + count) > first:
            view = memoryview(buffer).cast("B")
            view[first - position : count] = self._end[first - self._start : last - self._start]
        return count

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            size = max(0, self._start + len(self._end) - self.tell())
        buffer = bytearray(size)
        return bytes(buffer[: self.readinto(buffer)])


def _without_arrow_schema(path: str | os.PathLike[str]) -> _Patched | None:
    """Open a file with its Arrow schema hidden; None: it has no Arrow schema."""
    # The footer's key of the schema becomes another of the same length, so that no position in
    # the file changes and the file need not be copied.
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read()
        length = _TAIL_BYTES + int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or length > size:
            return None
        file.seek(size - length)
        end = file.read()
    return _Patched(path, end.replace(_KEY, _OTHER_KEY)) if _KEY in end else None
