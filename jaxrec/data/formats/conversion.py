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
import time
from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrec.data.files import (
    DataError,
    DataFiles,
    data_files,
    foreign_format,
    has_pattern,
    is_parquet_name,
)
from jaxrec.data.formats.arrow import Arrow
from jaxrec.data.formats.base import COMPRESSION, Format, Types, WiderTypeError
from jaxrec.data.formats.delimited import Delimited
from jaxrec.data.formats.json_lines import JsonLines
from jaxrec.files.atomic import write_atomically
from jaxrec.files.cache import cache_directory
from jaxrec.files.lock import lock, unlock

FORMATS: tuple[Format, ...] = (Delimited(), JsonLines(), Arrow())

# Rows of a row group: groups are read at random, and a few of them are shuffled together.
GROUP_ROWS = 1 << 17

# Changes when the same files would be converted to other Parquet files.
_VERSION = 1

_MAY_BE_CRITEOS = re.compile(rf"\.(tsv|tab){COMPRESSION}", re.IGNORECASE)


def format_of(path: pathlib.Path) -> Format | None:
    """Return the format of a file, a directory or a pattern, by names; None for other files.

    Raises:
        DataError: The directory or the pattern has files of several formats, Parquet among them.
    """
    files: tuple[pathlib.Path, ...] = (path,)
    if path.is_dir() or has_pattern(path):
        files = data_files(path, _any_name, "Parquet").paths
        # A .json file beside other files describes them, as those of `jaxrec data criteo` and of
        # Hugging Face's data sets do.
        files = tuple(x for x in files if x.suffix.lower() != ".json") or files
    found = {_named(file) for file in files}
    if len(found) > 1:
        kinds = sorted("Parquet" if kind is None else kind.name for kind in found)
        raise DataError(
            f"{path} has files of several formats, {' and '.join(kinds)}; name those of one "
            "format by a pattern in quotes, such as 'DIRECTORY/*.csv'"
        )
    # Criteo's text is often named train.tsv: it has no line of names.
    if _MAY_BE_CRITEOS.search(files[0].name) and foreign_format(files[0]) is None:
        return None
    return found.pop()


def as_parquet(
    path: pathlib.Path,
    types: Types | None = None,
    progress: Callable[[int], None] = lambda size: None,
) -> DataFiles:
    """Return Parquet files with the rows of a path's files, which are their ``sources``.

    Args:
        path: File, directory or pattern of a format of `format_of`.
        types: Types of columns, by name; the others get theirs from the values.
        progress: Called with the bytes of each file that is converted.

    Raises:
        OSError: A file cannot be read, or the cache directory has no space.
        DataError: A file is malformed.
    """
    kind = format_of(path)
    assert kind is not None, path
    files = kind.files(path)
    types = dict(types or {})
    converted = cache_directory() / "tables" / _key(files, types)
    if not converted.exists():
        with _alone(converted):
            if not converted.exists():  # no other process has converted them meanwhile
                convert(kind, files, converted, types, progress)
    paths = tuple(converted / _target(path.relative_to(files.root)) for path in files.paths)
    return DataFiles(converted, paths, files.paths)


def convert(
    kind: Format,
    files: DataFiles,
    output: pathlib.Path,
    types: Types,
    progress: Callable[[int], None] = lambda size: None,
) -> int:
    """Write files of a format as Parquet files, in the same directories; return the rows.

    The directory ``output`` appears when it is complete.
    """
    rows = 0
    with write_atomically(output) as unfinished:
        for path in files.paths:
            target = unfinished / _target(path.relative_to(files.root))
            target.parent.mkdir(parents=True, exist_ok=True)
            rows += _write(kind, path, target, types)
            progress(path.stat().st_size)
    return rows


def _target(name: pathlib.Path) -> pathlib.Path:
    """Return the name of the Parquet file that a file becomes."""
    return name.with_name(f"{name.name}.parquet")


def _write(kind: Format, path: pathlib.Path, target: pathlib.Path, types: Types) -> int:
    """Write a file as a Parquet file; return the number of its rows."""
    types = dict(types)
    while True:
        try:
            return _write_once(kind, path, target, types)
        except WiderTypeError as wider:
            types[wider.column] = wider.kind


def _write_once(kind: Format, path: pathlib.Path, target: pathlib.Path, types: Types) -> int:
    rows = 0
    with contextlib.ExitStack() as stack:
        writer = None
        for table in _regrouped(kind.tables(path, types)):
            if writer is None:
                options = {"compression": "lz4", "write_page_checksum": True}
                writer = stack.enter_context(pq.ParquetWriter(target, table.schema, **options))
            writer.write_table(table, row_group_size=GROUP_ROWS)
            rows += len(table)
    return rows


def _regrouped(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Cut and join tables to row groups; the first is yielded even if it is empty."""
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if sum(map(len, held)) >= GROUP_ROWS:
            joined = pa.concat_tables(held)
            whole = len(joined) - len(joined) % GROUP_ROWS
            yield joined[:whole]
            held = [joined[whole:]]
    if held:
        yield pa.concat_tables(held)


def _named(path: pathlib.Path) -> Format | None:
    return next((kind for kind in FORMATS if kind.pattern.search(path.name)), None)


def _any_name(name: str) -> bool:
    return is_parquet_name(name) or any(kind.pattern.search(name) for kind in FORMATS)


def _key(files: DataFiles, types: Mapping[str, pa.DataType]) -> str:
    """Return a name for the result of converting these files as they are now."""
    stats = [(path, path.stat()) for path in files.paths]
    described = {
        "version": _VERSION,
        "files": [(os.path.abspath(path), s.st_size, s.st_mtime_ns) for path, s in stats],
        "types": {name: str(kind) for name, kind in sorted(types.items())},
    }
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:24]


@contextlib.contextmanager
def _alone(directory: pathlib.Path) -> Iterator[None]:
    """Keep other processes from converting to the directory within the block."""
    place = directory.with_name(f"{directory.name}.lock")
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
