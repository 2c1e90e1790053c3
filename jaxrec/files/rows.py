"""Files of ids and their rows, and of arrays by name.

A file of rows has the columns ``id`` (int64), ``row`` (lists of numbers) and ``state_NAME`` for
each optimizer state. *Parquet* files are for other tools, with bfloat16 widened to float32. *Arrow*
IPC files ("Feather") are for copies that must be equal bit for bit. They are not compressed, to be
read at the speed of the disk. Types that Arrow lacks are unsigned integers of the same bits, with
the type's name in the field's metadata ``dtype``.

`Values` are arrays ``[n, ...]`` by name: ``"rows"`` and the names of the state. `Shapes` maps the
same names to objects with a shape, ``[rows, ...]``, and a dtype.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

Shapes: TypeAlias = Mapping[str, Any]
Values: TypeAlias = dict[str, np.ndarray]

# Largest numbers of rows, and of bytes of rows, that are written or read at once.
_ROWS, _BYTES = 1 << 16, 1 << 25

ID, ROW, STATE = "id", "row", "state_"

# Earlier versions wrote the indices of rows as "row", and the rows as "embedding".
_OLD_ID, _OLD_ROW = "row", "embedding"

_DTYPE = b"dtype"
_ARRAYS = pa.schema(
    {
        "name": pa.string(),
        "dtype": pa.string(),
        "shape": pa.list_(pa.int64()),
        "bytes": pa.large_binary(),
    }
)


def rows_at_once(shapes: Shapes) -> int:
    """Return the number of rows to read or write at once: at most 65,536, and at most 32 MiB."""
    width = sum(_width(each) * np.dtype(each.dtype).itemsize for each in shapes.values())
    return max(1, min(_ROWS, _BYTES // width))


class RowWriter:
    """Writer of a file of ids with their rows and state: Parquet for a path, Arrow for a stream.

    Attributes:
        rows: Number of rows so far.
    """

    def __init__(self, file: pathlib.Path | Any, shapes: Shapes) -> None:
        self._is_parquet = isinstance(file, pathlib.Path)
        self._names = list(shapes)
        stored = _widened if self._is_parquet else _bits
        self._types = [stored(np.dtype(shape.dtype)) for shape in shapes.values()]
        fields = [pa.field(ID, pa.int64())]
        for (name, shape), dtype in zip(shapes.items(), self._types, strict=True):
            metadata = None if self._is_parquet else {_DTYPE: np.dtype(shape.dtype).name}
            fields.append(pa.field(_column(name), _arrow_type(shape, dtype), metadata=metadata))
        self._schema = pa.schema(fields)
        if self._is_parquet:
            self._file = pq.ParquetWriter(file, self._schema, write_page_checksum=True)
        else:
            self._file = pa.ipc.new_file(file, self._schema)
        self.rows = 0

    def write(self, ids: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Append ids, int64 ``[n]``, with their rows and state, ``[n, ...]``."""
        if not ids.size:
            return
        columns = [pa.array(ids)]
        for name, dtype, field in zip(
            self._names, self._types, list(self._schema)[1:], strict=True
        ):
            array = np.ascontiguousarray(values[name])
            array = array.astype(dtype, copy=False) if self._is_parquet else array.view(dtype)
            numbers = pa.array(array.reshape(-1))
            if pa.types.is_fixed_size_list(field.type):
                numbers = pa.FixedSizeListArray.from_arrays(numbers, field.type.list_size)
            columns.append(numbers)
        self._file.write(pa.record_batch(columns, schema=self._schema))
        self.rows += ids.size

    def close(self) -> None:
        """Complete the file."""
        self._file.close()


def read_rows(source: Any, shapes: Shapes) -> Iterator[tuple[np.ndarray, Values]]:
    """Yield the ids, int64 ``[n]``, and the `Values` of an Arrow file, part by part.

    Without shapes only the ids are read, and the values are empty.

    Raises:
        ValueError: The file lacks a value, or has it with another shape or type.
    """
    try:
        # Without the values, a file of many rows is read for its ids at a few bytes a row.
        options = None if shapes else pa.ipc.IpcReadOptions(included_fields=[0])
        file = pa.ipc.open_file(source, options=options)
        if file.schema.field(ID).type != pa.int64():
            raise ValueError(f"its ids are of type {file.schema.field(ID).type}, not int64")
        for name, shape in shapes.items():
            _check_bits(file.schema.field(_column(name)), shape)
        for number in range(file.num_record_batches):
            batch = file.get_batch(number)
            # Before anything is read: offsets of a damaged file may point beyond its buffers.
            batch.validate(full=True)
            if any(column.null_count for column in batch.columns):
                raise ValueError("it has nulls")
            ids = batch.column(ID).to_numpy()
            values = {}
            for name, shape in shapes.items():
                flat = _flat(batch.column(_column(name))).view(np.dtype(shape.dtype))
                values[name] = flat.reshape(ids.size, *shape.shape[1:])
            yield ids, values
    except (pa.ArrowException, KeyError) as error:
        raise ValueError(f"it is not an Arrow file of rows: {error}") from None


def _check_bits(field: pa.Field, shape: Any) -> None:
    """Raise a ValueError unless a column of an Arrow file has the type and width of ``shape``."""
    dtype = (field.metadata or {}).get(_DTYPE, b"").decode()
    width = field.type.list_size if pa.types.is_fixed_size_list(field.type) else None
    wanted = _width(shape) if len(shape.shape) > 1 else None
    if (dtype, width) != (np.dtype(shape.dtype).name, wanted):
        raise ValueError(
            f"column {field.name!r} has {dtype} of width {width}, but the table has "
            f"{np.dtype(shape.dtype).name} of width {wanted}"
        )
    numbers = field.type if width is None else field.type.value_type
    if numbers != pa.from_numpy_dtype(_bits(np.dtype(shape.dtype))):
        raise ValueError(f"column {field.name!r} says that it has {dtype}, and has {numbers}")


class RowFile:
    """A Parquet file with the rows of a table, as `open_rows` yields it.

    Attributes:
        shapes: Shapes and types of the values in the file: its rows, and maybe optimizer state.
    """

    def __init__(
        self, path: pathlib.Path, file: pq.ParquetFile, table: str, shapes: Shapes
    ) -> None:
        self.path, self._file = path, file
        columns = file.schema_arrow
        is_old = _OLD_ROW in columns.names and ID not in columns.names
        self._id, row = (_OLD_ID, _OLD_ROW) if is_old else (ID, ROW)
        for name in (self._id, row):
            if name not in columns.names:
                raise ValueError(
                    f"{path} has no column {name!r}; jaxrec.tier.export_rows writes it"
                )
        if not pa.types.is_integer(kind := columns.field(self._id).type):
            raise ValueError(f"{path}: column {self._id!r} holds {kind}, expected int64")
        self._columns = {"rows": row}
        self._columns |= {
            name.removeprefix(STATE): name for name in columns.names if name.startswith(STATE)
        }
        for key, column in self._columns.items():
            if key not in shapes:
                kept = ", ".join(sorted(shapes.keys() - {"rows"})) or "none"
                raise ValueError(
                    f"{path} has the optimizer state {key!r}, but the state of table {table!r} is: "
                    f"{kept}; leave column {column!r} out, or give the table that optimizer"
                )
            wanted = _arrow_type(shapes[key], _widened(np.dtype(shapes[key].dtype)))
            if not _fits(kind := columns.field(column).type, wanted, any_number=is_old):
                raise ValueError(
                    f"{path}: column {column!r} holds {kind}, but table {table!r} has {wanted}"
                )
        self.shapes = {key: shapes[key] for key in self._columns}

    def parts(self) -> Iterator[tuple[np.ndarray, Values]]:
        """Yield the ids, int64 ``[n]``, and the `Values` of the file, part by part.

        Raises:
            ValueError: There is a null, or a row of another width.
        """
        start = 0
        columns = [self._id, *self._columns.values()]
        batches = self._file.iter_batches(rows_at_once(self.shapes), columns=columns)
        while True:
            with _damage(self.path):
                if (batch := next(batches, None)) is None:
                    return
            ids = batch.column(self._id)
            if ids.null_count:
                place = start + ids.is_null().index(True).as_py()
                raise ValueError(f"{self.path}, row {place} (from 0): the id is null")
            values = {}
            for key, column in self._columns.items():
                array, shape = batch.column(column), self.shapes[key]
                if problem := _find_problem(array, _width(shape)):
                    place, text = problem
                    raise ValueError(
                        f"{self.path}, row {start + place} (from 0): column {column!r} of id "
                        f"{ids[place]} {text}"
                    )
                numbers = _flat(array).reshape(len(array), *shape.shape[1:])
                values[key] = numbers.astype(shape.dtype, copy=False)
            yield ids.to_numpy().astype(np.int64, copy=False), values
            start += len(ids)


@contextlib.contextmanager
def open_rows(path: pathlib.Path, table: str, shapes: Shapes) -> Iterator[RowFile]:
    """Open a Parquet file of rows within the block; a damaged file raises a ValueError.

    ``table`` is the name of the table for errors, and ``shapes`` are those of its values.
    """
    with _damage(path):
        file = pq.ParquetFile(path, page_checksum_verification=True)
    with file:
        yield RowFile(path, file, table, shapes)


@contextlib.contextmanager
def _damage(path: pathlib.Path) -> Iterator[None]:
    """Turn an error of Arrow in the block into a ValueError that names the damaged file."""
    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from None


def _fits(kind: pa.DataType, wanted: pa.DataType, *, any_number: bool) -> bool:
    """Return whether a column of type ``kind`` has the lengths and numbers of type ``wanted``.

    With ``any_number`` its numbers may have any type.
    """
    if not pa.types.is_fixed_size_list(wanted):
        return kind == wanted
    if pa.types.is_fixed_size_list(kind):
        if kind.list_size != wanted.list_size:
            return False
    elif not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
        return False
    numbers = kind.value_type
    if any_number:
        return pa.types.is_floating(numbers) or pa.types.is_integer(numbers)
    return numbers == wanted.value_type


def _find_problem(column: pa.Array, width: int) -> tuple[int, str] | None:
    """Return the index of the first row with a null or another width, and the problem, or None."""
    if pa.types.is_primitive(column.type):
        return (column.is_null().index(True).as_py(), "has a null") if column.null_count else None
    # The length of a null is null.
    lengths = pc.list_value_length(column).fill_null(-1).to_numpy()
    if (lengths != width).any():
        place = int((lengths != width).argmax())
        count = lengths[place]
        text = "has a null" if count < 0 else f"has {count} numbers, the table's rows {width}"
        return place, text
    numbers = column.flatten()
    if numbers.null_count:
        return numbers.is_null().index(True).as_py() // width, "has a null"
    return None


def write_arrays(stream: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays of any types and shapes by name to an Arrow file, one record batch each."""
    with pa.ipc.new_file(stream, _ARRAYS) as file:
        for name, array in arrays.items():
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            # Built from buffers: `pa.array` would copy the array's bytes.
            offsets = pa.py_buffer(np.array([0, content.size], np.int64))
            data = pa.Array.from_buffers(
                pa.large_binary(), 1, [None, offsets, pa.py_buffer(content)]
            )
            columns = [
                pa.array([name]),
                pa.array([array.dtype.name]),
                pa.array([list(array.shape)], pa.list_(pa.int64())),
                data,
            ]
            file.write_batch(pa.record_batch(columns, schema=_ARRAYS))


def read_arrays(source: Any) -> dict[str, np.ndarray]:
    """Read the arrays that `write_arrays` wrote.

    Raises:
        ValueError: The file is no such file.
    """
    # NumPy knows bfloat16 and the like only by the types of `ml_dtypes`.
    import ml_dtypes

    arrays = {}
    try:
        file = pa.ipc.open_file(source)
        if not file.schema.equals(_ARRAYS):
            raise ValueError("it has other columns than a file of arrays")
        for number in range(file.num_record_batches):
            batch = file.get_batch(number)
            batch.validate(full=True)
            name, dtype, shape = (batch.column(i)[0].as_py() for i in range(3))
            content = np.frombuffer(batch.column(3)[0].as_buffer(), np.uint8)
            kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
            arrays[name] = content.view(kind).reshape(shape)
    except (pa.ArrowException, KeyError, TypeError) as error:
        raise ValueError(f"it is not an Arrow file of arrays: {error}") from None
    return arrays


def _column(name: str) -> str:
    return ROW if name == "rows" else f"{STATE}{name}"


def _width(shape: Any) -> int:
    return math.prod(shape.shape[1:])


def _bits(dtype: np.dtype) -> np.dtype:
    """Return the type in which Arrow stores the bits of ``dtype``: bfloat16 becomes uint16."""
    return dtype if dtype.kind in "fiub" else np.dtype(f"uint{8 * dtype.itemsize}")


def _widened(dtype: np.dtype) -> np.dtype:
    """Return the type in which Parquet stores numbers of ``dtype``: bfloat16 becomes float32."""
    return dtype if dtype.kind in "fiub" else np.dtype(np.float32)


def _arrow_type(shape: Any, dtype: np.dtype) -> pa.DataType:
    """Return the Arrow type of a column: a number for each row, or a list of as many as wide."""
    kind = pa.from_numpy_dtype(dtype)
    return pa.list_(kind, _width(shape)) if len(shape.shape) > 1 else kind


def _flat(column: pa.Array) -> np.ndarray:
    """Return the numbers of a column, or of all of its lists one after the other, ``[m]``."""
    numbers = column if pa.types.is_primitive(column.type) else column.flatten()
    return numbers.to_numpy(zero_copy_only=False)
