"""The columns of requests: those of a model's encoder, or those of the arguments of a model."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from jaxrec.serve.artifact.requests import Request
from jaxrec.serve.http.input_column import InputColumn


class InputColumns(abc.ABC):
    """The columns that a model reads, and how they become its inputs.

    `RawColumns` and `ArgumentColumns` implement it.

    Args:
        columns: The columns.
    """

    def __init__(self, columns: Iterable[InputColumn]) -> None:
        self.columns = tuple(columns)
        self.names = tuple(column.name for column in self.columns)

    @abc.abstractmethod
    def request(self, table: pa.Table) -> Request:
        """Return the samples of a table that has all of these columns.

        Raises:
            ValueError, TypeError: A value cannot be that of a sample; the message names the column
                and the sample.
        """

    def table(self, parts: Sequence[Any]) -> pa.Table:
        """Return the columns of some JSON bodies, one after the other.

        Args:
            parts: For each body its columns by name.

        Raises:
            ValueError: Values do not fit the type of a column.
        """
        arrays = []
        for column in self.columns:
            values = parts[0][column.name]
            if len(parts) > 1:
                values = [value for part in parts for value in part[column.name]]
            arrays.append(column.as_arrow(values))
        return pa.table(arrays, list(self.names))

    def example(self) -> dict[str, list[Any]]:
        """Return a body with an example of two samples."""
        return {column.name: list(column.example) for column in self.columns}
