"""Rows of the training data that an encoder keeps: examples of requests, and the columns' types."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrec.data.criteo.text import DataError
from jaxrec.data.schema import Schema

NUM_ROWS = 2


def first_rows(schema: Schema, table: pa.Table) -> pa.Table:
    """Return the first rows of the columns of features."""
    columns = table.select([*schema.dense, *schema.categorical]).replace_schema_metadata(None)
    # A copy: a slice would keep the whole table in memory.
    return columns.take(np.arange(min(NUM_ROWS, len(table))))


def is_boolean(rows: pa.Table | None, name: str) -> bool:
    """Return whether a column is one of booleans, or of lists of these."""
    if rows is None:
        return False
    kind = rows.schema.field(name).type
    return pa.types.is_boolean(getattr(kind, "value_type", kind))


def check_booleans(column: Any, error: Any) -> None:
    """Check that the values of a column of booleans are booleans, or the numbers 0 and 1.

    Args:
        column: The column of a request.
        error: Function of a row and a problem, which makes the error of a value.

    Raises:
        DataError: A value is another number.
    """
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        return
    numbers = column.cast(pa.float64(), safe=False).fill_null(0).to_numpy()
    if (wrong := (numbers != 0) & (numbers != 1)).any():
        row = int(np.argmax(wrong))
        raise error(row, f"the value is {numbers[row]:g}; expected true or false")


def write_rows(rows: pa.Table, path: str | os.PathLike[str]) -> None:
    """Write the rows to a Parquet file."""
    pq.write_table(rows, path)


def read_rows(schema: Schema, path: str | os.PathLike[str]) -> pa.Table:
    """Read the rows that `write_rows` wrote.

    Raises:
        DataError: The file holds something else.
    """
    try:
        rows = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a Parquet file, or damaged ({error})") from None
    names = [*schema.dense, *schema.categorical]
    if rows.column_names != names or len(rows) > NUM_ROWS:
        raise DataError(
            f"{path} has {len(rows)} rows of the columns {', '.join(rows.column_names)}; expected "
            f"{NUM_ROWS} of {', '.join(names)}"
        )
    return rows
