"""Counts of the rows that travel between the devices and a row store, and of the time they take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np


class StoreTraffic:
    """Rows that travelled between the devices and the store of a table, in this process.

    Each of the methods is called by one thread: the training thread receives rows, and the threads
    of the store read and write. `summary` may be called by any thread.

    Args:
        width: Number of bytes of a row with its optimizer state.
        clock: Returns the time in seconds.

    Attributes:
        steps: Number of training batches that were taken.
    """

    def __init__(self, width: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._width, self._clock = width, clock
        self.steps = 0
        self._fetched = self._initialized = self._written = 0
        self._read_seconds = self._write_seconds = 0.0
        # Waiting time of the present step, of the last one, and of all.
        self._waited = self._last_stall = self._stall = 0.0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Time a read of the store."""
        start = self._clock()
        yield
        self._read_seconds += self._clock() - start

    @contextlib.contextmanager
    def writing(self, rows: int) -> Iterator[None]:
        """Time a write of evicted rows to the store, and count them if it succeeds."""
        start = self._clock()
        yield
        self._write_seconds += self._clock() - start
        self._written += rows

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the training thread's wait for rows."""
        start = self._clock()
        yield
        self._waited += self._clock() - start

    def add_received(self, found: np.ndarray) -> None:
        """Count rows that were brought to the devices.

        Args:
            found: Whether the store had each row, bool ``[n]``; the others get first values.
        """
        num_found = int(np.count_nonzero(found))
        self._fetched += num_found
        self._initialized += found.size - num_found

    def begin_step(self) -> None:
        """Begin to add up the waiting time of a step; earlier waits were not those of a step."""
        self._waited = 0.0

    def end_step(self) -> None:
        """Count a step, and the waiting time since `begin_step` as its stall."""
        self._last_stall = self._waited
        self._stall += self._waited
        self.steps += 1

    def summary(self) -> dict[str, float]:
        """Return the counts of rows and bytes, and milliseconds a step."""
        per_step = 1e3 / max(1, self.steps)
        return {
            "fetched": self._fetched,
            "initialized": self._initialized,
            "written": self._written,
            "fetched_bytes": self._fetched * self._width,
            "written_bytes": self._written * self._width,
            "read_ms": self._read_seconds * per_step,
            "write_ms": self._write_seconds * per_step,
            "stall_ms": self._stall * per_step,
            "last_stall_ms": 1e3 * self._last_stall,
        }


@contextlib.contextmanager
def step_of(traffic: Iterable[StoreTraffic]) -> Iterator[None]:
    """Count the waits of some tables within the ``with`` block as the stall of one step."""
    of_step = list(traffic)
    for each in of_step:
        each.begin_step()
    yield
    for each in of_step:
        each.end_step()
