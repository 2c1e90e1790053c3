"""Work on the batches to come while the devices compute: one thread a stage."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jaxrec.ragged import KeyedJaggedArray

# Steps that may be under way at once.
AHEAD = 2

# Seconds between two looks at whether the pipeline was closed.
POLL_SECONDS = 0.1

# Seconds that closing waits for a stage; one that hangs is left to end with the program.
CLOSE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class _Result:
    """What goes from stage to stage: an item, or the end, with the error that it came by."""

    item: Any = None
    is_end: bool = False
    error: BaseException | None = None


def each_batch(batches: Any) -> Iterator[Any]:
    """Iterate over batches; a single batch would give its rows or keys instead.

    Raises:
        TypeError: It is a single batch, or has no batches at all.
    """
    is_one = isinstance(batches, np.ndarray | jax.Array | KeyedJaggedArray | Mapping | str)
    if is_one or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be an iterable of batches, such as a list or a generator, got a "
            f"{type(batches).__name__}"
        )
    return iter(batches)


class Pipeline:
    """The batches of a source, each taken through stages by threads that run ahead.

    With ``Pipeline(reader, place)`` and a step that is dispatched without waiting, batch ``i``
    computes while ``place`` puts batch ``i + 1`` on the devices and the reader makes ``i + 2``.

    An exception of the source or of a stage is raised where its batch would have come, after those
    before it. Ending a ``for`` by an exception, Ctrl-C among them, leaves the threads to `close`;
    use it in a ``with``.

    Args:
        batches: The source; its iterator is used by one thread, and closed if it can be.
        *stages: Functions of a batch, in order, each in a thread of its own: to pack ids, to put a
            batch on devices (`jaxrec.train.put`, or `jaxrec.mesh.shard_batch` with a mesh).
        ahead: Batches that wait between two stages.

    Raises:
        ValueError: ``ahead`` is below 1.
        TypeError: From the first batch: ``batches`` is a single batch.

    Example:
        >>> with Pipeline(range(4), lambda x: x + 1, lambda x: 10 * x) as batches:
        ...     list(batches)
        [10, 20, 30, 40]
    """

    def __init__(
        self, batches: Iterable[Any], *stages: Callable[[Any], Any], ahead: int = 1
    ) -> None:
        if ahead < 1:
            raise ValueError(f"ahead is 1 or more, got {ahead}")
        self._closed = threading.Event()
        self._ended = False
        queues: list[queue.Queue[_Result]] = [queue.Queue(ahead) for _ in range(len(stages) + 1)]
        self._ready = queues[-1]
        self._threads = [
            threading.Thread(target=self._read, args=(batches, queues[0]), name="reader")
        ]
        for number, stage in enumerate(stages):
            arguments = (stage, queues[number], queues[number + 1])
            self._threads.append(
                threading.Thread(target=self._work, args=arguments, name=f"stage {number}")
            )
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ended or self._closed.is_set():
            raise StopIteration
        result = self._ready.get()
        if not result.is_end:
            return result.item
        self._ended = True
        self.close()
        if result.error is not None:
            raise result.error
        raise StopIteration

    def close(self) -> None:
        """Ends the threads; what they were making is lost."""
        self._closed.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_SECONDS)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, batches: Iterable[Any], target: queue.Queue[_Result]) -> None:
        source: Any = None
        try:
            source = each_batch(batches)
            for item in source:
                if not self._put(target, _Result(item)):
                    break
            error: BaseException | None = None
        except BaseException as raised:  # whatever it is, it belongs to the consumer
            error = raised
        if hasattr(source, "close"):
            source.close()
        self._put(target, _Result(is_end=True, error=error))

    def _work(
        self,
        stage: Callable[[Any], Any],
        source: queue.Queue[_Result],
        target: queue.Queue[_Result],
    ) -> None:
        while (result := self._get(source)) is not None:
            if not result.is_end:
                try:
                    result = _Result(stage(result.item))
                except BaseException as raised:
                    result = _Result(is_end=True, error=raised)
            if not self._put(target, result) or result.is_end:
                return

    def _put(self, target: queue.Queue[_Result], result: _Result) -> bool:
        while not self._closed.is_set():
            try:
                target.put(result, timeout=POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def _get(self, source: queue.Queue[_Result]) -> _Result | None:
        while not self._closed.is_set():
            try:
                return source.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
        return None
