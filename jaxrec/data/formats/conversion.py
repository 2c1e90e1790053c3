"""Files of any known format as Parquet files, converted once and kept.

Everything above reads Parquet: rows in any order, some columns, checked bytes. Text allows none of
this, so it is parsed once. The result stays in the cache directory until the files change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrec.data.addresses import Address
from jaxrec.data.column_types import is_dense, is_list, is_string, is_vector
from jaxrec.data.files import (
    DataError,
    DataFiles,
    data_files,
    is_parquet_name,
)
from jaxrec.data.foreign import foreign_format
from jaxrec.data.formats.arrow import Arrow
from jaxrec.data.formats.base import (
    COMPRESSION,
    Format,
    Types,
    WiderTypeError,
    without_descriptions,
)
from jaxrec.data.formats.delimited import Delimited
from jaxrec.data.formats.json_lines import JsonLines
from jaxrec.data.structs import flat_schema
from jaxrec.files.atomic import write_atomically
from jaxrec.files.cache import cache_directory
from jaxrec.files.lock import lock, unlock

FORMATS: tuple[Format, ...] = (Delimited(), JsonLines(), Arrow())

# Rows of a row group: groups are read at random, and a few of them are shuffled together.
GROUP_ROWS = 1 << 17

# Bytes of the rows that are joined to a row group: long rows make smaller groups.
GROUP_BYTES = 1 << 28

# First bytes of a Parquet file.
_MAGIC = b"PAR1"

# Changes when the same files would be converted to other Parquet files.
_VERSION = 3

# Locks of directories exclude other processes alone.
_THREADS = threading.Lock()

_MAY_BE_CRITEOS = re.compile(rf"\.(tsv|tab){COMPRESSION}", re.IGNORECASE)


def format_of(path: str | os.PathLike[str]) -> Format | None:
    """Return the format of a file, a directory or a pattern, by names; None for other files.

    Raises:
        DataError: The directory or the pattern has files of several formats, Parquet among them.
    """
    return _found(path)[0]


def _found(path: str | os.PathLike[str]) -> tuple[Format | None, DataFiles]:
    """Return the format of a path's files, and the files; a directory is listed once."""
    files = data_files(path, _any_name, "Parquet")
    files = files._replace(paths=without_descriptions(files.paths))
    found = {_named(file) for file in files.paths}
    if len(found) > 1:
        kinds = sorted("Parquet" if kind is None else kind.name for kind in found)
        raise DataError(
            f"{path} has files of several formats, {' and '.join(kinds)}; name those of one "
            "format by a pattern in quotes, such as 'DIRECTORY/*.csv'"
        )
    first = files.paths[0]
    # Criteo's text is often named train.tsv: it has no line of names.
    if _MAY_BE_CRITEOS.search(first.name) and foreign_format(first) is None:
        return None, files
    return found.pop(), files


def table_files(
    path: str | os.PathLike[str], types: Types | None = None, group_bytes: int | None = None
) -> DataFiles:
    """Return the Parquet files of a path; files of another format are converted to Parquet first.

    Args:
        path: File, directory or pattern of any format, or the address of one.
        types: Types of columns, by name, where the format does not hold them.
        group_bytes: Largest number of bytes of a row group that is converted, about; None: 2^28.

    Raises:
        OSError: A file cannot be read.
        DataError: A file is malformed, or has a format that is not read; the message says how to
            convert it.

    Example:
        >>> import tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "clicks.csv")
        >>> _ = path.write_text("item,click\\n7,1\\n8,0\\n")
        >>> pq.read_table(table_files(path).paths[0])["item"].to_pylist()
        [7, 8]
    """
    kind, files = _found(path)
    if kind is not None:
        return _converted(kind, files, types, group_bytes=group_bytes)
    first = files.paths[0]
    if not is_parquet_name(first.name):
        with first.open("rb") as file:
            is_parquet = file.read(len(_MAGIC)) == _MAGIC
        if not is_parquet:
            reason = foreign_format(first) or (
                "is not a Parquet file; columns with a schema are read from Parquet, CSV, TSV, "
                "JSON lines and Arrow files"
            )
            raise DataError(f"{first} {reason}")
    return files


def as_parquet(
    path: str | os.PathLike[str],
    types: Types | None = None,
    progress: Callable[[int], None] = lambda size: None,
    group_bytes: int | None = None,
) -> DataFiles:
    """Return Parquet files with the rows of a path's files, which are their ``sources``.

    Args:
        path: File, directory or pattern of a format of `format_of`.
        types: Types of columns, by name; the others get theirs from the values.
        progress: Called with the bytes of each file that is converted.
        group_bytes: As of `table_files`.

    Raises:
        OSError: A file cannot be read, or the cache directory has no space.
        DataError: A file is malformed.
    """
    kind, files = _found(path)
    assert kind is not None, path
    return _converted(kind, files, types, progress, group_bytes)


def _converted(
    kind: Format,
    files: DataFiles,
    types: Types | None,
    progress: Callable[[int], None] = lambda size: None,
    group_bytes: int | None = None,
) -> DataFiles:
    """Convert files to Parquet unless that was done before; return the Parquet files."""
    types = dict(types or {})
    converted = cache_directory() / "tables" / _key(files, types, group_bytes)
    paths = tuple(converted / _target(name) for name in _relative_names(files))
    if not _are_files(paths):
        with _alone(converted):
            if not _are_files(paths):  # none but this one has converted them meanwhile
                convert(kind, files, converted, types, progress, group_bytes)
    return DataFiles(converted, paths, files.paths)


def _relative_names(files: DataFiles) -> list[pathlib.Path]:
    return [path.relative_to(files.root) for path in files.paths]


def _are_files(paths: Iterable[pathlib.Path]) -> bool:
    # A cleaner of old files may have removed some of a directory.
    return all(path.is_file() for path in paths)


def convert(
    kind: Format,
    files: DataFiles,
    output: pathlib.Path,
    types: Types,
    progress: Callable[[int], None] = lambda size: None,
    group_bytes: int | None = None,
) -> int:
    """Write files of a format as Parquet files, in the same directories; return the rows.

    A column whose values are text in one file is text in all: where each file alone decides, codes
    such as 10115 and 01067 would be numbers in some. The directory ``output`` appears when it is
    complete.
    """
    rows = 0
    with write_atomically(output) as unfinished:
        targets = [unfinished / _target(name) for name in _relative_names(files)]
        for path, target in zip(files.paths, targets, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            rows += _write(kind, path, target, types, group_bytes)
            progress(path.stat().st_size)
        for path, target, texts in zip(files.paths, targets, _texts(kind, targets), strict=True):
            if texts:
                _write(kind, path, target, {**types, **texts}, group_bytes)
    return rows


def _texts(kind: Format, targets: Iterable[pathlib.Path]) -> list[Types]:
    """Return for each file the columns that must become text, since other files have text."""
    schemas = [flat_schema(pq.read_schema(target)) for target in targets]
    texts = {x.name for columns in schemas for x in columns if is_string(x.type)}
    return [
        {x.name: pa.string() for x in columns if x.name in texts and kind.may_be_text(x.type)}
        for columns in schemas
    ]


def _target(name: pathlib.Path) -> pathlib.Path:
    """Return the name of the Parquet file that a file is converted to."""
    return name.with_name(f"{name.name}.parquet")


def _write(
    kind: Format,
    path: pathlib.Path,
    target: pathlib.Path,
    types: Types,
    group_bytes: int | None = None,
) -> int:
    """Write a file as a Parquet file; return the number of its rows."""
    if isinstance(path, Address):
        return _write_copy(kind, path, target, types, group_bytes)
    guesses: dict[str, pa.DataType] = {}
    while True:
        try:
            return _write_tables(kind.tables(path, types, guesses), target, group_bytes)
        except WiderTypeError as wider:
            guesses[wider.column] = wider.kind
        except pa.ArrowException as error:
            raise DataError(f"{path} has a column that Parquet cannot hold ({error})") from None


def _write_copy(
    kind: Format, path: Address, target: pathlib.Path, types: Types, group_bytes: int | None
) -> int:
    """Write a file of another machine as a Parquet file, through a temporary copy."""
    # The parsers read a file more than once: its header, values that change the type of a column.
    copy = target.with_name(path.name)
    try:
        path.download(copy)
        return _write(kind, copy, target, types, group_bytes)
    except DataError as error:
        raise DataError(str(error).replace(str(copy), str(path))) from None
    finally:
        copy.unlink(missing_ok=True)


def _write_tables(
    tables: Iterator[pa.Table], target: pathlib.Path, group_bytes: int | None = None
) -> int:
    rows = 0
    with contextlib.ExitStack() as stack:
        writer = None
        for table in _regrouped(tables, group_bytes or GROUP_BYTES):
            if writer is None:
                writer = stack.enter_context(_writer(target, table.schema))
            group_rows = GROUP_ROWS
            if group_bytes is not None and table.nbytes > group_bytes:
                group_rows = min(GROUP_ROWS, max(1, len(table) * group_bytes // table.nbytes))
            writer.write_table(table, row_group_size=group_rows)
            rows += len(table)
    return rows


def _writer(target: pathlib.Path, columns: pa.Schema) -> pq.ParquetWriter:
    # Strings repeat, and are read as dictionaries. Looking numbers up in a dictionary would take
    # longer than writing them.
    flat = flat_schema(columns)
    texts = [x.name for x in flat if not is_dense(x.type)]
    texts += [f"{x.name}.list.element" for x in flat if is_list(x.type) and not is_vector(x.type)]
    options = {"compression": "lz4", "use_dictionary": texts, "write_page_checksum": True}
    return pq.ParquetWriter(target, columns, **options)


def _regrouped(tables: Iterator[pa.Table], group_bytes: int) -> Iterator[pa.Table]:
    """Cut and join tables to row groups; the first is yielded even if it is empty."""
    held: list[pa.Table] = []
    rows = size = 0
    is_first = True
    for table in tables:
        held.append(table)
        rows, size = rows + len(table), size + table.nbytes
        if rows >= GROUP_ROWS or size >= group_bytes:
            joined = pa.concat_tables(held)
            whole = rows if size >= group_bytes else rows - rows % GROUP_ROWS
            yield joined[:whole]
            is_first, rest = False, joined[whole:]
            held, rows, size = [rest], len(rest), rest.nbytes
    if rows or (held and is_first):
        yield pa.concat_tables(held)


def _named(path: pathlib.Path) -> Format | None:
    return next((kind for kind in FORMATS if kind.pattern.search(path.name)), None)


def _any_name(name: str) -> bool:
    return is_parquet_name(name) or any(kind.pattern.search(name) for kind in FORMATS)


def _key(files: DataFiles, types: Mapping[str, pa.DataType], group_bytes: int | None = None) -> str:
    """Return a name for the result of converting these files as they are now."""
    described: dict[str, Any] = {
        "version": _VERSION,
        # The names below the root are those of the results: a directory `day=2` may be the root or
        # below it.
        "names": [str(name) for name in _relative_names(files)],
        "files": [_state(path) for path in files.paths],
        "types": {name: str(kind) for name, kind in sorted(types.items())},
    }
    if group_bytes is not None:
        described["group_bytes"] = group_bytes
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:24]


def _state(path: pathlib.Path) -> tuple[str, int, int | str]:
    """Return where a file is, its size, and what changes with its content."""
    if isinstance(path, Address):
        return str(path), *path.version
    stat = path.stat()
    return os.path.abspath(path), stat.st_size, stat.st_mtime_ns


@contextlib.contextmanager
def _alone(directory: pathlib.Path) -> Iterator[None]:
    """Keep other processes and threads from converting to the directory within the block."""
    place = directory.with_name(f"{directory.name}.lock")
    with _THREADS:
        while True:
            try:
                lock(place)
            except BlockingIOError:
                time.sleep(0.2)
            else:
                break
        try:
            yield
        finally:
            unlock(place)
