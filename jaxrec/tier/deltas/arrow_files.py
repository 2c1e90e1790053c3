"""Arrow files of ids with their rows, and of arrays by name.

Both are Arrow IPC files ("Feather"), without compression, so that values are read and written at
the speed of the disk and keep their bits. Types that Arrow lacks, such as bfloat16, are unsigned
integers of the same bits, with the name of the type in the field's metadata ``dtype``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from jaxrec.files.rows import ID, ROW, STATE

_DTYPE = b"dtype"
_ARRAYS = pa.schema(
    {
        "name": pa.string(),
        "dtype": pa.string(),
        "shape": pa.list_(pa.int64()),
        "bytes": pa.large_binary(),
    }
)


class RowFileWriter:
    """An Arrow file of ids, with their rows and state if there are shapes of these.

    Args:
        stream: The file, to which it is written.
        shapes: Shapes and types of the rows, under ``"rows"``, and of the state by name.
    """

    def __init__(self, stream: Any, shapes: Mapping[str, Any]) -> None:
        self._shapes = dict(shapes)
        fields = [pa.field(ID, pa.int64())]
        for name, shape in self._shapes.items():
            dtype = np.dtype(shape.dtype)
            kind = pa.from_numpy_dtype(_stored(dtype))
            if len(shape.shape) > 1:
                kind = pa.list_(kind, int(np.prod(shape.shape[1:])))
            fields.append(pa.field(_column(name), kind, metadata={_DTYPE: dtype.name}))
        self._schema = pa.schema(fields)
        self._file = pa.ipc.new_file(stream, self._schema)
        self.rows = 0

    def write(self, ids: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Append ids, int64 ``[n]``, and their rows and state, ``[n, ...]``, by name."""
        if not ids.size:
            return
        columns = [pa.array(ids)]
        for name, field in zip(self._shapes, list(self._schema)[1:], strict=True):
            array = np.ascontiguousarray(values[name])
            numbers = pa.array(array.view(_stored(array.dtype)).reshape(-1))
            if pa.types.is_fixed_size_list(field.type):
                numbers = pa.FixedSizeListArray.from_arrays(numbers, field.type.list_size)
            columns.append(numbers)
        self._file.write_batch(pa.record_batch(columns, schema=self._schema))
        self.rows += ids.size

    def close(self) -> None:
        """Complete the file."""
        self._file.close()


def read_rows(
    source: Any, shapes: Mapping[str, Any]
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Iterate over the ids of a file, and their rows and state by name, in parts.

    Args:
        source: The file.
        shapes: Shapes and types of the values to read, by name; without any, ids alone.

    Raises:
        ValueError: The file lacks a value, or has it with another shape or type.
    """
    try:
        options = None if shapes else pa.ipc.IpcReadOptions(included_fields=[0])
        file = pa.ipc.open_file(source, options=options)
        if file.schema.field(ID).type != pa.int64():
            raise ValueError(f"its ids are of type {file.schema.field(ID).type}, not int64")
        for name, shape in shapes.items():
            _check_column(file.schema, name, shape)
        for number in range(file.num_record_batches):
            batch = file.get_batch(number)
            batch.validate(full=True)
            if any(column.null_count for column in batch.columns):
                raise ValueError("it has nulls")
            yield (
                batch.column(ID).to_numpy(),
                {name: _values(batch.column(_column(name)), x) for name, x in shapes.items()},
            )
    except (pa.ArrowException, KeyError) as error:
        raise ValueError(f"it is not an Arrow file of rows: {error}") from None


def write_arrays(stream: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays of any types and shapes by name, one record batch each."""
    with pa.ipc.new_file(stream, _ARRAYS) as file:
        for name, array in arrays.items():
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
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
        ValueError: The file is something else.
    """
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
            arrays[name] = content.view(_dtype(dtype)).reshape(shape)
    except (pa.ArrowException, KeyError, TypeError) as error:
        raise ValueError(f"it is not an Arrow file of arrays: {error}") from None
    return arrays


def _column(name: str) -> str:
    return ROW if name == "rows" else f"{STATE}{name}"


def _stored(dtype: np.dtype) -> np.dtype:
    """Return the type of numbers in a file."""
    return dtype if dtype.kind in "fiub" else np.dtype(f"uint{8 * dtype.itemsize}")


def _dtype(name: str) -> np.dtype:
    """Return the type of a name, also of those that `ml_dtypes` adds to NumPy."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def _check_column(columns: pa.Schema, name: str, shape: Any) -> None:
    field = columns.field(_column(name))
    metadata = field.metadata or {}
    dtype = metadata.get(_DTYPE, b"").decode()
    width = field.type.list_size if pa.types.is_fixed_size_list(field.type) else None
    wanted = int(np.prod(shape.shape[1:])) if len(shape.shape) > 1 else None
    if (dtype, width) != (np.dtype(shape.dtype).name, wanted):
        raise ValueError(
            f"column {field.name!r} has {dtype} of width {width}, but the table has "
            f"{np.dtype(shape.dtype).name} of width {wanted}"
        )
    numbers = field.type if width is None else field.type.value_type
    if numbers != pa.from_numpy_dtype(_stored(np.dtype(shape.dtype))):
        raise ValueError(f"column {field.name!r} says that it has {dtype}, and has {numbers}")


def _values(column: pa.Array, shape: Any) -> np.ndarray:
    numbers = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
    flat = numbers.to_numpy(zero_copy_only=False)
    return flat.view(np.dtype(shape.dtype)).reshape(len(column), *shape.shape[1:])
