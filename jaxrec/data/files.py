"""The files of a data set: finding them by a path, and naming formats that are not read.

A path is one file, a directory, or a pattern such as ``parts/*.parquet``. Directories named
``key=value``, as Spark, Dask, polars and DuckDB write them, become columns.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import pathlib
import re
import urllib.parse
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from jaxrec.data.transforms import COLUMNS

# Ends of the names of Parquet files; pandas' documentation has examples named df.parquet.gzip.
_NAME = re.compile(r"\.(parquet|parq|pq)(\.(brotli|gzip|lz4|snappy|zstd))?$", re.IGNORECASE)

# Directories of table formats. Their logs list the files of the current version: reading all files
# would read deleted rows, too.
_LOGS = {"_delta_log": "a Delta table", ".hoodie": "a Hudi table"}

# Hive's name of the directory of rows without a key.
_NO_KEY = "__HIVE_DEFAULT_PARTITION__"

# Up to 18 digits, which always fit int64.
_INTEGER = re.compile(r"-?[0-9]{1,18}")


class DataError(ValueError):
    """A file is malformed; the message names the file, the line or row, and the problem."""


class DataFiles(NamedTuple):
    """The files of a data set, in natural order.

    Directories named ``key=value`` are columns only below ``root``, which the user named.

    Attributes:
        root: Directory that all files are in.
        paths: The files.
        sources: The user's files that ``paths`` were converted from; (): they are the user's own.
    """

    root: pathlib.Path
    paths: tuple[pathlib.Path, ...]
    sources: tuple[pathlib.Path, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the columns of directories ``key=value`` below the root."""
        names = (name for path in self.paths for name in keys_of(path.relative_to(self.root)))
        return tuple(dict.fromkeys(names))


def natural_order(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Sort paths by the numbers in their names: ``day_2`` comes before ``day_10``."""

    def key(path: pathlib.Path) -> tuple[Any, str]:
        # Numbers of up to 20 digits, padded with zeros, sort as text.
        parts = [[(not w.isdecimal(), w.zfill(20)) for w in _words(part)] for part in path.parts]
        # The path itself decides between part.1 and part.01, so that all processes agree.
        return parts, str(path)

    return sorted(paths, key=key)


def _words(name: str) -> list[str]:
    digits = "".join(c if c.isdecimal() else f"\0{c}\0" for c in name)
    return [word for word in digits.split("\0") if word]


def is_compressed(path: pathlib.Path) -> bool:
    """Return whether a file begins with gzip's magic bytes."""
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


def has_pattern(path: pathlib.Path) -> bool:
    """Return whether a path is a pattern; a file that exists may have ``[1]`` in its name."""
    return glob.has_magic(str(path)) and not path.exists()


def is_parquet_name(name: str) -> bool:
    """Return whether a file's name ends as those of Parquet files do."""
    return _NAME.search(name) is not None


def parquet_files(path: str | os.PathLike[str]) -> DataFiles:
    """Find the Parquet files of a file, a directory or a pattern of these, in natural order."""
    return data_files(path, is_parquet_name, "Parquet")


def data_files(
    path: str | os.PathLike[str], matches: Callable[[str], Any], kind: str = "data"
) -> DataFiles:
    """Find the files of a file, a directory or a pattern of these, in natural order.

    ``matches`` says of the name of a file whether it belongs to the data set. ``kind`` names such
    files in errors. A single file counts whatever its name is.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        return DataFiles(path, _of_directory(path, matches, kind))
    if not has_pattern(path):
        return DataFiles(path.parent, (path,))
    fixed = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
    root = pathlib.Path(*path.parts[:fixed])
    found = [pathlib.Path(match) for match in glob.glob(str(path), recursive=True)]
    files = {match for match in found if match.is_file() and matches(match.name)}
    for directory in [match for match in found if match.is_dir()]:
        # A directory without such files is fine here: `parts/*` may match one of logs, too.
        files.update(_walk(directory, matches))
    if not files:
        raise DataError(f"{path}: no {kind} file matches this pattern")
    return DataFiles(root, tuple(natural_order(files)))


def _of_directory(
    directory: pathlib.Path, matches: Callable[[str], Any], kind: str
) -> tuple[pathlib.Path, ...]:
    for name, table in _LOGS.items():
        if (directory / name).is_dir():
            raise DataError(
                f"{directory} is {table}, whose log says which of its files count; write its rows "
                "to Parquet files in another directory"
            )
    files = tuple(natural_order(_walk(directory, matches)))
    if not files:
        below = sorted({p.parent.name for p in directory.glob("*/*") if matches(p.name)})
        others = natural_order(p for p in directory.iterdir() if p.is_file())
        hint = f"; there are some in {', '.join(below[:5])}" if below else ""
        if others and not below:
            hint = f", but files such as {others[0].name}"
        raise DataError(f"{directory}: there are no {kind} files in this directory{hint}")
    return files


def _walk(directory: pathlib.Path, matches: Callable[[str], Any]) -> Iterator[pathlib.Path]:
    """Yield the files of a directory and of the directories ``key=value`` in it."""
    for path in directory.iterdir():
        # Spark and others name unfinished files and metadata so: _temporary, _SUCCESS, .part-0.crc.
        if path.name.startswith((".", "_")) and "=" not in path.name:
            continue
        if path.is_dir():
            if "=" in path.name:
                yield from _walk(path, matches)
        elif matches(path.name):
            yield path


def keys_of(path: str | os.PathLike[str]) -> dict[str, str | None]:
    """Return by key the values of the ``key=value`` directories on a path; None for a null."""
    keys: dict[str, str | None] = {}
    for part in pathlib.PurePath(path).parts[:-1]:
        name, is_key, value = part.partition("=")
        if name and is_key:
            text = urllib.parse.unquote(value)
            keys[urllib.parse.unquote(name)] = None if text == _NO_KEY else text
    return keys


def key_types(paths: Iterable[str | os.PathLike[str]]) -> dict[str, pa.DataType]:
    """Return the type of each column that directories ``key=value`` on the paths define.

    It is int64 if all values of the key are integers, string otherwise.
    """
    types: dict[str, pa.DataType] = {}
    for path in paths:
        for name, value in keys_of(path).items():
            is_integer = value is None or _INTEGER.fullmatch(value) is not None
            if types.setdefault(name, pa.int64()) == pa.int64() and not is_integer:
                types[name] = pa.string()
    return types


def key_column(value: str | None, kind: pa.DataType, rows: int) -> pa.Array:
    """Return a column of ``rows`` rows with the value of a ``key=value`` directory."""
    whole = pa.types.is_integer(kind) and value is not None
    return pa.repeat(pa.scalar(int(value) if whole and value else value, kind), rows)


# Numbers of bytes and lines from which the format of a file is told.
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
    **{bytes([0x80, protocol]): "a pickle" for protocol in range(2, 6)},
    b"BZh": "a file compressed by bzip2",
    b"\xfd7zXZ": "a file compressed by xz",
    b"\x28\xb5\x2f\xfd": "a file compressed by zstd",
    b"SQLite format 3": "an SQLite database",
    b"PARE": "an encrypted Parquet file",
}
_SEPARATORS = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}

# A field of a RecBole header, "user_id:token", and a line of libsvm's or libffm's format.
_RECBOLE = re.compile(r"[^\t:]+:(token|float|token_seq|float_seq)")
_LIBSVM = re.compile(r"[-+]?[\d.]+( \d+:\S+)+")

_READS = "jaxrec train reads Parquet files"


def foreign_format(path: pathlib.Path) -> str | None:
    """Return why a file is not text in Criteo's format; None if it may be.

    The text follows the file's name in an error. It names the file's format, and often a command
    that converts the file.
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
            return None  # the error of reading the file says where it is damaged
    if b"\0" in start:
        return f"is not text; {_READS}, which pyarrow.parquet.write_table writes"
    lines = start.decode(errors="replace").splitlines()[:_LINES] or [""]
    # One good line is enough: the conversion then names the lines that are not.
    if any(line.count("\t") == COLUMNS - 1 for line in lines):
        return None
    return _text(path, lines)


def _binary(path: pathlib.Path, kind: str) -> str:
    if "compressed" in kind:
        return f"is {kind}; unpack it, or compress it by gzip"
    if "Arrow" in kind:
        return f"is {kind}; {_named(path, '.arrow')}"
    if "NumPy" in kind or "npz" in kind:
        columns = "pyarrow.table({name: array, ...})"
        return f"is {kind}; {_READS}: {_write(path, columns)} makes columns of arrays"
    return f"is {kind}; {_READS}, such as {path.with_suffix('.parquet')}"


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
    """Say by which name a file is read; names tell formats and compressions."""
    plain = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    name = plain.with_suffix(suffix).name + (".gz" if is_compressed(path) else "")
    return f"name it {name}, as jaxrec knows formats by names"


def _write(path: pathlib.Path, table: str) -> str:
    """Return a shell command that writes a Parquet file; ``table`` is Python code of the table."""
    output = path.with_suffix(".parquet")
    return (
        "python -c 'import pyarrow, pyarrow.parquet; "
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
