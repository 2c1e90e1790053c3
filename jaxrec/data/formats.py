"""Recognition of other formats of data by a file's first bytes."""

from __future__ import annotations

import gzip
import json
import pathlib
import re
import zlib

from jaxrec.data.files import is_compressed
from jaxrec.data.transforms import COLUMNS

# Bytes that are looked at, and lines among them.
_BYTES, _LINES = 1 << 16, 20

# First bytes of formats that are not text.
_MAGIC = {
    b"PK\x03\x04": "a zip archive",
    b"\x93NUMPY": "an array of NumPy",
    b"ARROW1": "an Arrow (Feather) file",
    b"\xff\xff\xff\xff": "an Arrow stream",
    b"ORC": "an ORC file",
    b"Obj\x01": "an Avro file",
    b"\x89HDF": "an HDF5 file",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"BZh": "a file compressed by bzip2",
    b"\xfd7zXZ": "a file compressed by xz",
    b"\x28\xb5\x2f\xfd": "a file compressed by zstd",
    b"SQLite format 3": "an SQLite database",
    b"PARE": "an encrypted Parquet file",
}
_SEPARATORS = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}

# A field of a header of RecBole, "user_id:token", and a line of libsvm's and libffm's formats.
_RECBOLE = re.compile(r"[^\t:]+:(token|float|token_seq|float_seq)")
_LIBSVM = re.compile(r"[-+]?[\d.]+( \d+:\S+)+")

_READS = "jaxrec train reads Parquet files"


def foreign_format(path: pathlib.Path) -> str | None:
    """Return what a file is, and what to do; None: it may be text in Criteo's format.

    Args:
        path: A file that is no Parquet file, plain or gzip.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(_BYTES)
    for magic, kind in _MAGIC.items():
        if start.startswith(magic):
            return _binary(path, "an .npz archive" if path.suffix == ".npz" else kind)
    if _is_tfrecord(start, path.stat().st_size):
        return (
            f"holds TFRecords; {_READS}: parse the records with tf.data, and write their columns "
            "by pyarrow.parquet.write_table"
        )
    if is_compressed(path):
        try:
            with gzip.open(path) as unpacked:
                start = unpacked.read(_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return None  # reading says where it is damaged
    if b"\0" in start:
        return f"is not text; {_READS}, which pyarrow.parquet.write_table writes"
    # The last line may go on.
    lines = start.decode(errors="replace").splitlines()[:_LINES] or [""]
    if any(line.count("\t") == COLUMNS - 1 for line in lines):
        return None
    return _text(path, lines)


def _binary(path: pathlib.Path, kind: str) -> str:
    if "compressed" in kind:
        return f"is {kind}; unpack it, or compress it by gzip"
    if "NumPy" in kind or "npz" in kind:
        columns = "pyarrow.table({name: array, ...})"
        return f"is {kind}; {_READS}: {_write(path, columns)} makes columns of arrays"
    return f"is {kind}; {_READS}, such as {path.with_suffix('.parquet')}"


def _is_tfrecord(start: bytes, size: int) -> bool:
    """Return whether bytes begin with the length of a record that the file holds, twice."""
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
        table = f'pyarrow.json.read_json("{path}")'
        return f"is JSON; {_READS}: {_write(path, table)} writes one, of one object a line"
    if _LIBSVM.fullmatch(first):
        return f"has lines of libsvm's format; {_READS}, with a column for each field"
    separator = max(_SEPARATORS, key=first.count)
    if not first.count(separator):
        return None
    fields = first.split(separator)
    options = f", parse_options=pyarrow.csv.ParseOptions(delimiter={json.dumps(separator)})"
    table = f'pyarrow.csv.read_csv("{path}"{"" if separator == "," else options})'
    if all(_RECBOLE.fullmatch(field) for field in fields):
        return (
            f"is a file of RecBole, of {', '.join(fields)}; {_READS} with a column of labels, 0 or "
            f"1: add one to {table}, and write that by pyarrow.parquet.write_table"
        )
    return (
        f"has {len(fields)} columns separated by {_SEPARATORS[separator]} "
        f"({', '.join(fields[:5])}{', ...' if len(fields) > 5 else ''}), and Criteo's format has "
        f"{COLUMNS} separated by tabs; {_READS}: {_write(path, table)} writes one"
    )


def _write(path: pathlib.Path, table: str) -> str:
    """Return a command that writes a table."""
    modules = [name for name in ("pyarrow.csv", "pyarrow.json") if name in table]
    output = path.with_suffix(".parquet")
    return (
        f"python -c 'import {', '.join(['pyarrow', *modules, 'pyarrow.parquet'])}; "
        f'pyarrow.parquet.write_table({table}, "{output}")\''
    )


def _is_json(lines: list[str]) -> bool:
    first = lines[0].lstrip()
    if first.startswith("{"):
        try:
            return isinstance(json.loads(first), dict)
        except ValueError:
            return len(lines) > 1
    return first.startswith("[")
