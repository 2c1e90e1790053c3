"""Records of the use of a vocabulary's rows, by which eviction policies decide."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Records:
    """Use of each row that ids can have, as NumPy arrays of ``[rows]``.

    Attributes:
        ids: int64 id of the row; arbitrary where ``born`` is -1.
        last_use: int64 number of the last batch that used the row.
        count: uint32 number of lookups of the row since its id was admitted.
        born: int64 number of the batch in which the id was admitted; -1: the row is free.
        power: uint8 frequency class of `lfu_lru`, about the binary logarithm of the number of
            batches that used the row; 0 with other policies.
        last_seconds: int64 Unix time of the last use; 0 with policies that need none.
    """

    ids: np.ndarray
    last_use: np.ndarray
    count: np.ndarray
    born: np.ndarray
    power: np.ndarray
    last_seconds: np.ndarray

    @classmethod
    def empty(cls, rows: int) -> Records:
        """Make the records of free rows."""
        return cls(
            ids=np.zeros(rows, np.int64),
            last_use=np.zeros(rows, np.int64),
            count=np.zeros(rows, np.uint32),
            born=np.full(rows, -1, np.int64),
            power=np.zeros(rows, np.uint8),
            last_seconds=np.zeros(rows, np.int64),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def take(self, rows: np.ndarray) -> Records:
        """Return the records of some rows."""
        return Records(**{name: array[rows] for name, array in self.arrays().items()})
