"""CSV, TSV and their relatives: lines of fields under a header, plain or compressed.

`pyarrow.csv` parses them, in parts and with one thread, so that its messages number the lines.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from jaxrec.data.files import DataError
from jaxrec.data.formats.base import Format, Types, WiderTypeError, unpacked

# Bytes of a part, the first of which decides the types of the columns.
PART_BYTES = 16 << 20

# Bytes of the longest line of names.
_HEADER_BYTES = 1 << 20

# Bytes that are searched for codes with leading zeros before the rest is read, and bytes of the
# rest that are compared at once: they stay in the processor's cache.
_SAMPLE_BYTES = 1 << 20
_SCAN_BYTES = 1 << 18

_SIGNS = np.frombuffer(b"+-", np.uint8)

SEPARATORS = "\t,;|"

# A whole number, and the text of a quoted name.
_WHOLE = re.compile(r"[-+]?[0-9]+")
_QUOTED = re.compile(r'"[^"]*"')

# Name that pandas gives an index without a name in Parquet files.
_INDEX = "__index_level_0__"

# Line by which Excel learns the separator.
_SEPARATOR_LINE = re.compile(r'"?sep=.?"?', re.IGNORECASE)

_BAD_VALUE = re.compile(
    r"In CSV column #(?P<column>\d+): (Row #(?P<row>\d+): )?CSV conversion error to "
    r"(?P<kind>[^:]+): invalid value '(?P<value>.*)'",
    re.DOTALL,
)
_COLUMN = re.compile(r"In CSV column #(\d+)")
_ROW = re.compile(r"Row #(\d+): ")


class Delimited(Format):
    """Lines of fields, separated by tabs, commas, semicolons or bars, under a line of names.

    A field in double quotes may hold separators, line ends and doubled quotes. An empty field is
    missing.
    """

    name = "CSV"
    suffixes = (".csv", ".tsv", ".tab", ".psv")
    guesses_types = True

    def may_be_text(self, kind: pa.DataType) -> bool:
        # Codes may look like integers in some files. Text beside floats is rather a bad value.
        return pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_temporal(kind)

    def tables(self, path: pathlib.Path, types: Types, guesses: Types) -> Iterator[pa.Table]:
        header, separator = _header(path)
        names = _names(path, header, separator)
        shown = _with_index(names)
        known = {name: kind for name, kind in {**guesses, **types}.items() if name in names}
        part = None
        try:
            with unpacked(path) as stream:
                reader = _reader(stream, separator, column_types=known)
                # A file may have names and no rows.
                yield reader.schema.empty_table().rename_columns(shown)
                for batch in reader:
                    if part is None:
                        _check_digits(path, batch, separator, known)
                        _check_zeros(path, batch.schema, separator, types, sample=True)
                    part = pa.Table.from_batches([batch])
                    yield _without_empty_texts(path, part).rename_columns(shown)
            if part is not None:
                _check_last_quote(path, part)
                _check_zeros(path, part.schema, separator, types)
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise _explained(error, path, names, types, separator) from None


def _reader(
    stream: pa.NativeFile, separator: str, part_bytes: int | None = None, **convert: Any
) -> pyarrow.csv.CSVStreamingReader:
    return pyarrow.csv.open_csv(
        stream,
        pyarrow.csv.ReadOptions(use_threads=False, block_size=part_bytes or PART_BYTES),
        pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        pyarrow.csv.ConvertOptions(**convert),
    )


def _header(path: pathlib.Path) -> tuple[str, str]:
    """Return the first line of a file, and the separator of its fields."""
    try:
        with unpacked(path) as stream:
            start = stream.read(_HEADER_BYTES)
    except OSError as error:
        if error.errno is not None:
            raise
        raise DataError(f"{path} is damaged ({error})") from None
    if start.startswith(b"\x1f\x8b"):
        raise DataError(f"{path} is compressed by gzip; name it {path.name}.gz")
    try:
        line = re.split(rb"[\r\n]", start, maxsplit=1)[0].decode("utf-8-sig")
    except UnicodeDecodeError:
        is_wide = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise _no_utf8(path, "line 1", "UTF-16" if is_wide else "LATIN1") from None
    if not start:
        raise DataError(f"{path} is empty; leave it out, such as by a pattern of the others")
    if not line.strip():
        raise DataError(f"{path}, line 1 is empty; the first line has the names of the columns")
    if _SEPARATOR_LINE.fullmatch(line):
        raise DataError(f"{path}, line 1 is {line!r}, which is for Excel; remove the line")
    if line.count('"') % 2:
        raise DataError(
            f"{path}, line 1 has a quote that is not closed: {line[:80]!r}; names are on one line"
        )
    bare = _QUOTED.sub("", line)
    separator = max(SEPARATORS, key=bare.count)
    return line, separator if separator in bare else ","


def _with_index(names: list[str]) -> list[str]:
    """Name a first column without a name, the index of a pandas data frame, as pandas does."""
    return [name or _INDEX for name in names[:1]] + names[1:]


def _names(path: pathlib.Path, header: str, separator: str) -> list[str]:
    """Return the names of the columns, and refuse a first line that has none."""
    options = pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    try:
        names = pyarrow.csv.read_csv(
            pa.BufferReader(header.encode() + b"\n"), parse_options=options
        ).column_names
    except pa.ArrowException as error:
        raise DataError(f"{path}, line 1 does not name the columns ({error})") from None
    for name in names:
        if names.count(name) > 1:
            raise DataError(
                f"{path}, line 1 names {names.count(name)} columns {name!r}; give each a name of "
                "its own"
            )
        if not name and name != names[0]:
            raise DataError(f"{path}, line 1 has a column without a name: {header[:80]!r}")
    if all(_is_number(name) for name in names):
        raise DataError(
            f"{path}, line 1 has numbers and no names of columns: {header[:80]!r}; put a line of "
            "names before it"
        )
    return names


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _without_empty_texts(path: pathlib.Path, table: pa.Table) -> pa.Table:
    for number, field in enumerate(table.schema):
        column = table.column(number)
        if pa.types.is_binary(field.type):
            # pyarrow takes a column for bytes where it is no UTF-8.
            raise _no_utf8(path, f"column {field.name!r}")
        if pa.types.is_string(field.type):
            missing = pc.equal(column, "")
            if pc.any(missing).as_py():  # a copy costs more than looking
                table = table.set_column(number, field, pc.if_else(missing, None, column))
    return table


def _no_utf8(path: pathlib.Path, place: str, encoding: str = "LATIN1") -> DataError:
    return DataError(
        f"{path}, {place} is not UTF-8 text; convert the file, such as by iconv -f {encoding} "
        "-t UTF-8"
    )


def _check_digits(path: pathlib.Path, batch: pa.RecordBatch, separator: str, known: Types) -> None:
    """Raise a WiderTypeError if whole numbers beyond int64 became floats, which have fewer digits.

    Such numbers are ids, often hashes, of which two would become one.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name in known or not pa.types.is_floating(column.type):
            continue
        largest = pc.max(pc.abs(column)).as_py()
        if largest is None or largest < 2**63:
            continue
        with unpacked(path) as stream:
            options: dict[str, Any] = {
                "include_columns": [name],
                "column_types": {name: pa.string()},
            }
            texts = _reader(stream, separator, **options).read_next_batch().column(0)
        values = texts.filter(pc.is_valid(column))
        if pc.all(pc.match_substring_regex(values, f"^{_WHOLE.pattern}$")).as_py():
            raise WiderTypeError(name, pa.string())


def _check_zeros(
    path: pathlib.Path, columns: pa.Schema, separator: str, types: Types, *, sample: bool = False
) -> None:
    """Raise a WiderTypeError if codes with leading zeros became integers: 00501 is not 501.

    The columns of guessed integers are read again, as text. A ``sample`` of the file is enough for
    most files of codes, which then need not be read to their end in vain.
    """
    names = [x.name for x in columns if x.name not in types and pa.types.is_integer(x.type)]
    if not names or not (sample or _may_have_zeros(path, separator)):
        return
    options: dict[str, Any] = {
        "include_columns": names,
        "column_types": dict.fromkeys(names, pa.string()),
    }
    try:
        with unpacked(path) as stream:
            reader = _reader(stream, separator, _SAMPLE_BYTES if sample else None, **options)
            for texts in itertools.islice(reader, 1 if sample else None):
                for name, column in zip(names, texts.columns, strict=True):
                    if pc.any(pc.match_substring_regex(column, "^[-+]?0[0-9]")).as_py():
                        raise WiderTypeError(name, pa.string())
    except pa.ArrowInvalid:
        if not sample:  # a row may be longer than the sample
            raise


def _may_have_zeros(path: pathlib.Path, separator: str) -> bool:
    """Return whether some field of a file begins with a zero and another digit."""
    # Comparing the bytes is ten times as fast as parsing them again, and most files have no such
    # field.
    starts = np.frombuffer(f'{separator}\n\r"'.encode(), np.uint8)
    zero = np.uint8(ord("0"))
    with unpacked(path) as stream:
        rest = b"\n"
        while part := stream.read(_SCAN_BYTES):
            data = np.frombuffer(rest + part, np.uint8)
            rest = data[-3:].tobytes()
            # The digits are the ten bytes from "0" on; smaller bytes wrap around. A code follows
            # the start of a field or a sign, which letters and digits are not: few places are left.
            before = data[:-2]
            is_code = (data[1:-1] == zero) & (data[2:] - zero < 10)
            is_code &= (before < zero) | (before == starts[0])
            places = np.flatnonzero(is_code)
            has_sign = np.isin(before[places], _SIGNS)
            # A sign in the first place was looked at before, with the byte before it.
            if np.isin(data[np.maximum(places - has_sign, 0)], starts).any():
                return True
    return False


def _check_last_quote(path: pathlib.Path, part: pa.Table) -> None:
    """Raise an error if the last value has no closing quote: the rest of the file is in it."""
    column = part.column(part.num_columns - 1)
    if not len(column) or not pa.types.is_string(column.type):
        return
    value = column[-1].as_py() or ""
    # A line end is in quotes, and the last value's closing quote ends the file.
    if "\n" not in value:
        return
    end = b""
    with unpacked(path) as stream:
        while more := stream.read(1 << 20):
            end = (end + more).rstrip(b"\r\n")[-1:]
    if end != b'"':
        raise DataError(
            f"{path}, column {part.column_names[-1]!r}: the value that begins with "
            f"{value[:40]!r} has no closing quote, and holds the rest of the file; close it"
        )


def _line(path: pathlib.Path, record: int, separator: str) -> int:
    """Return the line that a record begins at; the names are record 1.

    Arrow counts records, without blank lines. This reads the file again, for an error alone.
    """
    count = end = 0
    with unpacked(path) as stream, io.TextIOWrapper(stream, "utf-8", "replace", "") as text:
        reader = csv.reader(text, delimiter=separator)
        with contextlib.suppress(csv.Error):
            for fields in reader:
                count += bool(fields)
                if count == record:
                    return end + 1
                end = reader.line_num
    return record


def _wider(kind: str, value: str) -> pa.DataType | None:
    """Return the type of a column that was guessed as ``kind`` and has this value, too.

    None: it may be a mistake in the file, and the user decides.
    """
    is_whole = _WHOLE.fullmatch(value) is not None
    if kind == "null":
        if is_whole:
            return pa.int64()
        return pa.float64() if _is_number(value) else pa.string()
    if kind == "int64":
        # A float has fewer digits than a whole number beyond int64.
        if is_whole:
            return pa.string()
        # Other text may be ids that only looked like numbers at first, or a mistake.
        return pa.float64() if _is_number(value) else None
    return None


def _explained(
    error: Exception, path: pathlib.Path, names: list[str], types: Types, separator: str
) -> DataError | WiderTypeError:
    """Return an error that names line and column, or the type that a column needs."""
    text = " ".join(str(error).split())
    if "straddling" in text:
        return DataError(
            f"{path} has a row of more than {PART_BYTES:,} bytes; a quote may not be closed"
        )
    if "invalid UTF8" in text and (column := _COLUMN.search(text)) is not None:
        return _no_utf8(path, f"column {names[int(column[1])]!r}")
    if (bad := _BAD_VALUE.search(str(error))) is None:
        row = _ROW.search(text)
        place = path if row is None else f"{path}, line {_line(path, int(row[1]), separator)}"
        return DataError(f"{place}: {_ROW.sub('', text).removeprefix('CSV parse error: ')}")
    name, value = names[int(bad["column"])], bad["value"]
    if name not in types and (wider := _wider(bad["kind"], value)) is not None:
        return WiderTypeError(name, wider)
    line = f", line {_line(path, int(bad['row']), separator)}" if bad["row"] else ""
    problem = f"{path}{line}, column {name!r}: {value[:80]!r} is no {bad['kind']}"
    if name in types:
        return DataError(f"{problem}, the type that was given; correct it, or give another type")
    return DataError(
        f"{problem}, the type of the values before it; correct it, or give the column's type by "
        f"--data.types {name}=string"
    )
