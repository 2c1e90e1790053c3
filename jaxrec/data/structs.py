"""Structs as columns: a field is a column named after its path, such as ``user.age``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import pyarrow as pa


def flat_table(table: pa.Table, names: Collection[str] = ()) -> pa.Table:
    """Replace columns of structs by their fields; the fields of a null struct are null.

    Nested structs become ``a.b.c``. The bytes of the values are not copied. A column of nulls alone
    becomes the columns of ``names`` that are its fields, as `with_null_fields` makes them.
    """
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    return with_null_fields(table, names)


def with_null_fields(table: pa.Table, names: Collection[str]) -> pa.Table:
    """Replace a column of nulls alone by the columns of ``names`` that are its fields.

    Where no row has a struct, as pandas and JSON write it, its fields are not known: other rows of
    the data set have their names, such as ``user.age`` for the column ``user``.
    """
    empty = [field.name for field in table.schema if pa.types.is_null(field.type)]
    for column in empty:
        fields = [name for name in names if name.startswith(f"{column}.")]
        # A column beside such names is no struct: pandas calls a second column `x` `x.1`.
        if fields and not any(name in table.column_names for name in fields):
            table = table.drop_columns([column])
            for name in fields:
                table = table.append_column(name, pa.nulls(len(table)))
    return table


def flat_schema(columns: pa.Schema, names: Collection[str] = ()) -> pa.Schema:
    """Return the names and types that `flat_table` gives a table with these columns."""
    # Not `columns.empty_table()`, which makes no arrays of lists of an extension type.
    return flat_table(pa.Table.from_batches([], columns), names).schema


def with_types(
    fields: Iterable[pa.Field], types: Mapping[str, pa.DataType], before: str = ""
) -> list[pa.Field]:
    """Give columns types by name; the field of a struct is named ``user.age``.

    ``before`` is the name of the struct that has the fields, and a dot.
    """
    typed = []
    for field in fields:
        name = f"{before}{field.name}"
        kind = types.get(name, field.type)
        if pa.types.is_struct(kind):
            kind = pa.struct(with_types(kind, types, f"{name}."))
        typed.append(field.with_type(kind))
    return typed
