"""Arrow types of columns: the roles they allow, and checks against a schema."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection

import pyarrow as pa

from jaxrec.data.files import DataError
from jaxrec.data.schema import DenseColumn, Schema, time_of

# Names that pandas and Dask give an index without a name.
_INDEX_NAME = re.compile(r"__index_level_\d+__|__null_dask_index__")


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


# Whether an Arrow type can be a dense feature (null: all values are missing); is a time; a list; a
# string; bytes.
is_dense = _of_types("floating", "integer", "boolean", "decimal", "null")
is_time = _of_types("timestamp", "date")
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


def holds_structs(kind: pa.DataType) -> bool:
    """Return whether a column has lists of structs, at any depth."""
    while is_list(kind):
        kind = kind.value_type
    return pa.types.is_struct(kind)


def how_to_flatten(name: str, kind: pa.DataType) -> str:
    """Return the advice to turn a column of lists of structs into columns of lists.

    Example:
        >>> how_to_flatten("items", pa.list_(pa.struct({"id": pa.int64(), "price": pa.float32()})))
        "write a list for each field, such as 'items.id': [row['id'] for row in items]"
    """
    while is_list(kind):
        kind = kind.value_type
    field = kind.field(0).name if kind.num_fields else "field"
    return (
        f"write a list for each field, such as {f'{name}.{field}'!r}: "
        f"[row[{field!r}] for row in {name}]"
    )


def is_vector(kind: pa.DataType) -> bool:
    """Return whether a column of an Arrow type may have vectors: lists of floats."""
    return is_list(kind) and pa.types.is_floating(kind.value_type)


def feature_schema(schema: Schema, columns: pa.Schema, path: str | os.PathLike[str]) -> pa.Schema:
    """Add the features that are parts of times to the names and types of a file's columns.

    Raises:
        DataError: A column of times is missing, or has another type.
    """
    for name, part, column in schema.parts:
        times = [time_of(name, part)]
        if isinstance(column, DenseColumn) and column.since is not None:
            times.append(column.since)
        for time in times:
            kind = _field(columns, time, path).type
            if not (is_time(kind) or pa.types.is_null(kind) or is_string(value_type(kind))):
                raise DataError(
                    f"{path}, column {time!r} is of type {kind}; {name} is a part of it, so that "
                    "it must have times: timestamps, dates or text such as 2024-03-01T10:00:00Z"
                )
        field = pa.field(name, pa.float64() if part == "age" else pa.int64())
        at = columns.get_field_index(name)
        columns = columns.append(field) if at < 0 else columns.set(at, field)
    return columns


def _field(columns: pa.Schema, name: str, path: str | os.PathLike[str]) -> pa.Field:
    """Return the only column of a name, or raise a DataError."""
    if (count := columns.names.count(name)) != 1:
        raise DataError(
            f"{path} has {count or 'no'} columns {name!r}; its columns are "
            f"{', '.join(columns.names)}"
        )
    return columns.field(name)


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
    columns = feature_schema(schema, columns, path)
    for name in schema.columns:
        is_label = name in schema.labels or name == schema.weight
        if not has_labels and is_label and name not in columns.names:
            continue
        kind = _field(columns, name, path).type
        width = schema.dense[name].width if name in schema.dense else None
        if width is not None:
            fits, wanted = _fits_width(kind, width), f"lists of {width} numbers"
        elif name in schema.categorical:
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
                f"{path}, column {name!r} is of type {kind}; expected {wanted}: "
                f"{_advice(name, kind, name in schema.dense)}"
            )


def _fits_width(kind: pa.DataType, width: int) -> bool:
    """Return whether a column may have lists of ``width`` numbers; null stands for any type."""
    if pa.types.is_fixed_size_list(kind) and kind.list_size != width:
        return False
    return pa.types.is_null(kind) or (is_list(kind) and is_dense(kind.value_type))


def _advice(name: str, kind: pa.DataType, is_dense_column: bool) -> str:
    """Return what to do about a column whose type does not fit the schema."""
    if is_time(kind):
        return f"take its parts, such as {name}.hour with part: hour"
    if holds_structs(kind):
        return how_to_flatten(name, kind)
    if is_dense_column and is_list(kind) and is_dense(kind.value_type):
        return "give the width of the vectors, such as width: 64, or leave it out of the schema"
    return "convert it, or leave it out of the schema"
