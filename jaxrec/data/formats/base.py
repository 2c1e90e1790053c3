"""The interface of a file format whose tables are converted to Parquet files.

To add a format, write a module with a subclass of `Format`, and name it in
`jaxrec.data.formats.conversion`.
"""

from __future__ import annotations

import abc
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import pyarrow as pa

from jaxrec.data.files import DataFiles, data_files

_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}

# Matches the end of a name with or without a compression.
COMPRESSION = r"(\.(gz|bz2|zst|lz4))?$"

# Types of columns by name.
Types = Mapping[str, pa.DataType]


class Format(abc.ABC):
    """A format of files with a table each.

    Attributes:
        name: Name of the format in messages.
        suffixes: Ends of the names of such files, without those of compressions.
        compression: Pattern of what may follow a suffix.
        takes_types: Whether a user may give the types of columns.
        guesses_types: Whether values are text whose type is guessed, so that a file with other rows
            may have columns of other types.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    compression: ClassVar[str] = COMPRESSION
    takes_types: ClassVar[bool] = True
    guesses_types: ClassVar[bool] = False

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the end of the names of such files."""
        ends = "|".join(map(re.escape, self.suffixes))
        return re.compile(rf"({ends}){self.compression}", re.IGNORECASE)

    def files(self, path: str | os.PathLike[str]) -> DataFiles:
        """Find the files of this format of a file, a directory or a pattern, in natural order."""
        found = data_files(path, self.pattern.search, self.name)
        return found._replace(paths=without_descriptions(found.paths))

    def may_be_text(self, kind: pa.DataType) -> bool:
        """Return whether values that got a type are text if another file has text in the column."""
        return False

    @abc.abstractmethod
    def tables(self, path: pathlib.Path, types: Types, guesses: Types) -> Iterator[pa.Table]:
        """Read a file in parts of some megabytes, all with the same columns.

        Args:
            path: The file.
            types: Types of columns that the user gave.
            guesses: Types of other columns that an earlier pass over the file found. The columns
                that neither names get theirs from the values.

        Raises:
            DataError: The file is malformed. The message names the file, and the line and the
                column where they are known.
            WiderTypeError: A value does not fit the type that values before it gave its column, but
                a wider type fits all of them. The caller starts anew with that type as a guess.
        """


class WiderTypeError(Exception):
    """A column needs a wider type than that of its first values."""

    def __init__(self, column: str, kind: pa.DataType):
        super().__init__(column, kind)
        self.column, self.kind = column, kind


def unpacked(path: pathlib.Path) -> pa.NativeFile:
    """Open a file, and unpack what its name says is compressed, in capitals or not."""
    return pa.input_stream(str(path), compression=_COMPRESSIONS.get(path.suffix.lower()))


def without_descriptions(paths: Sequence[pathlib.Path]) -> tuple[pathlib.Path, ...]:
    """Leave out ``.json`` files beside other files.

    They describe the others, as those of `jaxrec data criteo` and of Hugging Face's data sets do.
    """
    return tuple(x for x in paths if x.suffix.lower() != ".json") or tuple(paths)
