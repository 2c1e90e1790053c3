"""Parquet files and their row groups, also of files with Arrow types that PyArrow does not know."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import pathlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrec.data.addresses import Address, data_path
from jaxrec.data.column_types import is_string
from jaxrec.data.files import DataError, DataFiles, parquet_files
from jaxrec.data.groups import FileGroups
from jaxrec.data.structs import flat_schema, flat_table
from jaxrec.data.views import schema_without_views, without_views
from jaxrec.files.atomic import write_atomically

# Bytes of the length of the footer and of the magic bytes after it.
_TAIL_BYTES = 8

# Bytes of a number in memory by its type in a file, where small numbers take less; and of a text,
# with its offset, about.
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8}
_TEXT_BYTES = 16

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
                of files or directories, such as ``parts/*.parquet``; or the address of one of
                these, such as ``s3://bucket/parts``.
            columns: Names of the columns to read; None: all.

        Raises:
            OSError: The file or directory does not exist, or cannot be read.
            DataError: The directory has no Parquet files.
        """
        return cls.of_files(parquet_files(directory), columns)

    @classmethod
    def of_files(
        cls,
        files: DataFiles,
        columns: Sequence[str] | None = None,
        *,
        dictionaries: bool = False,
    ) -> ParquetGroups:
        """Return the row groups of the files of a data set, of which some columns are read."""
        chosen = None if columns is None else tuple(columns)
        return cls(files.paths, chosen, files.keys, files.sources, dictionaries=dictionaries)

    @property
    def bytes_of_groups(self) -> tuple[int, ...]:
        """Approximate bytes of each group's rows in memory, from the files' footers."""
        return tuple(size for size, _ in self._footprints)

    @property
    def values_of_groups(self) -> tuple[int, ...]:
        """Number of values of each group, also of those in lists."""
        return tuple(values for _, values in self._footprints)

    @functools.cached_property
    def _footprints(self) -> tuple[tuple[int, int], ...]:
        found: list[tuple[int, int]] = []
        for path, _, rows in self._files:
            with self.open(path) as file:
                names = self.columns or file.columns.names
                found += [file.footprint(n, names) for n in range(len(rows)) if rows[n]]
        return tuple(found)

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
        return schema_without_views(flat_schema(columns_of(self.file)))

    @property
    def sizes(self) -> tuple[int, ...]:
        metadata = self.file.metadata
        return tuple(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups))

    def footprint(self, group: int, names: Collection[str]) -> tuple[int, int]:
        """Return about how many bytes the named columns of a group take, and how many values."""
        metadata, size, values = self.file.metadata.row_group(group), 0, 0
        for number in range(metadata.num_columns):
            column = metadata.column(number)
            # A list's values are named "tags.list.element", and a struct's field "user.age".
            path = f"{column.path_in_schema}."
            if any(path.startswith(f"{name}.") for name in names):
                width = _WIDTHS.get(column.physical_type, _TEXT_BYTES)
                size += max(column.total_uncompressed_size, column.num_values * width)
                values += column.num_values
        return size, values

    def read(self, group: int, columns: list[str] | None) -> pa.Table:
        # Several threads read groups already: threads of PyArrow within them would only compete.
        # A struct's field is read by its path, without the other fields.
        table = self.reader.read_row_group(group, columns=columns, use_threads=False)
        return without_views(flat_table(table))


@contextlib.contextmanager
def open_parquet(path: str | os.PathLike[str], **options: Any) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file for the ``with`` block, with options of `pyarrow.parquet.ParquetFile`."""
    path = data_path(path)
    if isinstance(path, Address):
        # Ranges that are near each other are one request. The footer is read once.
        options = {"pre_buffer": True, "metadata": _footer(path, path.version), **options}
    # Writers store an Arrow schema beside Parquet's own, and PyArrow refuses a file if it does not
    # know a type there, such as polars' Int128. Without the Arrow schema PyArrow reads the file by
    # Parquet's schema.
    try:
        with contextlib.ExitStack() as stack:
            try:
                file = pq.ParquetFile(_source(path), **options)
            except OSError as error:
                if error.errno is None or isinstance(path, Address):
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
        raise _damaged(path, error) from None


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


def _source(path: pathlib.Path) -> Any:
    """Return the source from which PyArrow reads a file."""
    return pa.PythonFile(path.open("rb", 0), "r") if isinstance(path, Address) else path


@functools.lru_cache(maxsize=4096)
def _footer(path: Address, version: tuple[int, str]) -> pq.FileMetaData:
    """Read the footer of a Parquet file, as it is in a version of the file."""
    try:
        return pq.read_metadata(_source(path))
    except pa.ArrowException as error:
        raise _damaged(path, error) from None


class _Patched(io.RawIOBase):
    """A read-only file whose last bytes are replaced by ``end``."""

    def __init__(self, file: Any, size: int, end: bytes):
        super().__init__()
        self._file, self._size, self._start, self._end = file, size, size - len(end), end

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def read(self, size: int | None = -1) -> bytes:
        position = self._file.tell()
        count = self._size - position if size is None or size < 0 else size
        content = bytearray(self._file.read(max(0, count)))
        first = max(position, self._start)
        if (last := position + len(content)) > first:
            content[first - position :] = self._end[first - self._start : last - self._start]
        return bytes(content)


def _without_arrow_schema(path: pathlib.Path) -> _Patched | None:
    """Open a file with its Arrow schema hidden; None: it has no Arrow schema."""
    # The footer's key of the schema becomes another of the same length, so that no position in
    # the file changes and the file need not be copied.
    file: Any = path.open("rb", 0)
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    tail = file.read()
    length = _TAIL_BYTES + int.from_bytes(tail[:4], "little")
    if tail[4:] == b"PAR1" and length <= size:
        file.seek(size - length)
        end = file.read()
        if _KEY in end:
            return _Patched(file, size, end.replace(_KEY, _OTHER_KEY))
    file.close()
    return None


def _damaged(path: pathlib.Path, error: Exception) -> DataError:
    reason = " ".join(str(error).split())
    return DataError(f"{path} is not a Parquet file, or damaged ({reason})")
