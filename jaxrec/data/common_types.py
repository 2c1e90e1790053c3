"""Types of the columns of a data set's files, which must agree on each column."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from typing import NamedTuple

import pyarrow as pa

from jaxrec.data.column_types import (
    index_columns,
    is_categorical,
    is_dense,
    is_integral,
    is_list,
    is_string,
    is_text,
    value_type,
)
from jaxrec.data.criteo.text import DataError


class _Column(NamedTuple):
    """The type of a column in the files so far, and the first file that has this type."""

    kind: pa.DataType
    path: str | os.PathLike[str]


class CommonTypes:
    """Types of the columns of a data set's files, which must agree on each column.

    Numbers of any type agree, and so do strings of any type; a column that is null in every row of
    a file agrees with all.

    Args:
        names: Names of the columns of a schema, which alone are compared; None: all that can be
            features, and all files must have them.
        exclude: Names of columns that are not compared.
    """

    def __init__(self, names: Collection[str] | None = None, exclude: Collection[str] = ()):
        self._names, self._exclude = names, exclude
        self._columns: dict[str, _Column] = {}
        self._first: str | os.PathLike[str] | None = None
        self._index: set[str] = set()
        # Columns of integers in one file and of floats in another.
        self.mixed: set[str] = set()

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns that are compared; indexes of pandas are marked so."""
        metadata = {"pandas": json.dumps({"index_columns": sorted(self._index)})}
        return pa.schema({name: x.kind for name, x in self._columns.items()}, metadata)

    def add(self, columns: pa.Schema, path: str | os.PathLike[str]) -> None:
        """Compare the columns of one more file.

        Raises:
            DataError: A column is of another kind than in the files before, or only some have it.
        """
        self._index |= index_columns(columns)
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
            elif self._first is not None:
                self._check_is_needless(name, self._first)
        for name in [name for name in self._columns if name not in columns.names]:
            self._check_is_needless(name, path)
        self._first = self._first or path

    def _check_is_needless(self, name: str, path: str | os.PathLike[str]) -> None:
        """Raise DataError if a column that ``path`` lacks can be a feature."""
        kind, other = self._columns[name]
        if self._is_compared(name) and self._names is None and _may_be_feature(kind):
            raise DataError(
                f"{path} has no column {name!r}, which {other} has; leave it out with --exclude "
                f"{name}, or write all files with the same columns"
            )

    def _is_compared(self, name: str) -> bool:
        return self._names is not None or not (name in self._index or name in self._exclude)

    def _merged(self, name: str, before: _Column, now: _Column) -> _Column:
        if not _agree(before.kind, now.kind):
            may_be_feature = _may_be_feature(before.kind) or _may_be_feature(now.kind)
            if self._names is not None or (self._is_compared(name) and may_be_feature):
                advice = f"leave it out with --exclude {name}, or " if self._names is None else ""
                raise DataError(
                    f"{now.path}, column {name!r} is of type {now.kind}, and of type {before.kind} "
                    f"in {before.path}; {advice}write all files with one type"
                )
            return before
        floats = [pa.types.is_floating(each.kind) for each in (before, now)]
        if any(floats) and any(is_integral(each.kind) for each in (before, now)):
            self.mixed.add(name)
            return now if floats[1] else before
        return now if _is_unknown(before.kind) and not pa.types.is_null(now.kind) else before


def _is_unknown(kind: pa.DataType) -> bool:
    """Return whether a type is that of a column without values."""
    return pa.types.is_null(value_type(kind))


def _may_be_feature(kind: pa.DataType) -> bool:
    return is_dense(kind) or is_categorical(kind, floats=False)


def _agree(one: pa.DataType, other: pa.DataType) -> bool:
    """Return whether two types are of one kind: numbers, strings or bytes, or lists of one kind."""
    if one == other or pa.types.is_null(one) or pa.types.is_null(other):
        return True
    kinds = {_kind(value_type(one)), _kind(value_type(other))}
    return is_list(one) == is_list(other) and len(kinds - {"null"}) < 2


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_null(kind):
        return "null"
    if is_dense(kind):
        return "numbers"
    if is_string(kind):
        return "strings"
    return "bytes" if is_text(kind) else str(kind)
