"""Records in memory that grow without a copy."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np


class GrowingRecords:
    """Array of records, uint8 ``[room, width]``, in memory of its own.

    To grow, the operating system maps the same memory elsewhere where it can: nothing is copied,
    and nothing lies in memory twice. New records take memory when they are written.

    Args:
        room: Number of records.
        width: Bytes of a record.
    """

    def __init__(self, room: int, width: int) -> None:
        self.room, self.width = room, width
        self._memory = _map(room * width)

    @property
    def array(self) -> np.ndarray:
        """The records. Do not keep the array: it must be gone when the records grow."""
        count = self.room * self.width
        return np.frombuffer(self._memory, np.uint8, count).reshape(self.room, self.width)

    def grow(self, room: int) -> None:
        """Make room for more records; those that are there stay."""
        size, self.room = self.room * self.width, room
        try:
            self._memory.resize(max(room * self.width, 1))
        except (SystemError, ValueError, OSError):  # platforms that cannot
            memory = _map(room * self.width)
            memory[:size] = self._memory[:size]
            self._memory = memory
        _use_huge_pages(self._memory)


def _map(size: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):
        memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        memory = mmap.mmap(-1, max(size, 1))
    _use_huge_pages(memory)
    return memory


def _use_huge_pages(memory: mmap.mmap) -> None:
    """Let fewer accesses of random records miss the table of pages."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
