"""Columns of directories named ``key=value``, as Spark, Dask, polars and DuckDB write them."""

from __future__ import annotations

import os
import pathlib
import re
import urllib.parse
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

# Hive's name of the directory of rows without a key.
_NO_KEY = "__HIVE_DEFAULT_PARTITION__"

# Up to 18 digits, which always fit int64.
_INTEGER = re.compile(r"-?[0-9]{1,18}")


def key_parts(path: str | os.PathLike[str]) -> list[tuple[str, str | None]]:
    """Return key and value of each ``key=value`` directory on a path; the value of a null is None.

    Example:
        >>> key_parts("country=DE/day=__HIVE_DEFAULT_PARTITION__/part-0.parquet")
        [('country', 'DE'), ('day', None)]
    """
    parts = []
    for part in pathlib.PurePath(path).parts[:-1]:
        name, is_key, value = part.partition("=")
        if name and is_key:
            text = urllib.parse.unquote(value)
            parts.append((urllib.parse.unquote(name), None if text == _NO_KEY else text))
    return parts


def keys_of(path: str | os.PathLike[str]) -> dict[str, str | None]:
    """Return by key the values of the ``key=value`` directories on a path; None for a null."""
    return dict(key_parts(path))


def key_types(paths: Iterable[str | os.PathLike[str]]) -> dict[str, pa.DataType]:
    """Return the type of each column that directories ``key=value`` on the paths define.

    It is int64 if all values of the key are integers, string otherwise.
    """
    types: dict[str, pa.DataType] = {}
    for path in paths:
        for name, value in keys_of(path).items():
            is_integer = value is None or _INTEGER.fullmatch(value) is not None
            if types.setdefault(name, pa.int64()) == pa.int64() and not is_integer:
                types[name] = pa.string()
    return types


def key_column(value: str | None, kind: pa.DataType, rows: int) -> pa.Array:
    """Return a column of ``rows`` rows with the value of a ``key=value`` directory."""
    whole = pa.types.is_integer(kind) and value is not None
    return pa.repeat(pa.scalar(int(value) if whole and value else value, kind), rows)


def has_value(column: pa.ChunkedArray, value: str | None) -> bool:
    """Return whether all rows of a file's column have the value of a ``key=value`` directory."""
    if value is None:
        return column.null_count == len(column)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    try:
        same = pc.equal(column.cast(kind), pa.scalar(value).cast(kind))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False  # the value is none of the column's type
    return not column.null_count and pc.all(same, min_count=0).as_py()
