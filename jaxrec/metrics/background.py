"""A writer that computes and writes values in a thread, beside training."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from jaxrec.metrics.writers import Writer

Values: TypeAlias = Mapping[str, float] | Callable[[], Mapping[str, float]]


class BackgroundWriter:
    """Computes and writes values in one thread, in the order of the calls of `write`.

    `jaxrec.train.WriteMetrics` gives it a function that computes the metrics from a copy of their
    state, so that the sorts of AUC and other work on the host run beside the next steps. NumPy
    releases Python's lock while it sorts. Values are those that training would wait for.

    If a computation or a write fails, the next call of `write`, `wait` or `close` raises its error
    in the thread that calls, and later values are not written. Values that wait when training is
    interrupted are written before `close` returns, and before Python ends.

    Args:
        writer: The writer of the values; `close` closes it.
        max_waiting: Largest number of calls that may wait. One more waits for the oldest, which
            bounds the memory of the copied states.

    Raises:
        ValueError: ``max_waiting`` is below 1.

    Example:
        >>> import contextlib
        >>> from jaxrec.metrics import ConsoleWriter
        >>> with contextlib.closing(BackgroundWriter(ConsoleWriter())) as writer:
        ...     writer.write(1, {"ne": 0.9})
        ...     writer.write(2, lambda: {"ne": 0.8})
        step 1  ne 0.9000
        step 2  ne 0.8000
    """

    def __init__(self, writer: Writer, max_waiting: int = 2):
        if max_waiting < 1:
            raise ValueError(f"max_waiting is {max_waiting}; it must be 1 or more")
        self._writer, self._max_waiting = writer, max_waiting
        # Its thread completes what waits before Python ends, also after an interrupt.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._waiting: collections.deque[Future[None]] = collections.deque()
        self._has_failed = self._is_closed = False

    def write(self, step: int, values: Values) -> None:
        """Write values later.

        Args:
            step: The step.
            values: The values by name, or a function that returns them. The thread calls it.

        Raises:
            ValueError: The writer is closed.
            Exception: The error of an earlier computation or write.
        """
        if self._is_closed:
            raise ValueError("the writer is closed")
        while self._waiting and (
            self._waiting[0].done() or len(self._waiting) >= self._max_waiting
        ):
            self._finish_first()
        self._waiting.append(self._thread.submit(self._write, step, values))

    def wait(self) -> None:
        """Wait until all values are written.

        Raises:
            Exception: The error of an earlier computation or write.
        """
        while self._waiting:
            self._finish_first()

    def close(self) -> None:
        """Wait until all values are written, and close the writer.

        Raises:
            Exception: The error of an earlier computation or write.
        """
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._writer.close()

    def _write(self, step: int, values: Values) -> None:
        if self._has_failed:
            return
        try:
            self._writer.write(step, values() if callable(values) else values)
        except BaseException:
            self._has_failed = True
            raise

    def _finish_first(self) -> None:
        # An interrupt of the wait leaves the call in the queue.
        self._waiting[0].exception()
        self._waiting.popleft().result()
