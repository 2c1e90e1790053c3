"""Bodies of requests and responses: columns by name, in JSON or as an Arrow IPC stream."""

from __future__ import annotations

import dataclasses
import itertools
import re
import struct
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from flatbuffers import number_types
from flatbuffers.table import Table as FlatTable

from jaxrec.data.arrays import as_column
from jaxrec.serve.http.input_columns import InputColumn, InputColumns
from jaxrec.serve.http.limits import RequestError, invalid

JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"

# Path of a wrong value at the end of msgspec's messages.
_PLACE = re.compile(r"(.*) - at `\$\.(.*)`", re.DOTALL)

# Positions of fields in the tables of format/Message.fbs of Arrow's specification.
_HEADER_TYPE, _HEADER, _COMPRESSION = 6, 8, 10
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3

# Errors of PyArrow and of flatbuffers that read damaged messages.
_DAMAGE = (
    ValueError, TypeError, KeyError, IndexError, OverflowError, MemoryError, OSError, struct.error,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Payload:
    """Samples of a request.

    Attributes:
        columns: Lists by column from a JSON body, or a table from an Arrow body.
        num_samples: Number of samples.
        num_bytes: Size of the body.
        arrival: Time of `time.monotonic` when the body was decoded.
    """

    columns: Mapping[str, list[Any]] | pa.Table
    num_samples: int
    num_bytes: int = 0
    arrival: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass(frozen=True, eq=False)
class Lists:
    """A column of the response with a list for each sample.

    Attributes:
        values: Values of all lists, one list after the other.
        lengths: Number of values of each list, ``[samples]``.
    """

    values: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def size(self) -> int:
        """Number of values of all lists."""
        return self.values.size

    @property
    def offsets(self) -> np.ndarray:
        """Position of each list's first value, then the number of values, int32."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)


class JsonDecoder:
    """Decodes JSON bodies such as ``{"age": [31, 52], "tags": [["a"], []]}``.

    Columns that the model does not read are left out.
    """

    def __init__(self, columns: InputColumns[Any], max_samples: int) -> None:
        self._columns, self._names = columns.columns, columns.names
        self._max_samples = max_samples
        # A struct with a typed field per column: msgspec then checks types while it parses, and
        # skips other columns. Names of columns need not be Python's, so fields are numbered.
        self._fields = [f"column{number}" for number in range(len(self._names))]
        self._decoder = self._decoder_of([each.json_type() for each in self._columns])
        self._decoder_with_floats = self._decoder_of(
            [each.json_type(with_floats=True) for each in self._columns]
        )

    def decode(self, body: bytes | bytearray) -> Payload:
        """Return the columns of a JSON body; a RequestError names the column and the sample."""
        try:
            columns = self._decode(body)
        except msgspec.ValidationError as error:
            raise invalid(self._explain(str(error))) from None
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise invalid(f"the body is not JSON: {error}") from None
        return Payload(columns, count_samples(columns, self._max_samples), len(body))

    def _decoder_of(self, types: list[Any]) -> msgspec.json.Decoder:
        body = msgspec.defstruct(
            "Body",
            list(zip(self._fields, types, strict=True)),
            rename=dict(zip(self._fields, self._names, strict=True)),
            kw_only=True,
        )
        return msgspec.json.Decoder(body)

    def _decode(self, body: bytes | bytearray) -> dict[str, list[Any]]:
        try:
            return self._by_name(self._decoder.decode(body))
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
        # pandas writes the integers of a column with nulls as 3.0. Few bodies have such floats, and
        # only they pay for a look at each value.
        columns = self._by_name(self._decoder_with_floats.decode(body))
        try:
            return {each.name: each.whole(columns[each.name]) for each in self._columns}
        except ValueError as error:
            raise invalid(str(error)) from None

    def _by_name(self, decoded: Any) -> dict[str, list[Any]]:
        fields = zip(self._names, self._fields, strict=True)
        return {name: getattr(decoded, field) for name, field in fields}

    def _explain(self, message: str) -> str:
        if found := re.fullmatch(r"Object missing required field `(.*)`", message, re.DOTALL):
            return missing(found.group(1), self._names)
        if (found := _PLACE.fullmatch(message)) is not None:
            problem, place = found.groups()
            # Names may contain dots and brackets, so the longest name that fits is the column.
            fitting = [name for name in self._names if place.startswith(name)]
            name = max(fitting, key=len, default=None)
            if name is not None:
                indices = re.findall(r"\[(\d+)\]", place[len(name) :])
                where = f", sample {indices[0]}" if indices else ""
                return f"column {name!r}{where}: {problem[0].lower()}{problem[1:]}"
        return f"the body must be an object of columns by name: {message}"


def missing(name: str, names: tuple[str, ...]) -> str:
    """Return the error message for a body without a column that the model reads."""
    return f"the request has no column {name!r}; the model reads {', '.join(map(repr, names))}"


def count_samples(columns: Mapping[str, Any], max_samples: int) -> int:
    """Return the number of samples of a body, which must be equal in all columns."""
    sizes = {name: len(values) for name, values in columns.items()}
    (first, size), *_ = sizes.items() or [("", 0)]
    for name, other in sizes.items():
        if other != size:
            raise invalid(
                f"column {name!r} has {other} samples, but column {first!r} has {size}; give one "
                "value or list for each sample"
            )
    if size > max_samples:
        raise RequestError(
            413, f"the request has {size:,} samples, and the server takes {max_samples:,} at most"
        )
    return size


def encode_json(columns: Mapping[str, np.ndarray | Lists]) -> bytes:
    """Encode scores by column as a JSON body; a number that is not finite becomes null."""
    return msgspec.json.encode({name: _plain(column) for name, column in columns.items()})


def _plain(column: np.ndarray | Lists) -> list[Any]:
    if isinstance(column, Lists):
        offsets = column.offsets.tolist()
        return [column.values[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    return (column if column.dtype.kind in "fiub" else column.astype(np.float32)).tolist()


class ArrowDecoder:
    """Decodes Arrow IPC streams with a column for each column of the model."""

    def __init__(self, columns: InputColumns[Any], max_samples: int) -> None:
        self._columns, self._names = columns.columns, columns.names
        self._max_samples = max_samples

    def decode(self, body: bytes | bytearray) -> Payload:
        """Return the columns of an Arrow body; a RequestError says what is wrong with it."""
        buffer = pa.py_buffer(bytes(body))
        try:
            table = self._read(buffer)
        except (*_DAMAGE, pa.ArrowException) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise invalid(f"the body is not an Arrow IPC stream, or is damaged: {reason}") from None
        return Payload(table, len(table), len(body))

    def _read(self, buffer: pa.Buffer) -> pa.Table:
        # Before PyArrow reads the stream: it would decompress on the way.
        _check_messages(buffer)
        with pa.ipc.open_stream(buffer) as stream:
            schema = stream.schema
            found = schema.names
            for name in self._names:
                if (count := found.count(name)) != 1:
                    raise invalid(
                        f"the request has {count} columns {name!r}"
                        if count
                        else missing(name, self._names)
                    )
            for field in schema:
                _check_type(field)
            batches, rows = [], 0
            for batch in stream:
                rows += len(batch)
                # Counted while reading, since the stream does not say how many batches come.
                if rows > self._max_samples:
                    raise RequestError(
                        413,
                        f"the request has {rows:,} samples or more, and the server takes "
                        f"{self._max_samples:,} at most",
                    )
                batches.append(batch)
        table = pa.Table.from_batches(batches, schema).select(list(self._names))
        # Offsets of lists and strings come from the client, and code below reads by them.
        table.validate(full=True)
        typed = [
            _typed(column, table[column.name]) if _is_untyped(table[column.name].type) else None
            for column in self._columns
        ]
        if any(each is not None for each in typed):
            arrays = [each or table[name] for name, each in zip(self._names, typed, strict=True)]
            table = pa.table(arrays, list(self._names))
        return table


def encode_arrow(columns: Mapping[str, np.ndarray | Lists]) -> bytes:
    """Encode scores by column as an Arrow IPC stream."""
    table = pa.table(
        {
            name: pa.ListArray.from_arrays(column.offsets, as_column(column.values))
            if isinstance(column, Lists)
            else as_column(column)
            for name, column in columns.items()
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


def _check_messages(buffer: pa.Buffer) -> None:
    """Raise a RequestError if a message of a stream is compressed or has dictionaries."""
    # A small body could hold any number of values with either. PyArrow does not say whether a
    # message is compressed, so read that from its flatbuffer.
    for message in pa.ipc.MessageReader.open_stream(buffer):
        metadata = message.metadata.to_pybytes()
        (root,) = struct.unpack_from("<I", metadata)
        header = FlatTable(metadata, root)
        header_type = _header_type(header)
        if header_type == _DICTIONARY_BATCH:
            raise invalid("the body has dictionaries; send plain values")
        if header_type == _RECORD_BATCH:
            batch = FlatTable(metadata, header.Indirect(root + header.Offset(_HEADER)))
            if batch.Offset(_COMPRESSION):
                raise invalid("the body is compressed; send it without compression")


def _header_type(message: FlatTable) -> int:
    offset = message.Offset(_HEADER_TYPE)
    return message.Get(number_types.Uint8Flags, offset + message.Pos) if offset else 0


def _is_untyped(kind: pa.DataType) -> bool:
    return pa.types.is_null(kind) or (pa.types.is_list(kind) and pa.types.is_null(kind.value_type))


def _typed(column: InputColumn, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Cast a column of nulls or empty lists, which has the type null, to the model's type."""
    kind = column.arrow_type or pa.string()
    if column.shape and pa.types.is_null(values.type):
        return values  # each array of the column is null
    if pa.types.is_list(values.type):
        if any(len(chunk.flatten()) for chunk in values.chunks):
            raise invalid(f"column {column.name!r}: a value of a list is null")
        kind = pa.list_(kind)
    return values.cast(kind)


def _check_type(field: pa.Field) -> None:
    kind = field.type
    types = pa.types
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        if types.is_fixed_size_list(kind) and kind.list_size == 0:
            raise invalid(f"column {field.name!r} has lists of the fixed size 0")
        kind = kind.value_type
    plain = (
        _is_untyped(field.type)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_timestamp(kind)
        or types.is_date(kind)
    )
    if not plain:
        raise invalid(
            f"column {field.name!r} is of type {field.type}; send integers, floats, bools, "
            "strings, bytes, times, or lists of these; and fields of structs as columns, such as "
            "user.age"
        )
