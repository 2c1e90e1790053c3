"""Arrow's types that other programs write, as the types that Arrow computes with.

polars writes strings as views, and DuckDB identifiers as UUIDs.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

# Characters of the text of a UUID, and the places of its dashes.
_UUID_LENGTH, _DASHES = 36, [8, 13, 18, 23]


def without_views(table: pa.Table) -> pa.Table:
    """Cast columns of string views, binary views and UUIDs, and of lists of views.

    PyArrow has few functions for views: it takes no rows of them. UUIDs become text, which is how
    a request has them.

    Example:
        >>> table = pa.table({"city": pa.array(["Oslo"], pa.string_view())})
        >>> without_views(table).schema.field("city").type
        DataType(string)
    """
    for place, field in enumerate(table.schema):
        if _holds_uuids(field.type):
            chunks = [_with_text(chunk) for chunk in table[place].chunks]
            column = pa.chunked_array(chunks, _plain(field.type))
            table = table.set_column(place, field.with_type(column.type), column)
    schema = schema_without_views(table.schema)
    return table if schema.equals(table.schema) else table.cast(schema)


def schema_without_views(schema: pa.Schema) -> pa.Schema:
    """Return the schema of `without_views` of a table."""
    return pa.schema([field.with_type(_plain(field.type)) for field in schema], schema.metadata)


def _plain(kind: pa.DataType) -> pa.DataType:
    if kind == pa.string_view() or _is_uuid(kind):
        return pa.string()
    if kind == pa.binary_view():
        return pa.binary()
    if pa.types.is_list(kind) and _plain(kind.value_type) != kind.value_type:
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_large_list(kind) and _plain(kind.value_type) != kind.value_type:
        return pa.large_list(_plain(kind.value_type))
    return kind


def _is_uuid(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.uuid"


def _holds_uuids(kind: pa.DataType) -> bool:
    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return _is_uuid(kind)


def _with_text(column: pa.Array) -> pa.Array:
    """Return an array of UUIDs, or of lists of UUIDs, with text in place of the UUIDs."""
    if _is_uuid(column.type):
        return _text_of_uuids(column.storage)
    # A slice has the values of all rows, and its offsets begin anywhere.
    offsets = np.asarray(column.offsets)
    values = _with_text(column.values[offsets[0] : offsets[-1]])
    starts = pa.array(offsets - offsets[0])
    return type(column).from_arrays(starts, values, mask=column.is_null())


def _text_of_uuids(storage: pa.FixedSizeBinaryArray) -> pa.StringArray:
    """Return UUIDs as text such as 550e8400-e29b-41d4-a716-446655440000; nulls stay null."""
    is_null = np.asarray(storage.is_null())
    filled = storage.fill_null(bytes(16))
    stored = np.frombuffer(filled.buffers()[1], np.uint8)
    values = stored[16 * filled.offset :][: 16 * len(filled)].reshape(-1, 16)
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    text = np.full((len(storage), _UUID_LENGTH), ord("-"), np.uint8)
    places = np.delete(np.arange(_UUID_LENGTH), _DASHES)
    text[:, places] = digits[np.stack([values >> 4, values & 15], axis=2).reshape(-1, 32)]
    return pa.array(text.view(f"S{_UUID_LENGTH}")[:, 0], pa.string(), mask=is_null)
