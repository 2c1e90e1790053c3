"""Checks of a table's column types against a schema."""

from __future__ import annotations

import os

import pyarrow as pa

from jaxrec.data.schema import CategoricalColumn, DenseColumn, Schema, SchemaError
from jaxrec.data.text import DataError

# Default names of the label column; the first one present is taken.
LABEL_NAMES = ("label", "click", "target")


def infer_schema(columns: pa.Schema, label: str | None = None) -> tuple[Schema, dict[str, str]]:
    """Make a schema from the types of a table's columns.

    Columns of floats, decimals and bools become dense features. Columns of strings, bytes and
    integers, and of lists of these, become tables with a vocabulary.

    Args:
        columns: Names and types of the columns.
        label: Name of the label column; None: the first of `LABEL_NAMES` that the table has.

    Returns:
        The schema; and the types of the columns that are left out, by name.

    Raises:
        SchemaError: There is no label column, or no column for a table.

    Example:
        >>> table = pa.table({"click": [0], "price": [1.5], "tags": [["a", "b"]]})
        >>> schema, _ = infer_schema(table.schema)
        >>> schema.label, [*schema.dense], [*schema.categorical]
        ('click', ['price'], ['tags'])
    """
    names = columns.names
    if label is None:
        label = next((name for name in LABEL_NAMES if name in names), None)
        if label is None:
            raise SchemaError(
                f"none of the columns {', '.join(names)} is named {', '.join(LABEL_NAMES[:-1])} or "
                f"{LABEL_NAMES[-1]}; name the label column with --label"
            )
    elif label not in names:
        raise SchemaError(f"there is no column {label!r}; the columns are {', '.join(names)}")
    dense, categorical, left_out = {}, {}, {}
    for name, kind in zip(names, columns.types, strict=True):
        if name == label:
            continue
        if is_dense(kind) and not pa.types.is_integer(kind):
            dense[name] = DenseColumn()
        elif is_categorical(kind):
            categorical[name] = CategoricalColumn()
        else:
            left_out[name] = str(kind)
    return Schema(label, dense, categorical), left_out


def is_dense(kind: pa.DataType) -> bool:
    """Return whether a column of an Arrow type can be a dense feature."""
    types = pa.types
    return (
        types.is_floating(kind)
        or types.is_integer(kind)
        or types.is_boolean(kind)
        or types.is_decimal(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a list type."""
    return hasattr(kind, "value_type") and not isinstance(kind, pa.DictionaryType)


def is_categorical(kind: pa.DataType, encoding: str = "vocabulary") -> bool:
    """Return whether a column of an Arrow type can have an encoding of `CategoricalColumn`."""
    if is_list(kind) or isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
        if isinstance(kind, pa.DictionaryType):
            kind = kind.value_type
    types = pa.types
    if types.is_integer(kind):
        return True
    return encoding in ("vocabulary", "hash", "dynamic", "frozen") and (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def check_columns(
    schema: Schema, columns: pa.Schema, path: str | os.PathLike[str], *, has_labels: bool = True
) -> None:
    """Check that a file has the columns of a schema, with types that fit.

    Args:
        schema: The schema.
        columns: The file's columns.
        path: The file.
        has_labels: Whether the columns of labels and weights are required.

    Raises:
        DataError: A column is missing or has a type that does not fit.
    """
    for name in schema.columns:
        if not has_labels and name in (schema.label, schema.weight) and name not in columns.names:
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
            fits, wanted = is_dense(kind), "numbers"
        if not fits:
            raise DataError(
                f"{path}, column {name!r} is of type {kind}; expected {wanted}: convert it, or "
                "leave it out of the schema"
            )
