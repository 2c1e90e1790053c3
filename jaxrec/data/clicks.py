"""Rows of click logs, as columns."""

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
        labels: ``[rows]`` float32, 1 for a click and 0 for none.
        dense: ``[rows, num_dense]`` float32.
        ids: ``[rows, num_tables]`` int32, a row index of each table; or int64, raw ids.
        probabilities: ``[rows]`` float64, the true probabilities of a click; None: unknown.
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
        """Concatenate the rows of several parts."""
        known = [part.probabilities for part in parts if part.probabilities is not None]
        return cls(
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.dense for part in parts]),
            np.concatenate([part.ids for part in parts]),
            np.concatenate(known) if len(known) == len(parts) else None,
        )


class ClickLog(Protocol):
    """A click log that can be read from any row.

    Attributes:
        num_rows: Number of rows.
        num_dense: Number of dense features.
        table_rows: Number of rows of each categorical feature's table.
    """

    @property
    def num_rows(self) -> int: ...

    @property
    def num_dense(self) -> int: ...

    @property
    def table_rows(self) -> tuple[int, ...]: ...

    def chunks(self, start: int, stop: int) -> Iterator[Clicks]:
        """Yield the rows ``[start, stop)`` in order, in chunks of some ten thousand rows."""
