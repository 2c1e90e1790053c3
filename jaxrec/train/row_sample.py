"""Samples of held-out rows, of which one column at a time can be shuffled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from jaxrec.data import ClickBatch, Clicks, TableEncoder, batches
from jaxrec.data.transforms import CATEGORICAL_NAMES, DENSE_NAMES


@runtime_checkable
class RowSample(Protocol):
    """Some rows of this process; ``len(sample)`` is their number, the same in all processes."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that a model reads."""

    def __len__(self) -> int: ...

    def shuffled(self, column: str, order: Int[np.ndarray, " rows"]) -> RowSample:
        """Return the rows with the values of one column in another order."""

    def batches(self, batch_size: int) -> Iterator[ClickBatch]:
        """Yield this process's part of batches of ``batch_size`` rows of all processes."""


@runtime_checkable
class SampledDataset(Protocol):
    """A data set of which a sample can be taken."""

    def sample(self, count: int) -> RowSample:
        """Return about ``count`` rows of all processes, or all rows, spread over the data set.

        The sample is empty if there are fewer rows than processes.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class TableSample:
    """Encoded rows of a table; ``processes`` is the number of processes."""

    table: pa.Table
    encoder: TableEncoder
    processes: int

    @property
    def columns(self) -> tuple[str, ...]:
        schema = self.encoder.schema
        return (*schema.dense, *schema.categorical)

    def __len__(self) -> int:
        return len(self.table)

    def shuffled(self, column: str, order: Int[np.ndarray, " rows"]) -> TableSample:
        place = self.table.column_names.index(column)
        values = self.table[column].take(pa.array(order))
        return dataclasses.replace(self, table=self.table.set_column(place, column, values))

    def batches(self, batch_size: int) -> Iterator[ClickBatch]:
        each = batch_size // self.processes
        for start in range(0, len(self), each):
            yield self.encoder.pack(self.table.slice(start, each), each)


@dataclasses.dataclass(frozen=True, eq=False)
class ClickSample:
    """Rows of a click log; ``processes`` is the number of processes."""

    clicks: Clicks
    id_bits: Literal[32, 64]
    processes: int

    @property
    def columns(self) -> tuple[str, ...]:
        return (*DENSE_NAMES, *CATEGORICAL_NAMES)

    def __len__(self) -> int:
        return len(self.clicks)

    def shuffled(self, column: str, order: Int[np.ndarray, " rows"]) -> ClickSample:
        arrays = {}
        for name, columns in (("dense", DENSE_NAMES), ("ids", CATEGORICAL_NAMES)):
            if column in columns:
                place = columns.index(column)
                arrays[name] = getattr(self.clicks, name).copy()
                arrays[name][:, place] = arrays[name][order, place]
        return dataclasses.replace(self, clicks=dataclasses.replace(self.clicks, **arrays))

    def batches(self, batch_size: int) -> Iterator[ClickBatch]:
        each = batch_size // self.processes
        yield from batches([self.clicks], each, CATEGORICAL_NAMES, id_bits=self.id_bits)
