"""The files of a data set: finding them by a path or an address.

A path is one file, a directory, or a pattern such as ``parts/*.parquet``; so is an address such as
``s3://bucket/parts``. Directories named ``key=value``, as Spark, Dask, polars and DuckDB write
them, become columns.
"""

from __future__ import annotations

import glob
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jaxrec.data.addresses import Address, data_path
from jaxrec.data.partitions import key_parts

# Ends of the names of Parquet files; pandas' documentation has examples named df.parquet.gzip.
_NAME = re.compile(r"\.(parquet|parq|pq)(\.(brotli|gzip|lz4|snappy|zstd))?$", re.IGNORECASE)

# Directories of table formats. Their logs list the files of the current version: reading all files
# would read deleted rows, too.
_LOGS = {"_delta_log": "a Delta table", ".hoodie": "a Hudi table"}
_ICEBERG = ".metadata.json"

# Files of Hugging Face's `datasets` beside the data: the splits of a set, and a split's data files.
_SPLITS_FILE, _STATE_FILE = "dataset_dict.json", "state.json"

# `jaxrec data criteo` writes these beside the rows: a summary, and a directory of maps of ids.
_SUMMARY_FILE, _MAPS = "summary.json", "maps"

# Names of the files of a split on Hugging Face's hub: train-00000-of-00002.parquet.
_SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}")


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
        return tuple(name for name, _ in key_parts(self.paths[0].relative_to(self.root)))


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
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def has_pattern(path: pathlib.Path) -> bool:
    """Return whether a path is a pattern; a file that exists may have ``[1]`` in its name."""
    if isinstance(path, Address) and not path.may_be_pattern:
        return False
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

    Raises:
        DataError: There are no such files, the keys of their directories differ, or a directory
            has several splits or the log of a table format, such as Delta.
        OSError: An address cannot be read.
    """
    path = data_path(path)
    if isinstance(path, Address):
        path = Address(path)  # asked anew: the file may have changed
    if path.is_dir():
        files = DataFiles(path, _of_directory(path, matches, kind))
    elif has_pattern(path):
        files = _of_pattern(path, matches, kind)
    else:
        files = DataFiles(path.parent, (path,))
    _check_keys(files)
    return files


def _of_pattern(path: pathlib.Path, matches: Callable[[str], Any], kind: str) -> DataFiles:
    fixed = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
    root = type(path)(*path.parts[:fixed])
    found = (
        root.matches("/".join(path.parts[fixed:]))
        if isinstance(root, Address)
        else map(pathlib.Path, glob.glob(str(path), recursive=True))
    )
    names_hidden = any(map(_is_hidden, path.parts[fixed:]))
    files: set[pathlib.Path] = set()
    for match in found:
        if not names_hidden and any(map(_is_hidden, match.relative_to(root).parts)):
            continue
        # A directory without such files is fine here: `parts/*` may match one of logs, too.
        below = _below(match) if match.is_dir() else (match,)
        files.update(file for file in below if matches(file.name))
    if not files:
        raise DataError(f"{path}: no {kind} file matches this pattern")
    return DataFiles(root, tuple(natural_order(files)))


def _of_directory(
    directory: pathlib.Path, matches: Callable[[str], Any], kind: str
) -> tuple[pathlib.Path, ...]:
    below = natural_order(_below(directory))
    known = frozenset(below)
    files = [path for path in below if matches(path.name) and not _is_map(path, known)]
    beside = {path.name: path for path in below if path.parent == directory}
    if _SPLITS_FILE in beside:
        splits = _read_json(beside[_SPLITS_FILE]).get("splits", [])
        raise _several(directory, splits, f"{directory}/{next(iter(splits), 'train')}")
    if _STATE_FILE in beside and (saved := _read_json(beside[_STATE_FILE]).get("_data_files")):
        # A data set that was saved twice may have files of the first time, too.
        names = [file["filename"] for file in saved]
        if missing := [name for name in names if name not in beside]:
            raise DataError(f"{beside[_STATE_FILE]} names {missing[0]}, which is not there")
        files = [path for path in files if path.name in names]
    if not files:
        hint = f", but files such as {below[0].name}" if below else ""
        raise DataError(f"{directory}: there are no {kind} files in this directory{hint}")
    shards = [_SHARD.match(path.name) for path in files]
    splits = list(dict.fromkeys(shard[1] for shard in shards if shard is not None))
    if len(splits) > 1:
        parent = files[0].parent
        raise _several(directory, splits, f"'{parent}/{splits[-1]}-*{files[0].suffix}'")
    return tuple(files)


def _is_map(path: pathlib.Path, known: frozenset[pathlib.Path]) -> bool:
    """Return whether a file is a map of ids of a data set that `jaxrec data criteo` wrote."""
    return path.parent.name == _MAPS and path.parent.parent / _SUMMARY_FILE in known


def _several(directory: pathlib.Path, splits: Iterable[str], example: str) -> DataError:
    return DataError(
        f"{directory} has the splits {', '.join(splits)}, which are data sets of their own; name "
        f"one: {example}"
    )


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = json.load(file)
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error})") from None
    return content if isinstance(content, dict) else {}


def _is_hidden(name: str) -> bool:
    """Return whether a file or directory is not part of the data.

    Spark and others name unfinished files and metadata so: _temporary, _SUCCESS, .part-0.crc.
    """
    return name.startswith((".", "_")) and "=" not in name


def _below(directory: pathlib.Path, root: pathlib.Path | None = None) -> Iterator[pathlib.Path]:
    """Yield the files in a directory and in its directories, without hidden ones.

    ``root`` is the directory that the user named; None: it is this one.
    """
    if isinstance(directory, Address):
        for file in directory.below():
            parts = file.relative_to(directory).parts
            for part in parts:
                _check_table(directory, part)
            if not any(map(_is_hidden, parts)):
                yield file
        return
    root = root or directory
    for path in directory.iterdir():
        _check_table(directory, path.name)
        if _is_hidden(path.name):
            continue
        if path.is_dir():
            _check_link(path, root)
            yield from _below(path, root)
        else:
            yield path


def _check_link(path: pathlib.Path, root: pathlib.Path) -> None:
    """Refuse a link to a directory that is read anyway: its rows would count twice."""
    if path.is_symlink():
        target, top = path.resolve(), root.resolve()
        if target.is_relative_to(top) or top.is_relative_to(target):
            raise DataError(
                f"{path} is a link to {target}, whose files would be read twice; remove the link, "
                "or name the files by a pattern"
            )


def _check_table(directory: pathlib.Path, name: str) -> None:
    """Refuse the directory of a table format, which the name of a file in it tells."""
    table = "an Iceberg table" if name.endswith(_ICEBERG) else _LOGS.get(name)
    if table is not None:
        raise DataError(
            f"{directory} is {table}, whose log says which of its files count; write its rows to "
            "Parquet files in another directory"
        )


def _check_keys(files: DataFiles) -> None:
    """Refuse files whose directories ``key=value`` do not have the same keys in the same order."""
    first = files.keys
    if len(set(first)) < len(first):
        raise DataError(f"{files.paths[0]} has a key twice, of {', '.join(first)}")
    for path in files.paths:
        keys = tuple(name for name, _ in key_parts(path.relative_to(files.root)))
        if keys != first:
            raise DataError(
                f"{path} has {_keys(keys)}, and {files.paths[0]} has {_keys(first)}; the files of "
                "one data set have the same keys in the same order: name some by a pattern in "
                "quotes, or move the others"
            )


def _keys(names: tuple[str, ...]) -> str:
    return f"the keys {', '.join(names)}" if names else "no directory key=value"
