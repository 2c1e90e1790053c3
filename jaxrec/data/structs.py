"""Structs as columns: a field is a column named after its path, such as ``user.age``."""

from __future__ import annotations

import pyarrow as pa


def flat_table(table: pa.Table) -> pa.Table:
    """Replace columns of structs by their fields; the fields of a null struct are null.

    Nested structs become ``a.b.c``. The bytes of the values are not copied.
    """
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    return table


def flat_schema(columns: pa.Schema) -> pa.Schema:
    """Return the names and types that `flat_table` gives a table with these columns."""
    return flat_table(columns.empty_table()).schema
