"""The interface of a file format whose tables are converted to Parquet files.

To add a format, write a module with a subclass of `Format`, and name it in
`jaxrec.data.formats.conversion`.
"""

from __future__ import annotations

import abc
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

import pyarrow as pa

from jaxrec.data.files import DataFiles, data_files

# Compressions by the ends of names; pyarrow.input_stream unpacks a file by the same ends.
COMPRESSION = r"(\.(gz|bz2|zst|lz4))?$"

# Types of columns that a user gives or that earlier rows have shown, by name.
Types = Mapping[str, pa.DataType]


class Format(abc.ABC):
    """A format of files with a table each.

    Attributes:
        name: Name of the format in messages.
        suffixes: Ends of the names of such files, without those of compressions.
        guesses_types: Whether values are text whose type is guessed, so that a file with other rows
            may have columns of other types.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    guesses_types: ClassVar[bool] = False

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the end of the names of such files."""
        ends = "|".join(map(re.escape, self.suffixes))
        return re.compile(rf"({ends}){COMPRESSION}", re.IGNORECASE)

    def files(self, path: str | os.PathLike[str]) -> DataFiles:
        """Find the files of this format of a file, a directory or a pattern, in natural order."""
        return data_files(path, self.pattern.search, self.name)

    @abc.abstractmethod
    def tables(self, path: pathlib.Path, types: Types) -> Iterator[pa.Table]:
        """Read a file in parts of some megabytes, all with the same columns.

        Columns that ``types`` names have these types; the others get theirs from the values.

        Raises:
            DataError: The file is malformed. The message names the file, and the line and the
                column where they are known.
            WiderTypeError: A value does not fit the type that values before it gave its column, but
                a wider type fits all of them. The caller starts anew with that type.
        """


class WiderTypeError(Exception):
    """A column needs a wider type than that of its first values."""

    def __init__(self, column: str, kind: pa.DataType):
        super().__init__(column, kind)
        self.column, self.kind = column, kind
