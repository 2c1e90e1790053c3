"""Columns of a Parquet file of ids and rows: their types, and their values in parts."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

# Largest numbers of rows, and of bytes of rows, that are written or read at once.
_ROWS, _BYTES = 1 << 16, 1 << 25

ID, ROW, STATE = "id", "row", "state_"


@dataclasses.dataclass(frozen=True)
class TableShapes:
    """Shapes and types of the rows of a table, and of their state.

    Attributes:
        table: Name of the table.
        rows: Shape and type of its rows, ``[rows, dim]``.
        state: Shapes and types of their optimizer state, ``[rows, ...]``.
    """

    table: str
    rows: Any
    state: Mapping[str, Any]

    @property
    def rows_at_once(self) -> int:
        """Number of rows that are read or written at once."""
        width = sum(
            int(np.prod(array.shape[1:], dtype=np.int64)) * np.dtype(array.dtype).itemsize
            for array in (self.rows, *self.state.values())
        )
        return max(1, min(_ROWS, _BYTES // width))


def _arrow_type(dtype: Any) -> pa.DataType:
    """Return the type of numbers in a file; bfloat16 is written as float32."""
    dtype = np.dtype(dtype)
    return pa.float32() if dtype.kind not in "fiub" else pa.from_numpy_dtype(dtype)


class RowWriter:
    """A Parquet file of rows.

    Args:
        path: The file.
        shapes: The table.
        with_state: Whether the state is written.
    """

    def __init__(self, path: pathlib.Path, shapes: TableShapes, *, with_state: bool) -> None:
        self._arrays = {ROW: ("rows", shapes.rows)}
        if with_state:
            for name, array in sorted(shapes.state.items()):
                self._arrays[f"{STATE}{name}"] = name, array
        types = {column: _column_type(array) for column, (_, array) in self._arrays.items()}
        self._schema = pa.schema({ID: pa.int64(), **types})
        self._file = pq.ParquetWriter(path, self._schema, write_page_checksum=True)

    def write(self, ids: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Append ids, int64 ``[n]``, and their rows and state by name."""
        if not ids.size:
            return
        columns = [pa.array(ids)]
        for column, (name, array) in self._arrays.items():
            flat = values[name].astype(_arrow_type(array.dtype).to_pandas_dtype(), copy=False)
            kind = self._schema.field(column).type
            numbers = pa.array(np.ascontiguousarray(flat).reshape(-1))
            if pa.types.is_fixed_size_list(kind):
                numbers = pa.FixedSizeListArray.from_arrays(numbers, kind.list_size)
            columns.append(numbers)
        self._file.write_table(pa.table(columns, schema=self._schema))

    def close(self) -> None:
        """Complete the file."""
        self._file.close()


def _column_type(array: Any) -> pa.DataType:
    """Return the type of a column of an array's rows."""
    kind = _arrow_type(array.dtype)
    width = int(np.prod(array.shape[1:], dtype=np.int64))
    return kind if len(array.shape) == 1 else pa.list_(kind, width)


@contextlib.contextmanager
def open_rows(path: pathlib.Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; damage is a ValueError."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from None


def check_columns(path: pathlib.Path, columns: pa.Schema, shapes: TableShapes) -> dict[str, str]:
    """Check the types of a file's columns; return the state's name for each state column."""
    for name in (ID, ROW):
        if name not in columns.names:
            raise ValueError(f"{path} has no column {name!r}; jaxrec.tier.export_rows writes it")
    kind = columns.field(ID).type
    if kind != pa.int64():
        raise ValueError(f"{path}: column {ID!r} holds {kind}, expected int64")
    state = {name: name.removeprefix(STATE) for name in columns.names if name.startswith(STATE)}
    name = shapes.table
    for column, key in state.items():
        if key not in shapes.state:
            kept = ", ".join(sorted(shapes.state)) or "none"
            raise ValueError(
                f"{path} has the optimizer state {key!r}, but the state of table {name!r} is: "
                f"{kept}; leave column {column!r} out, or give the table that optimizer"
            )
    arrays = {ROW: shapes.rows}
    arrays |= {column: shapes.state[key] for column, key in state.items()}
    for column, array in arrays.items():
        wanted, kind = _column_type(array), columns.field(column).type
        if not _fits(kind, wanted):
            raise ValueError(
                f"{path}: column {column!r} holds {kind}, but table {name!r} has {wanted}"
            )
    return state


def _fits(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a column of a type can be read as the wanted type; names do not matter."""
    if not pa.types.is_fixed_size_list(wanted):
        return kind == wanted
    return (
        pa.types.is_fixed_size_list(kind)
        and kind.list_size == wanted.list_size
        and kind.value_type == wanted.value_type
    )


def checked_ids(
    path: pathlib.Path, file: pq.ParquetFile, shapes: TableShapes, state: Mapping[str, str]
) -> np.ndarray:
    """Read a whole file, check all its values, and return its ids."""
    parts = [np.zeros(0, np.int64)]
    for batch in file.iter_batches(shapes.rows_at_once, columns=[ID, ROW, *state]):
        ids = batch.column(ID)
        start = sum(part.size for part in parts)
        if ids.null_count:
            row = start + int(np.argmax(np.asarray(ids.is_null())))
            raise ValueError(f"{path}, row {row} (from 0): the id is null")
        for column in (ROW, *state):
            values = batch.column(column)
            is_null: np.ndarray = np.asarray(values.is_null())
            if pa.types.is_fixed_size_list(values.type) and not is_null.any():
                of_rows = np.asarray(pc.is_null(values.flatten())).reshape(len(values), -1)
                is_null = np.asarray(of_rows.any(axis=1))
            if is_null.any():
                place = int(np.argmax(is_null))
                raise ValueError(
                    f"{path}, row {start + place} (from 0): column {column!r} of id "
                    f"{ids[place]} has a null"
                )
        parts.append(ids.to_numpy())
    ids = np.concatenate(parts)
    in_order = np.sort(ids)
    if (again := in_order[1:] == in_order[:-1]).any():
        raise ValueError(f"{path}: id {in_order[int(np.argmax(again))]} is there more than once")
    return ids


def numbers(column: pa.Array, array: Any) -> np.ndarray:
    """Return a column as rows of an array's type."""
    if pa.types.is_fixed_size_list(column.type):
        values = column.flatten().to_numpy().reshape(len(column), *array.shape[1:])
    else:
        values = column.to_numpy()
    return values.astype(array.dtype, copy=False)
