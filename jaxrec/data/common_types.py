"""Types of the columns of a data set's files, on which all files must agree, in any order."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from typing import NamedTuple

import pyarrow as pa

from jaxrec.data.column_types import (
    index_columns,
    is_bytes,
    is_categorical,
    is_dense,
    is_integral,
    is_list,
    is_string,
    is_time,
    is_vector,
    value_type,
)
from jaxrec.data.files import DataError

# Names of UTC. A time without a zone counts as one in UTC.
_UTC = (None, "UTC", "Etc/UTC", "+00:00")


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type that a column has if files have it in two types; None: they do not agree.

    Null agrees with every type. Booleans, integers, decimals and floats agree with each other: the
    result is the later one in this list, and true becomes 1. Dates become timestamps. The order of
    the two types matters only for types that features treat alike, such as those of strings.

    Example:
        >>> common_type(pa.bool_(), pa.float32()), common_type(pa.string(), pa.int64())
        (DataType(float), None)
    """
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if is_list(one) and is_list(other):
        values = common_type(value_type(one), value_type(other))
        is_same = values is not None and pa.types.is_fixed_size_list(one) == (
            pa.types.is_fixed_size_list(other)
        )
        for each in (one, other):
            if is_same and value_type(each) == values:
                return each
        return None if values is None else pa.list_(values)
    if is_list(one) or is_list(other):
        return None
    first, second = value_type(one), value_type(other)
    if is_dense(first) and is_dense(second):
        return max(first, second, key=_width)
    if is_time(first) and is_time(second):
        # A file whose times are all at midnight may have dates.
        return max(
            first,
            second,
            key=lambda kind: (pa.types.is_timestamp(kind), getattr(kind, "tz", None) is not None),
        )
    if any(is_kind(first) and is_kind(second) for is_kind in (is_string, is_bytes)):
        return one
    return one if first == second else None


def _width(kind: pa.DataType) -> tuple[int, int]:
    """Return a key that sorts types of numbers: a later type holds the values of earlier ones."""
    if pa.types.is_boolean(kind):
        return 0, 1
    return 1 + (not is_integral(kind)) + pa.types.is_floating(kind), kind.bit_width


class _Column(NamedTuple):
    """The type that the files so far have for a column, and a file that it comes from."""

    kind: pa.DataType
    path: str | os.PathLike[str]


class CommonTypes:
    """Types of the columns of a data set's files, which must agree on each column.

    They agree as `common_type` says. ``names`` are the columns to compare, as those of a schema,
    which names its time zones itself. None: all columns are compared, all times must be in one
    zone, and every file must have every column that can be a feature, except for ``exclude``.
    """

    def __init__(self, names: Collection[str] | None = None, exclude: Collection[str] = ()):
        self._names, self._exclude = names, exclude
        self._columns: dict[str, _Column] = {}
        self._files: dict[str | os.PathLike[str], pa.Schema] = {}
        self._index: set[str] = set()
        # Columns of integers or booleans in one file and of floats in another: pandas writes those
        # with nulls as floats, so that these are mostly ids.
        self.mixed: set[str] = set()

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the compared columns, with pandas' metadata of index columns."""
        # A column is an index if one file says so: `infer_schema` must see it in the metadata.
        metadata = {"pandas": json.dumps({"index_columns": sorted(self._index)})}
        return pa.schema({name: x.kind for name, x in self._columns.items()}, metadata)

    def add(self, columns: pa.Schema, path: str | os.PathLike[str]) -> None:
        """Compare the columns of one more file with those of the files before."""
        self._index |= index_columns(columns)
        first = next(iter(self._files), None)
        self._files[path] = columns
        names = columns.names
        for name, kind in zip(names, columns.types, strict=True):
            if self._names is not None and name not in self._names:
                continue
            if names.count(name) > 1:
                raise DataError(
                    f"{path} has {names.count(name)} columns {name!r}; give each a name of its own"
                )
            before = self._columns.get(name)
            self._columns[name] = now = _Column(kind, path)
            if before is not None:
                self._columns[name] = self._merged(name, before, now)
            elif first is not None:
                self._check_is_needless(name, first)
        for name in [name for name in self._columns if name not in names]:
            self._check_is_needless(name, path)

    def _check_is_needless(self, name: str, path: str | os.PathLike[str]) -> None:
        """Raise a DataError if a column can be a feature; the file ``path`` lacks it."""
        kind, other = self._columns[name]
        if not (self._is_compared(name) and self._names is None and _may_be_feature(kind)):
            return
        columns, others = self._files[path], self._files[other]
        if _is_struct(name, columns) and not _is_struct(name, others):
            raise _struct_error(name, kind, other, path)
        for struct in _parents(name):
            if struct in columns.names and struct not in others.names:
                raise _struct_error(struct, columns.field(struct).type, path, other)
        raise DataError(
            f"{path} has no column {name!r}, which {other} has; leave it out with --exclude "
            f"{name}, or write all files with the same columns"
        )

    def _is_compared(self, name: str) -> bool:
        return self._names is not None or not (name in self._index or name in self._exclude)

    def _merged(self, name: str, before: _Column, now: _Column) -> _Column:
        """Return the type of a column that two types in files agree on, or raise a DataError."""
        kind = common_type(before.kind, now.kind)
        is_zoneless = self._names is not None or not (
            pa.types.is_timestamp(before.kind) and pa.types.is_timestamp(now.kind)
        )
        if kind is None or not (is_zoneless or _zones_agree(before.kind, now.kind)):
            may_be_feature = _may_be_feature(before.kind) or _may_be_feature(now.kind)
            if self._names is not None or (self._is_compared(name) and may_be_feature):
                advice = f"leave it out with --exclude {name}, or " if self._names is None else ""
                wanted = "one type" if kind is None else "times of one zone, such as UTC"
                raise DataError(
                    f"{now.path}, column {name!r} is of type {now.kind}, and of type {before.kind} "
                    f"in {before.path}; {advice}write all files with {wanted}"
                )
            return before
        floats = [pa.types.is_floating(each.kind) for each in (before, now)]
        if any(floats) and any(_is_whole(each.kind) for each in (before, now)):
            self.mixed.add(name)
        return before if kind == before.kind else _Column(kind, now.path)


def common_columns(
    files: Iterable[tuple[str | os.PathLike[str], pa.Schema]], names: Collection[str]
) -> pa.Schema:
    """Return the named columns of files with the types on which all files agree.

    Args:
        files: Each file, and the names and types of its columns.
        names: Names of columns that all files have.

    Raises:
        DataError: Two files have a column in types that do not agree.
    """
    types = CommonTypes(names)
    for path, columns in files:
        types.add(columns, path)
    return types.schema


def _parents(name: str) -> list[str]:
    """Return the structs that a column may be a field of: ``["a", "a.b"]`` for "a.b.c"."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _is_struct(name: str, columns: pa.Schema) -> bool:
    return any(each.startswith(f"{name}.") for each in columns.names)


def _struct_error(
    name: str, kind: pa.DataType, path: str | os.PathLike[str], other: str | os.PathLike[str]
) -> DataError:
    return DataError(
        f"{path}, column {name!r} is of type {kind}, and a struct in {other}; leave it out with "
        f"--exclude {name} '{name}.*', or write all files with one type"
    )


def _zones_agree(one: pa.DataType, other: pa.DataType) -> bool:
    return one.tz == other.tz or (one.tz in _UTC and other.tz in _UTC)


def _is_whole(kind: pa.DataType) -> bool:
    return pa.types.is_boolean(kind) or is_integral(kind)


def _may_be_feature(kind: pa.DataType) -> bool:
    return is_dense(kind) or is_categorical(kind, floats=False) or is_time(kind) or is_vector(kind)
