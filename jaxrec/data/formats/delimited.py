"""CSV, TSV and their relatives: lines of fields under a header, plain or compressed.

`pyarrow.csv` parses them, in parts and with one thread, so that its messages number the lines.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from jaxrec.data.files import DataError
from jaxrec.data.formats.base import Format, Types, WiderTypeError

# Bytes of a part, the first of which decides the types of the columns.
PART_BYTES = 16 << 20

SEPARATORS = "\t,;|"

_BAD_VALUE = re.compile(
    r"In CSV column #(?P<column>\d+): (Row #(?P<row>\d+): )?CSV conversion error to "
    r"(?P<kind>[^:]+): invalid value '(?P<value>.*)'",
    re.DOTALL,
)
_ROW = re.compile(r"Row #(\d+): ")


class Delimited(Format):
    """Lines of fields, separated by tabs, commas, semicolons or bars, under a line of names.

    A field in double quotes may hold separators, line ends and doubled quotes. An empty field is
    missing.
    """

    name = "CSV"
    suffixes = (".csv", ".tsv", ".tab", ".psv")
    guesses_types = True

    def tables(self, path: pathlib.Path, types: Types) -> Iterator[pa.Table]:
        header, separator = _header(path)
        names = _names(path, header, separator)
        types = {name: kind for name, kind in types.items() if name in names}
        try:
            with pa.input_stream(path, compression="detect") as stream:
                reader = pyarrow.csv.open_csv(
                    stream,
                    pyarrow.csv.ReadOptions(use_threads=False, block_size=PART_BYTES),
                    pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
                    pyarrow.csv.ConvertOptions(column_types=types),
                )
                for part in reader:
                    yield _without_empty_texts(path, pa.Table.from_batches([part]))
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise _explained(error, path, names, types) from None


def _header(path: pathlib.Path) -> tuple[str, str]:
    """Return the first line of a file, and the separator of its fields."""
    try:
        with pa.input_stream(path, compression="detect") as stream:
            start = stream.read(1 << 16)
    except OSError as error:
        if error.errno is not None:
            raise
        raise DataError(f"{path} is damaged ({error})") from None
    line = start.decode("utf-8-sig", errors="replace").partition("\n")[0].rstrip("\r")
    if not line.strip():
        raise DataError(f"{path}, line 1 is empty; the first line has the names of the columns")
    return line, max(SEPARATORS, key=line.count) if len(line) > 1 else ","


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
            raise DataError(f"{path}, line 1 names {names.count(name)} columns {name!r}")
        if not name:
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
            raise DataError(
                f"{path}, column {field.name!r} is not UTF-8 text; convert the file, such as by "
                "iconv -f LATIN1 -t UTF-8"
            )
        if pa.types.is_string(field.type):
            missing = pc.equal(column, "")
            table = table.set_column(number, field, pc.if_else(missing, None, column))
    return table


def _explained(
    error: Exception, path: pathlib.Path, names: list[str], types: Types
) -> DataError | WiderTypeError:
    """Return an error that names line and column, or the type that a column needs."""
    text = " ".join(str(error).split())
    if (bad := _BAD_VALUE.search(str(error))) is None:
        row = _ROW.search(text)
        place = path if row is None else f"{path}, line {row[1]}"
        return DataError(f"{place}: {_ROW.sub('', text).removeprefix('CSV parse error: ')}")
    name, value = names[int(bad["column"])], bad["value"]
    if name not in types:
        # The first part decided the type. Numbers may go on as floats; other values may be ids that
        # only look like numbers at first, or mistakes: the user knows.
        if bad["kind"] == "int64" and _is_number(value):
            return WiderTypeError(name, pa.float64())
        if bad["kind"] == "null":
            return WiderTypeError(name, pa.float64() if _is_number(value) else pa.string())
    place = f"{path}, line {bad['row']}, column {name!r}" if bad["row"] else f"{path}, {name!r}"
    return DataError(
        f"{place}: {value!r} is no {bad['kind']}, the type of the values before it; correct it, or "
        f"give the column's type by --data.types {name}=string"
    )
