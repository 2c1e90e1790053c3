"""The columns that features are encoded from: fields of structs, and parts of times."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.compute as pc

from jaxrec.data.column_types import feature_schema
from jaxrec.data.encode import Location
from jaxrec.data.schema import DenseColumn, Schema, SchemaError, time_of
from jaxrec.data.structs import flat_table
from jaxrec.data.times import days, instants, part_of, unknown_zone


def feature_table(
    schema: Schema,
    table: pa.Table,
    path: str | os.PathLike[str] = "the table",
    first_row: int = 0,
) -> pa.Table:
    """Add the parts of times to a table, and put the fields of structs in place of the structs.

    An hour, weekday or month is int64, and an age is float64: days since 1970, or since the time
    in the column ``since``. Nulls stay null.

    Args:
        schema: The schema, which says which parts there are.
        table: Table with the columns of the schema.
        path: The table's file, for errors.
        first_row: Number of the table's first row in the file, for errors.

    Raises:
        DataError: A column of times is missing, has another type, or has text that is no time.
    """
    table = flat_table(table, schema.inputs)
    kinds = feature_schema(schema, table.schema, path)
    times: dict[str, pa.Array] = {}

    def read(name: str) -> pa.Array:
        if name not in times:
            times[name] = instants(table[name], Location(path, first_row, name))
        return times[name]

    for name, part, column in schema.parts:
        source = time_of(name, part)
        if part == "age":
            values = days(read(source))
            if isinstance(column, DenseColumn) and column.since is not None:
                values = pc.subtract(values, days(read(column.since)))
        else:
            # A date has no zone: 1 March is in March everywhere.
            is_date = pa.types.is_date(table.schema.field(source).type)
            values = part_of(read(source), part, None if is_date else column.zone)
        at = table.schema.get_field_index(name)
        field = kinds.field(name)
        table = (
            table.append_column(field, values) if at < 0 else table.set_column(at, field, values)
        )
    return table


def check_zones(schema: Schema) -> None:
    """Raise a SchemaError if a time zone of a schema is unknown."""
    for name, _, column in schema.parts:
        if column.zone is not None and (problem := unknown_zone(column.zone)) is not None:
            raise SchemaError(f"column {name!r} is in the time zone {column.zone!r}: {problem}")
