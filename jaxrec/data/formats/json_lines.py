"""JSON lines: an object a line, whose fields are columns."""

from __future__ import annotations

import codecs
import io
import pathlib
import re
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from jaxrec.data.files import DataError
from jaxrec.data.formats.base import Format, Types, unpacked
from jaxrec.data.structs import flat_table, with_types

PART_BYTES = 16 << 20

# Bytes of the longest line. Memory holds a line at least, and a file may be one large array.
LINE_BYTES = 256 << 20

_ROW = re.compile(r" in row (\d+)")

_ONE_TYPE = "; write its values in one type, such as all in quotes"

# Text of a time with parts of a second, down to microseconds.
_HOUR = r"([01]\d|2[0-3])"
_FINE_TIME = (
    rf"^\d{{4}}-\d\d-\d\d[T ]{_HOUR}:[0-5]\d(:[0-5]\d(\.\d{{1,6}})?)?(Z|[+-]{_HOUR}(:?[0-5]\d)?)?$"
)

# A whole number that may exceed int64, as a value or in a list.
_LONG = re.compile(rb"[:\[,]\s*-?\d{19,}\s*[,}\]]")


class JsonLines(Format):
    """Objects, one a line, plain or compressed. Fields that an object lacks are missing.

    Columns have the type that fits all values: a pass over the file finds it before another reads
    the values, since a field may come late. Fields whose objects are all empty become null, since
    Parquet has no type for them.
    """

    name = "JSON lines"
    suffixes = (".jsonl", ".ndjson", ".json")

    def may_be_text(self, kind: pa.DataType) -> bool:
        return pa.types.is_timestamp(kind)  # of text that looks like times

    def tables(self, path: pathlib.Path, types: Types, guesses: Types) -> Iterator[pa.Table]:
        schema = None
        times = _FineTimes()
        for table in _parts(path, pa.schema([])):
            schema = table.schema if schema is None else _unified(path, schema, table.schema)
            times.add(flat_table(table))
        if schema is None:
            raise DataError(f"{path} is empty; leave it out, such as by a pattern of the others")
        for table in _parts(path, pa.schema(with_types(schema, {**times.types, **types}))):
            yield _without_empty_objects(table.select(schema.names))


class _FineTimes:
    """Columns of text that are times with parts of a second, which Arrow does not convert."""

    def __init__(self) -> None:
        self._has_times: dict[str, bool] = {}

    def add(self, table: pa.Table) -> None:
        """Look at the values of one more part of the file; a column with other text drops out."""
        for name, column in zip(table.column_names, table.columns, strict=True):
            if pa.types.is_string(column.type) and self._has_times.get(name, True):
                are_times = pc.all(pc.match_substring_regex(column, _FINE_TIME), min_count=1)
                if (has_times := are_times.as_py()) is not None:
                    self._has_times[name] = has_times and _are_dates(column)

    @property
    def types(self) -> Types:
        """Types of such columns, by name."""
        names = [name for name, has_times in self._has_times.items() if has_times]
        return dict.fromkeys(names, pa.timestamp("us"))


def _are_dates(texts: pa.ChunkedArray) -> bool:
    """Return whether texts begin with dates of the calendar, which 2024-02-30 is not."""
    try:
        pc.utf8_slice_codeunits(texts, 0, 10).cast(pa.date32())
    except pa.ArrowInvalid:
        return False
    return True


def _unified(path: pathlib.Path, first: pa.Schema, second: pa.Schema) -> pa.Schema:
    """Return the schema that fits the values of two parts of a file."""
    both = [pa.schema(_as_text(first, second)), pa.schema(_as_text(second, first))]
    try:
        return pa.unify_schemas(both, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(
            f"{path} has values of several types in a field ({error}){_ONE_TYPE}"
        ) from None


def _as_text(fields: Iterable[pa.Field], others: Iterable[pa.Field]) -> list[pa.Field]:
    """Make columns of times text if another part of the file has other words in them."""
    kinds = {field.name: field.type for field in others}
    texts = []
    for field in fields:
        kind, other = field.type, kinds.get(field.name, pa.null())
        if pa.types.is_struct(kind) and pa.types.is_struct(other):
            kind = pa.struct(_as_text(kind, other))
        elif pa.types.is_timestamp(kind) and pa.types.is_string(other):
            kind = pa.string()
        texts.append(field.with_type(kind))
    return texts


def _without_empty_objects(table: pa.Table) -> pa.Table:
    for number, field in enumerate(table.schema):
        if _has_empty_object(field.type):
            nulls = pa.nulls(len(table))
            table = table.set_column(number, pa.field(field.name, nulls.type), nulls)
    return table


def _has_empty_object(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return not kind.num_fields or any(_has_empty_object(field.type) for field in kind)
    return pa.types.is_list(kind) and _has_empty_object(kind.value_type)


def _parts(path: pathlib.Path, schema: pa.Schema) -> Iterator[pa.Table]:
    """Parse a file in parts; fields of ``schema`` have its types."""
    options = pyarrow.json.ParseOptions(explicit_schema=schema)
    first, rest = 1, b""
    try:
        with unpacked(path) as stream:
            while part := stream.read(PART_BYTES):
                if first == 1 and not rest:
                    part = part.removeprefix(codecs.BOM_UTF8)
                whole, end, rest = (rest + part).rpartition(b"\n")
                if end:
                    yield _parsed(whole + end, options, path, first)
                    first += whole.count(b"\n") + 1
                if len(rest) > LINE_BYTES:
                    raise DataError(
                        f"{path}, line {first} is longer than {LINE_BYTES:,} bytes{_advice(rest)}"
                    )
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
        table = pyarrow.json.read_json(io.BytesIO(text), read, options)
    except pa.ArrowException as error:
        row = _ROW.search(str(error))
        line = f", from line {first} on"
        if row is not None:
            # Arrow does not count blank lines.
            lines = [n for n, each in enumerate(text.split(b"\n"), first) if each.strip()]
            line = f", line {lines[min(int(row[1]), len(lines) - 1)]}"
        problem = _ROW.sub("", str(error))
        raise DataError(f"{path}{line}: {problem}{_advice(text, problem)}") from None
    check_digits(table, text, path, first)
    return table


def check_digits(table: pa.Table, text: bytes, path: pathlib.Path | str, first: int) -> None:
    """Raise an error if a whole number beyond int64 became a float, which has fewer digits."""
    table = flat_table(table)
    for name in table.column_names:
        column = table[name]
        if pa.types.is_list(column.type):
            column = pc.list_flatten(column)
        if not pa.types.is_floating(column.type) or not len(column):
            continue
        largest = pc.max(pc.abs(column)).as_py()
        if largest is not None and largest >= 2**63 and (long := _LONG.search(text)):
            line = first + text.count(b"\n", 0, long.start())
            raise DataError(
                f"{path}, line {line}, field {name!r}: a whole number beyond int64 would lose "
                "digits; write it in quotes"
            )


def _advice(text: bytes, problem: str = "") -> str:
    if text[:100].lstrip()[:1] == b"[":
        return "; the file is one array: write each of its objects on a line of its own"
    if "changed from" in problem or "Failed to convert" in problem:
        return _ONE_TYPE
    return "; each line holds one whole object"
