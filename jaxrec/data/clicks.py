"""Rows of a click log as columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int


@dataclasses.dataclass(frozen=True, eq=False)
class Clicks:
    """Rows of a click log, in host memory.

    Attributes:
        labels: ``[rows]`` float32, 1 where there was a click and 0 elsewhere.
        dense: ``[rows, num_dense]`` float32.
        ids: ``[rows, num_tables]`` int32, one row number of each table.
        probabilities: ``[rows]`` float64, the true probability of a click, where it is known.
    """

    labels: Float[np.ndarray, " rows"]
    dense: Float[np.ndarray, "rows num_dense"]
    ids: Int[np.ndarray, "rows num_tables"]
    probabilities: Float[np.ndarray, " rows"] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice | np.ndarray) -> Clicks:
        known = self.probabilities
        return Clicks(
            self.labels[rows],
            self.dense[rows],
            self.ids[rows],
            None if known is None else known[rows],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Clicks]) -> Clicks:
        """The rows of all parts, in order."""
        known = [part.probabilities for part in parts if part.probabilities is not None]
        return cls(
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.dense for part in parts]),
            np.concatenate([part.ids for part in parts]),
            np.concatenate(known) if len(known) == len(parts) else None,
        )


class ClickLog(Protocol):
    """A log that can be read from any row on.

    Attributes:
        num_rows: Rows of the log.
        num_dense: Dense features of a row.
        table_rows: For each categorical feature the number of its ids: rows of its table.
    """

    @property
    def num_rows(self) -> int: ...

    @property
    def num_dense(self) -> int: ...

    @property
    def table_rows(self) -> tuple[int, ...]: ...

    def chunks(self, start: int, stop: int) -> Iterator[Clicks]:
        """The rows ``[start, stop)`` in order, some ten thousands at a time."""
