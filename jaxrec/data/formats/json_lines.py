"""JSON lines: an object a line, whose fields are columns."""

from __future__ import annotations

import io
import pathlib
import re
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.json

from jaxrec.data.files import DataError
from jaxrec.data.formats.base import Format, Types

PART_BYTES = 16 << 20

_ROW = re.compile(r" in row (\d+)")


class JsonLines(Format):
    """Objects, one a line, plain or compressed. Fields that an object lacks are missing.

    Columns have the type that fits all values: a pass over the file finds it before another reads
    the values, since a field may come late.
    """

    name = "JSON lines"
    suffixes = (".jsonl", ".ndjson", ".json")

    def tables(self, path: pathlib.Path, types: Types) -> Iterator[pa.Table]:
        schema = pa.schema([])
        for table in _parts(path, pa.schema(types.items())):
            try:
                schema = pa.unify_schemas([schema, table.schema], promote_options="permissive")
            except pa.ArrowException as error:
                raise DataError(f"{path} has values of several types in a field: {error}") from None
        for table in _parts(path, schema):
            yield table.select(schema.names)


def _parts(path: pathlib.Path, schema: pa.Schema) -> Iterator[pa.Table]:
    """Parse a file in parts; fields of ``schema`` have its types."""
    options = pyarrow.json.ParseOptions(explicit_schema=schema)
    first, rest = 1, b""
    try:
        with pa.input_stream(path, compression="detect") as stream:
            while part := stream.read(PART_BYTES):
                whole, end, rest = (rest + part).rpartition(b"\n")
                if end:
                    yield _parsed(whole + end, options, path, first)
                    first += whole.count(b"\n") + 1
    except OSError as error:
        if error.errno is not None:
            raise
        raise DataError(f"{path} is damaged ({error})") from None
    if rest.strip():
        yield _parsed(rest, options, path, first)


def _parsed(
    text: bytes, options: pyarrow.json.ParseOptions, path: pathlib.Path, first: int
) -> pa.Table:
    read = pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    try:
        return pyarrow.json.read_json(io.BytesIO(text), read, options)
    except pa.ArrowException as error:
        row = _ROW.search(str(error))
        line = f", line {first + int(row[1])}" if row else f", from line {first} on"
        hint = ""
        if text.lstrip()[:1] == b"[":
            hint = "; the file is one array: write each of its objects on a line of its own"
        raise DataError(f"{path}{line}: {_ROW.sub('', str(error))}{hint}") from None
