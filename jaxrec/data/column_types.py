"""Types of a table's columns: what each can be, and checks against a schema."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection

import pyarrow as pa

from jaxrec.data.criteo.text import DataError
from jaxrec.data.schema import CategoricalColumn, DenseColumn, Schema, SchemaError

# Default names of the label column; the first one present is taken.
LABEL_NAMES = ("label", "click", "target")

# Names that pandas and Dask give an index without a name.
_INDEX_NAME = re.compile(r"__index_level_\d+__|__null_dask_index__")


def infer_schema(
    columns: pa.Schema,
    label: str | None = None,
    *,
    weight: str | None = None,
    exclude: Collection[str] = (),
    ids: Collection[str] = (),
) -> tuple[Schema, dict[str, str]]:
    """Make a schema from the types of a table's columns.

    Columns of floats, decimals and bools become dense features. Columns of strings, bytes and
    integers, and of lists of these, become tables with a vocabulary. The index of a pandas data
    frame is left out.

    Args:
        columns: Names and types of the columns.
        label: Name of the label column; None: the first of `LABEL_NAMES` that the table has.
        weight: Name of the column of sample weights; None: all weights are 1.
        exclude: Names of columns to leave out of the features.
        ids: Names of columns of floats that hold integers, and become tables.

    Returns:
        The schema; and the types of the columns that are left out, by name.

    Raises:
        SchemaError: There is no label column, no column of another name, or no column for a table.

    Example:
        >>> table = pa.table({"click": [0], "price": [1.5], "tags": [["a", "b"]]})
        >>> schema, _ = infer_schema(table.schema)
        >>> schema.label, [*schema.dense], [*schema.categorical]
        ('click', ['price'], ['tags'])
    """
    names = columns.names
    if label is None:
        left = [name for name in LABEL_NAMES if name in names and name not in exclude]
        label = next((name for name in left if name != weight), None)
        if label is None:
            raise SchemaError(
                f"none of the columns {', '.join(names)} is named {', '.join(LABEL_NAMES[:-1])} or "
                f"{LABEL_NAMES[-1]}; name the label column with --label"
            )
    for name in (label, *exclude, *([] if weight is None else [weight])):
        if name not in names:
            raise SchemaError(f"there is no column {name!r}; the columns are {', '.join(names)}")
        if name in (label, weight) and name in exclude:
            role = "label" if name == label else "weight"
            raise SchemaError(f"column {name!r} is the {role}; leave it out of --exclude")
    dense, categorical, left_out = {}, {}, {}
    index = index_columns(columns)
    for name, kind in zip(names, columns.types, strict=True):
        if name in (label, weight, *exclude):
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
    return Schema(label, dense, categorical, weight), left_out


def index_columns(columns: pa.Schema) -> set[str]:
    """Return the names of the columns that were the index of a pandas data frame."""
    names = {name for name in columns.names if _INDEX_NAME.fullmatch(name)}
    try:
        described = json.loads((columns.metadata or {}).get(b"pandas", b"{}"))
        index = described.get("index_columns", [])
        # The index of a data frame that was not given one is a mapping, and no column.
        names.update(name for name in index if isinstance(name, str))
    except (ValueError, AttributeError, TypeError):
        pass  # the metadata of another program
    return names & {*columns.names}


def is_dense(kind: pa.DataType) -> bool:
    """Return whether a column of an Arrow type can be a dense feature."""
    types = pa.types
    return (
        types.is_floating(kind)
        or types.is_integer(kind)
        or types.is_boolean(kind)
        or types.is_decimal(kind)
        or types.is_null(kind)
    )


def is_integral(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is one of integers, or of decimals without fractions."""
    types = pa.types
    return types.is_integer(kind) or (types.is_decimal(kind) and kind.scale <= 0)


def is_list(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a list type."""
    types = pa.types
    return (
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def value_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values of a column: those of a list's elements and a dictionary's."""
    if is_list(kind) or isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
    return kind.value_type if isinstance(kind, pa.DictionaryType) else kind


def is_categorical(kind: pa.DataType, encoding: str = "vocabulary", *, floats: bool = True) -> bool:
    """Return whether a column of an Arrow type can have an encoding of `CategoricalColumn`.

    Args:
        kind: The type.
        encoding: The encoding.
        floats: Whether floats, decimals and bools can, whose values must be whole numbers.
    """
    types, kind = pa.types, value_type(kind)
    if types.is_integer(kind) or types.is_null(kind) or (floats and is_dense(kind)):
        return True
    return encoding in ("vocabulary", "hash", "dynamic", "frozen") and is_text(kind)


def is_text(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is one of strings or bytes."""
    return is_string(kind) or (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def is_string(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is one of strings."""
    types = pa.types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def check_columns(
    schema: Schema, columns: pa.Schema, path: str | os.PathLike[str], *, has_labels: bool = True
) -> None:
    """Check that a file has the columns of a schema, with types that fit.

    A column that is null in every row, of the type null, fits any encoding.

    Args:
        schema: The schema.
        columns: The file's columns.
        path: The file.
        has_labels: Whether the columns of labels and weights are required.

    Raises:
        DataError: A column is missing or has a type that does not fit.
    """
    for name in schema.columns:
        is_label = name in (schema.label, schema.weight)
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
            wanted = "numbers"
        if not fits:
            raise DataError(
                f"{path}, column {name!r} is of type {kind}; expected {wanted}: convert it, or "
                "leave it out of the schema"
            )
