"""Opening of Parquet files, also of those whose Arrow types PyArrow does not know."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrec.data.criteo.text import DataError

# Bytes of the length of the footer and of the magic bytes after it.
_TAIL_BYTES = 8

# Key of the Arrow schema in a footer, and a key of the same length that nothing reads.
_KEY, _OTHER_KEY = b"ARROW:schema", b"arrow:SCHEMA"


@contextlib.contextmanager
def open_parquet(path: str | os.PathLike[str], **options: Any) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file for the ``with`` block.

    Writers store an Arrow schema beside Parquet's own. A file with types that PyArrow does not
    know there, such as polars' Int128, is read by Parquet's schema.

    Args:
        path: The file.
        options: Options of `pyarrow.parquet.ParquetFile`.

    Raises:
        OSError: The file cannot be read.
        DataError: It is not a Parquet file, or it is damaged; also if the block finds out.
    """
    try:
        with contextlib.ExitStack() as stack:
            try:
                file = pq.ParquetFile(path, **options)
            except pa.ArrowException:
                if (opened := _without_arrow_schema(path)) is None:
                    raise
                source = pa.PythonFile(stack.enter_context(opened), "r")
                file = pq.ParquetFile(source, **options)
            yield stack.enter_context(file)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the operating system, which names the file
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is not a Parquet file, or damaged ({reason})") from None


def read_checked(path: str | os.PathLike[str]) -> pa.Table:
    """Read a whole small file that was written with checksums of its pages.

    Raises:
        OSError: The file cannot be read.
        DataError: It is not a Parquet file, or it is damaged.
    """
    with open_parquet(path, page_checksum_verification=True) as file:
        return file.read()


def columns_of(file: pq.ParquetFile) -> pa.Schema:
    """Return the columns of an open file; byte columns of an unknown Arrow type become opaque."""
    columns = file.schema_arrow
    if _OTHER_KEY not in (file.metadata.metadata or {}):
        return columns
    for number, field in enumerate(columns):
        if pa.types.is_fixed_size_binary(field.type):
            unknown = pa.opaque(field.type, "unknown", "its writer")
            columns = columns.set(number, field.with_type(unknown))
    return columns


class _Patched(io.FileIO):
    """A file, other bytes in the place of its last ones."""

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
    """Open a file with the Arrow schema of its footer under another key; None: it has none."""
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
