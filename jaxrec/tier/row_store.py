"""Row stores, which keep the rows of evicted ids until the ids return."""

from __future__ import annotations

import abc
from collections.abc import Iterator

import numpy as np


class RowStore(abc.ABC):
    """Records of equal width by 64-bit id: a row of each table and its optimizer state, as bytes.

    Implementors do the following:

    1. All methods may be called from several threads at once. A `get` that begins after a `put` or
       `delete` has returned sees its changes.
    2. `open` is called once, before any other method. A store that already holds records of another
       width raises a ValueError.
    3. Every 64-bit pattern but -1 may be an id.
    """

    @abc.abstractmethod
    def open(self, width: int) -> None:
        """Prepare the store for records of ``width`` bytes."""

    @abc.abstractmethod
    def get(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read records.

        Args:
            ids: int64 ``[n]``.

        Returns:
            Whether each id has a record, bool ``[n]``, and the records, uint8 ``[n, width]``, with
            zeros for an id that has none.
        """

    @abc.abstractmethod
    def put(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Write records.

        Args:
            ids: Distinct ids, int64 ``[n]``.
            records: uint8 ``[n, width]``.
        """

    @abc.abstractmethod
    def delete(self, ids: np.ndarray) -> None:
        """Remove the records of some ids; an id without a record is skipped."""

    @abc.abstractmethod
    def scan(self, size: int = 1 << 16) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over all records as ``(ids, records)`` of at most ``size`` records each."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of records."""

    @property
    def is_durable(self) -> bool:
        """Whether the records outlive the process; otherwise checkpoints hold them."""
        return True

    def flush(self) -> None:
        """Wait until all records that were put are durable."""
        return

    def close(self) -> None:
        """Release the store's resources."""
        return
