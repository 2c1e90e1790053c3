"""Arrow's view types, in which polars writes strings, as the types that Arrow computes with."""

from __future__ import annotations

import pyarrow as pa


def without_views(table: pa.Table) -> pa.Table:
    """Cast columns of string views and binary views, and of lists of them.

    PyArrow has few functions for views: it takes no rows of them.

    Example:
        >>> table = pa.table({"city": pa.array(["Oslo"], pa.string_view())})
        >>> without_views(table).schema.field("city").type
        DataType(string)
    """
    schema = schema_without_views(table.schema)
    return table if schema.equals(table.schema) else table.cast(schema)


def schema_without_views(schema: pa.Schema) -> pa.Schema:
    """Return the schema of `without_views` of a table."""
    return pa.schema([field.with_type(_plain(field.type)) for field in schema], schema.metadata)


def _plain(kind: pa.DataType) -> pa.DataType:
    if kind == pa.string_view():
        return pa.string()
    if kind == pa.binary_view():
        return pa.binary()
    if pa.types.is_list(kind) and _plain(kind.value_type) != kind.value_type:
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_large_list(kind) and _plain(kind.value_type) != kind.value_type:
        return pa.large_list(_plain(kind.value_type))
    return kind
