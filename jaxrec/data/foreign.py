"""Files in formats that jaxrec does not read: which format it is, and how to convert it."""

from __future__ import annotations

import gzip
import json
import pathlib
import re
import zlib

from jaxrec.data.files import is_compressed
from jaxrec.data.transforms import COLUMNS

# Numbers of bytes and lines from which the format of a file is told.
_BYTES, _LINES = 1 << 16, 20

_READS = "jaxrec train reads Parquet files"

_UNPACK = "unpack it, or compress it by gzip"


def _command(imports: str, code: str) -> str:
    return f"{_READS}: python -c 'import {imports}; {code}'"


_EXCEL = (
    "an Excel file",
    _command("pandas", 'pandas.read_excel("{file}").to_parquet("{output}")'),
)
_ARRAYS = (
    _command(
        "pyarrow, pyarrow.parquet",
        'pyarrow.parquet.write_table(pyarrow.table({{name: array, ...}}), "{output}")',
    )
    + " makes columns of arrays"
)
_PICKLE = (
    "a pickle",
    _command("pandas", 'pandas.read_pickle("{file}").to_parquet("{output}")')
    + ", if you trust who made it",
)

# By first bytes the format and what to do, with {file}, {output} and the name that {arrow} tells.
_MAGIC = {
    b"PK\x03\x04": ("a zip archive", "unpack it, and name the files in it"),
    b"\x93NUMPY": ("an array of NumPy", _ARRAYS),
    b"ARROW1": ("an Arrow (Feather) file", "{arrow}"),
    b"\xff\xff\xff\xff": ("an Arrow stream", "{arrow}"),
    b"ORC": (
        "an ORC file",
        _command(
            "pyarrow.orc, pyarrow.parquet",
            'pyarrow.parquet.write_table(pyarrow.orc.read_table("{file}"), "{output}")',
        ),
    ),
    b"Obj\x01": (
        "an Avro file",
        _command("polars", 'polars.read_avro("{file}").write_parquet("{output}")'),
    ),
    b"\x89HDF": (
        "an HDF5 file",
        _command("pandas", 'pandas.read_hdf("{file}").to_parquet("{output}")'),
    ),
    b"\xd0\xcf\x11\xe0": _EXCEL,
    b"SQLite format 3": (
        "an SQLite database",
        _command(
            "pandas, sqlite3",
            'pandas.read_sql("SELECT * FROM TABLE", sqlite3.connect("{file}"))'
            '.to_parquet("{output}")',
        ),
    ),
    **dict.fromkeys((bytes([0x80, protocol]) for protocol in range(2, 6)), _PICKLE),
    b"BZh": ("a file compressed by bzip2", _UNPACK),
    b"\xfd7zXZ": ("a file compressed by xz", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("a file compressed by zstd", _UNPACK),
    b"PARE": ("an encrypted Parquet file", "write it without encryption"),
}

# Formats that are zip archives, by the ends of their names.
_ZIPPED = {
    ".npz": ("an .npz archive", _ARRAYS),
    ".xlsx": _EXCEL,
    ".xlsm": _EXCEL,
}
_SEPARATORS = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}

# A field of a RecBole header, "user_id:token", and a line of libsvm's or libffm's format.
_RECBOLE = re.compile(r"[^\t:]+:(token|float|token_seq|float_seq)")
_LIBSVM = re.compile(r"[-+]?[\d.]+( \d+:\S+)+")


def foreign_format(path: pathlib.Path) -> str | None:
    """Return why a file is not text in Criteo's format; None if it may be.

    The text follows the file's name in an error. It names the file's format, and how to convert it.
    """
    with path.open("rb") as file:
        start = file.read(_BYTES)
    for magic, (kind, advice) in _MAGIC.items():
        if start.startswith(magic):
            if kind == "a zip archive":
                kind, advice = _ZIPPED.get(path.suffix.lower(), (kind, advice))
            output = path.with_suffix(".parquet")
            arrow = _named(path, ".arrow")
            return f"is {kind}; {advice.format(file=path, output=output, arrow=arrow)}"
    if _is_tfrecord(start, path.stat().st_size):
        return (
            f"holds TFRecords; {_READS}: parse the records with tf.data, and write their columns "
            "by pyarrow.parquet.write_table"
        )
    if start.startswith(b"\x1f\x8b"):
        try:
            with path.open("rb") as file, gzip.open(file) as unpacked:
                start = unpacked.read(_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return None  # the error of reading the file says where it is damaged
    if b"\0" in start:
        return f"is not text; {_READS}, which pyarrow.parquet.write_table writes"
    lines = start.decode(errors="replace").splitlines()[:_LINES] or [""]
    # One good line is enough: the conversion then names the lines that are not.
    if any(line.count("\t") == COLUMNS - 1 for line in lines):
        return None
    return _text(path, lines)


def _is_tfrecord(start: bytes, size: int) -> bool:
    """Return whether a file of ``size`` bytes begins with TFRecords, given its first bytes."""
    # TFRecords have no magic bytes: look for one or two records of plausible lengths.
    position = 0
    for _ in range(2):
        if position == size or position + 12 > len(start):
            break
        # Length of 8 bytes and its checksum, the record, its checksum.
        length = int.from_bytes(start[position : position + 8], "little")
        position += 16 + length
        if not 0 < length < 1 << 32 or position > size:
            return False
    return position > 0


def _text(path: pathlib.Path, lines: list[str]) -> str | None:
    first = lines[0]
    if _is_json(lines):
        return f"is JSON; {_named(path, '.jsonl')}, of one object a line"
    if _LIBSVM.fullmatch(first):
        return f"has lines of libsvm's format; {_READS}, with a column for each field"
    separator = max(_SEPARATORS, key=first.count)
    if not first.count(separator):
        if ".csv" not in path.suffixes:
            return None
        separator = ","
    fields = first.split(separator)
    if all(_RECBOLE.fullmatch(field) for field in fields):
        options = f"pyarrow.csv.ParseOptions(delimiter={json.dumps(separator)})"
        return (
            f"is a file of RecBole, of {', '.join(fields)}; {_READS} with a column of labels, 0 or "
            f'1: add one to pyarrow.csv.read_csv("{path}", parse_options={options}), and write '
            "that by pyarrow.parquet.write_table"
        )
    shown = ", ".join(fields[:5]) + (", ..." if len(fields) > 5 else "")
    columns = f"{len(fields)} columns separated by {_SEPARATORS[separator]} ({shown})"
    # Only lines with tabs may be meant to be Criteo's.
    if separator == "\t":
        return f"has {columns}, and Criteo's format has {COLUMNS}; {_named(path, '.tsv')}"
    return f"is CSV: {columns}; {_named(path, '.csv')}"


def _named(path: pathlib.Path, suffix: str) -> str:
    """Return the advice to give a file the name of its format and compression."""
    plain = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    name = plain.with_suffix(suffix).name + (".gz" if is_compressed(path) else "")
    return f"name it {name}, as jaxrec knows formats by names"


def _is_json(lines: list[str]) -> bool:
    first = lines[0].lstrip()
    if first.startswith("{"):
        try:
            return isinstance(json.loads(first), dict)
        except ValueError:
            return len(lines) > 1
    return first.startswith("[")
