"""The Parquet files of a data set: one file, a directory, or a pattern such as ``parts/*.parquet``.

Directories named ``key=value``, as Spark, Dask, polars and DuckDB write them, are columns.
"""

from __future__ import annotations

import glob
import os
import pathlib
import re
import urllib.parse
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

# Ends of the names of Parquet files; pandas' documentation writes df.parquet.gzip.
_NAME = re.compile(r"\.(parquet|parq|pq)(\.(brotli|gzip|lz4|snappy|zstd))?$", re.IGNORECASE)

# Directories of table formats, whose logs say which of the files count.
_LOGS = {"_delta_log": "a Delta table", ".hoodie": "a Hudi table"}

# Hive's name of the directory of rows without a key.
_NO_KEY = "__HIVE_DEFAULT_PARTITION__"

_INTEGER = re.compile(r"-?[0-9]{1,18}")


class DataError(ValueError):
    """A file is malformed; the message names the file, the line and the problem."""


class ParquetFiles(NamedTuple):
    """The Parquet files of a data set.

    Attributes:
        root: Directory below which directories named ``key=value`` are columns of the data set.
        paths: The files, in the order of their numbers.
    """

    root: pathlib.Path
    paths: tuple[pathlib.Path, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the columns that directories below the root stand for."""
        names = (name for path in self.paths for name in keys_of(path.relative_to(self.root)))
        return tuple(dict.fromkeys(names))


def natural_order(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Sort paths by the numbers in their names."""

    def key(path: pathlib.Path) -> tuple[Any, str]:
        parts = [[(not w.isdecimal(), w.zfill(20)) for w in _words(part)] for part in path.parts]
        return parts, str(path)  # part.1 and part.01 have an order, too

    return sorted(paths, key=key)


def _words(name: str) -> list[str]:
    digits = "".join(c if c.isdecimal() else f"\0{c}\0" for c in name)
    return [word for word in digits.split("\0") if word]


def is_compressed(path: pathlib.Path) -> bool:
    """Return whether a file begins as gzip files do."""
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


def has_pattern(path: pathlib.Path) -> bool:
    """Return whether a path is a pattern of files, and no file or directory itself."""
    return glob.has_magic(str(path)) and not path.exists()


def parquet_files(path: str | os.PathLike[str]) -> ParquetFiles:
    """Find the Parquet files of a path, in the order of the numbers in their names.

    Args:
        path: A file; a directory, with the directories ``key=value`` in it; or a pattern of files
            or directories.

    Raises:
        FileNotFoundError: There is no such file or directory.
        DataError: The directory has no Parquet files, or no file matches the pattern.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        return ParquetFiles(path, _of_directory(path))
    if not has_pattern(path):
        return ParquetFiles(path.parent, (path,))
    fixed = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
    root = pathlib.Path(*path.parts[:fixed])
    matches = [pathlib.Path(match) for match in glob.glob(str(path), recursive=True)]
    directories = [match for match in matches if match.is_dir()]
    files = {match for match in matches if match.is_file() and _NAME.search(match.name)}
    for directory in directories:
        # `parts/*` matches directories of other things, too.
        files.update(_walk(directory))
    if not files:
        raise DataError(f"{path}: no Parquet file matches this pattern")
    return ParquetFiles(root, tuple(natural_order(files)))


def _of_directory(directory: pathlib.Path) -> tuple[pathlib.Path, ...]:
    for name, kind in _LOGS.items():
        if (directory / name).is_dir():
            raise DataError(
                f"{directory} is {kind}, whose log says which of its files count; write its rows "
                "to Parquet files in another directory"
            )
    files = tuple(natural_order(_walk(directory)))
    if not files:
        below = sorted({p.parent.name for p in directory.glob("*/*") if _NAME.search(p.name)})
        others = natural_order(p for p in directory.iterdir() if p.is_file())
        hint = f"; there are some in {', '.join(below[:5])}" if below else ""
        if others and not below:
            hint = f", but files such as {others[0].name}"
        raise DataError(f"{directory}: there are no Parquet files in this directory{hint}")
    return files


def _walk(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the Parquet files of a directory and of the directories ``key=value`` in it."""
    for path in directory.iterdir():
        # Files of these names are unfinished, or about other files.
        if path.name.startswith((".", "_")) and "=" not in path.name:
            continue
        if path.is_dir():
            if "=" in path.name:
                yield from _walk(path)
        elif _NAME.search(path.name):
            yield path


def keys_of(path: str | os.PathLike[str]) -> dict[str, str | None]:
    """Return the keys in the names of a file's directories; a missing key is None."""
    keys: dict[str, str | None] = {}
    for part in pathlib.PurePath(path).parts[:-1]:
        name, is_key, value = part.partition("=")
        if name and is_key:
            text = urllib.parse.unquote(value)
            keys[urllib.parse.unquote(name)] = None if text == _NO_KEY else text
    return keys


def key_types(paths: Iterable[str | os.PathLike[str]]) -> dict[str, pa.DataType]:
    """Return the Arrow types of the keys of files: int64 if all values are integers, or string."""
    types: dict[str, pa.DataType] = {}
    for path in paths:
        for name, value in keys_of(path).items():
            is_integer = value is None or _INTEGER.fullmatch(value) is not None
            if types.setdefault(name, pa.int64()) == pa.int64() and not is_integer:
                types[name] = pa.string()
    return types


def key_column(value: str | None, kind: pa.DataType, rows: int) -> pa.Array:
    """Return a column that has one key in all rows."""
    whole = pa.types.is_integer(kind) and value is not None
    return pa.repeat(pa.scalar(int(value) if whole and value else value, kind), rows)
