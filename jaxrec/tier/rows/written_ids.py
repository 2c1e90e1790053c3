"""Ids whose records in a row store changed since a checkpoint."""

from __future__ import annotations

import threading

import numpy as np

_NO_IDS = np.zeros(0, np.int64)


class WrittenIds:
    """Ids whose records were written to a row store or removed from it. Threads may share it.

    Before the first `take`, and after the store's content was replaced, all records count as
    written. Repeated ids are removed when they outnumber the others, so that memory is bounded by
    twice the distinct ids, 8 bytes each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start(is_all=True)

    def _start(self, *, is_all: bool) -> None:
        self._parts: list[np.ndarray] = []
        self._size = self._num_distinct = 0
        self._is_all = is_all

    def add(self, ids: np.ndarray) -> None:
        """Note ids, int64 ``[n]``. The array must not change afterwards."""
        with self._lock:
            if self._is_all:
                return
            self._parts.append(ids)
            self._size += ids.size
            if self._size > max(2 * self._num_distinct, 1 << 16):
                self._parts = [np.unique(np.concatenate(self._parts))]
                self._size = self._num_distinct = self._parts[0].size

    def add_all(self) -> None:
        """Note that any record may have changed."""
        with self._lock:
            self._start(is_all=True)

    def take(self) -> np.ndarray | None:
        """Return the ids since the last `take`, sorted, int64 ``[n]``; None: all records.

        `give_back` notes them again if they are not saved after all.
        """
        with self._lock:
            taken = None if self._is_all else np.unique(np.concatenate([_NO_IDS, *self._parts]))
            self._start(is_all=False)
            return taken

    def give_back(self, taken: np.ndarray | None) -> None:
        """Note the result of a `take` again."""
        if taken is None:
            self.add_all()
        else:
            self.add(taken)
