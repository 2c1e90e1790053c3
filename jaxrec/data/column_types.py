"""Arrow types of columns: the roles they allow, and checks against a schema and between files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import pyarrow as pa

from jaxrec.data.files import DataError
from jaxrec.data.schema import CategoricalColumn, DenseColumn, LabelColumn, Schema, SchemaError

# Default names of the label column; the first that a table has is the label.
LABEL_NAMES = ("label", "click", "target")

# Names that pandas and Dask give an index without a name.
_INDEX_NAME = re.compile(r"__index_level_\d+__|__null_dask_index__")


def infer_schema(
    columns: pa.Schema,
    label: str | Sequence[str] | None = None,
    *,
    weight: str | None = None,
    exclude: Collection[str] = (),
    ids: Collection[str] = (),
    numbers: Collection[str] = (),
) -> tuple[Schema, dict[str, str]]:
    """Make a schema from the types of a table's columns.

    Columns of floats, bools and decimals with fractions become dense features. Columns of strings,
    bytes and integers, and lists of these, become tables with a vocabulary. The index of a pandas
    data frame is left out.

    Args:
        columns: Names and types of the columns.
        label: Name of the label column, or names of several; None: the first of `LABEL_NAMES` that
            the table has. An empty sequence: there is none.
        weight: Name of the column of sample weights; None: all weights are 1.
        exclude: Names of columns to leave out of the features.
        ids: Names of columns of floats that hold integers. They become tables, too.
        numbers: Names of labels that are numbers to predict, not 0 and 1.

    Returns:
        The schema, and the type of each column that is left out, by name.

    Raises:
        SchemaError: There is no label column, a named column does not exist, or no column can be a
            table.

    Example:
        >>> table = pa.table({"click": [0], "price": [1.5], "tags": [["a", "b"]]})
        >>> schema, _ = infer_schema(table.schema)
        >>> schema.label, [*schema.dense], [*schema.categorical]
        ('click', ['price'], ['tags'])
    """
    names = columns.names
    if label is None:
        left = [name for name in LABEL_NAMES if name in names and name not in exclude]
        label = [name for name in left if name != weight][:1]
        if not label:
            raise SchemaError(
                f"none of the columns {', '.join(names)} is named {', '.join(LABEL_NAMES[:-1])} or "
                f"{LABEL_NAMES[-1]}; name the label column with --label"
            )
    labels = [label] if isinstance(label, str) else [*label]
    for name in (*labels, *exclude, *([] if weight is None else [weight])):
        if name not in names:
            raise SchemaError(f"there is no column {name!r}; the columns are {', '.join(names)}")
        if name in (*labels, weight) and name in exclude:
            role = "label" if name in labels else "weight"
            raise SchemaError(f"column {name!r} is the {role}; leave it out of --exclude")
    dense, categorical, left_out = {}, {}, {}
    index = index_columns(columns)
    for name, kind in zip(names, columns.types, strict=True):
        if name in (*labels, weight, *exclude):
            continue
        if name in index:
            left_out[name] = f"{kind}, an index of pandas"
        elif pa.types.is_null(value_type(kind)):
            left_out[name] = f"{kind}, which has no values"
        elif is_dense(kind) and not is_integral(kind) and name not in ids:
            dense[name] = DenseColumn()
        elif is_dense(kind) or is_categorical(kind, floats=False):
            categorical[name] = CategoricalColumn()
        else:
            left_out[name] = str(kind)
    kinds = {name: LabelColumn("number" if name in numbers else "binary") for name in labels}
    return Schema(next(iter(kinds), None), dense, categorical, weight, kinds), left_out


def index_columns(columns: pa.Schema) -> set[str]:
    """Return the names of the columns that were the index of a pandas data frame."""
    names = {name for name in columns.names if _INDEX_NAME.fullmatch(name)}
    try:
        described = json.loads((columns.metadata or {}).get(b"pandas", b"{}"))
        index = described.get("index_columns", [])
        # A default index is described by a mapping {"kind": "range", ...}, and has no column.
        names.update(name for name in index if isinstance(name, str))
    except (ValueError, AttributeError, TypeError):
        pass  # another program wrote other metadata under this key
    return names & {*columns.names}


def _of_types(*names: str) -> Callable[[pa.DataType], bool]:
    """Return a function that says whether an Arrow type is one of the named types."""
    checks = [getattr(pa.types, f"is_{name}") for name in names]
    return lambda kind: any(check(kind) for check in checks)


# Whether an Arrow type can be a dense feature (null: all values are missing); is a list; a string;
# bytes.
is_dense = _of_types("floating", "integer", "boolean", "decimal", "null")
is_list = _of_types("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
is_string = _of_types("string", "large_string", "string_view")
is_bytes = _of_types("binary", "large_binary", "binary_view", "fixed_size_binary")


def is_integral(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is an integer, or a decimal without fractions."""
    types = pa.types
    return types.is_integer(kind) or (types.is_decimal(kind) and kind.scale <= 0)


def value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values in a column of lists or dictionaries; else its own type."""
    if is_list(kind) or isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
    return kind.value_type if isinstance(kind, pa.DictionaryType) else kind


def is_categorical(kind: pa.DataType, encoding: str = "vocabulary", *, floats: bool = True) -> bool:
    """Return whether a column of an Arrow type can have an encoding of `CategoricalColumn`.

    ``floats`` allows floats, decimals and bools, whose values must then be whole numbers.
    """
    types, kind = pa.types, value_type(kind)
    if types.is_integer(kind) or types.is_null(kind) or (floats and is_dense(kind)):
        return True
    return encoding not in ("ids", "modulo") and (is_string(kind) or is_bytes(kind))


def check_columns(
    schema: Schema,
    columns: pa.Schema,
    path: str | os.PathLike[str],
    *,
    has_labels: bool = True,
    booleans: Collection[str] = (),
) -> None:
    """Raise a DataError unless a file has the columns of a schema, with types that fit.

    Columns of type null fit every encoding. ``has_labels=False``: labels and weights are optional.
    ``booleans`` are columns that had booleans in training, and must not have text.
    """
    for name in schema.columns:
        is_label = name in schema.labels or name == schema.weight
        if not has_labels and is_label and name not in columns.names:
            continue
        if columns.names.count(name) != 1:
            raise DataError(
                f"{path} has {columns.names.count(name) or 'no'} columns {name!r}; its columns are "
                f"{', '.join(columns.names)}"
            )
        kind = columns.field(name).type
        if name in schema.categorical:
            encoding = schema.categorical[name].encoding
            wanted = "integers" if encoding in ("ids", "modulo") else "strings, bytes or integers"
            fits, wanted = is_categorical(kind, encoding), f"{wanted}, or lists of them"
        else:
            fits = is_dense(kind) and not (has_labels and is_label and pa.types.is_null(kind))
            is_binary = name in schema.labels and schema.labels[name].kind == "binary"
            wanted = "numbers, 0 or 1, or booleans" if is_binary else "numbers"
        if name in booleans:
            fits, wanted = fits and is_dense(value_type(kind)), "booleans, as in training"
        if not fits:
            raise DataError(
                f"{path}, column {name!r} is of type {kind}; expected {wanted}: convert it, or "
                "leave it out of the schema"
            )


class _Column(NamedTuple):
    """The type that the files so far have for a column, and the file that it comes from."""

    kind: pa.DataType
    path: str | os.PathLike[str]


class CommonTypes:
    """Types of the columns of a data set's files, which must agree on each column.

    All number types agree, all string types agree, and null agrees with every type. ``names`` are
    the columns to compare, those of a schema. None: all columns, and every file must have every
    column that can be a feature, except for ``exclude``.
    """

    def __init__(self, names: Collection[str] | None = None, exclude: Collection[str] = ()):
        self._names, self._exclude = names, exclude
        self._columns: dict[str, _Column] = {}
        self._first: str | os.PathLike[str] | None = None
        self._index: set[str] = set()
        # Columns of integers in one file and of floats in another: pandas writes integers with
        # nulls as floats, so that these are mostly ids.
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
        """Raise a DataError if a column can be a feature; the file ``path`` lacks it."""
        kind, other = self._columns[name]
        if self._is_compared(name) and self._names is None and _may_be_feature(kind):
            raise DataError(
                f"{path} has no column {name!r}, which {other} has; leave it out with --exclude "
                f"{name}, or write all files with the same columns"
            )

    def _is_compared(self, name: str) -> bool:
        return self._names is not None or not (name in self._index or name in self._exclude)

    def _merged(self, name: str, before: _Column, now: _Column) -> _Column:
        """Return the type of a column that two types in files agree on, or raise a DataError."""
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
        # A column of nulls, or of lists of nulls, has no values yet.
        has_values = not pa.types.is_null(value_type(before.kind))
        return before if has_values or pa.types.is_null(now.kind) else now


def _may_be_feature(kind: pa.DataType) -> bool:
    return is_dense(kind) or is_categorical(kind, floats=False)


def _agree(one: pa.DataType, other: pa.DataType) -> bool:
    """Return whether both types are numbers, strings or bytes, or both are lists of these."""
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
    return "bytes" if is_bytes(kind) else str(kind)
