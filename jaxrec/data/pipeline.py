"""Threads that make batches while the devices compute."""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from jaxrec.ragged import KeyedJaggedArray

Item = TypeVar("Item")
Result = TypeVar("Result")

# Seconds after which a waiting thread checks whether the pipeline was closed: queues cannot be
# closed in Python 3.11.
POLL_SECONDS = 0.1

# Seconds that `Pipeline.close` waits for each thread. A thread that hangs ends with the program.
CLOSE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class _Message:
    """Message from one stage to the next: an item, or the end of all items and its error."""

    item: Any = None
    is_end: bool = False
    error: BaseException | None = None


def each_batch(batches: Any) -> Iterator[Any]:
    """Iterate over batches; refuse a single batch, whose iterator would yield rows or keys."""
    is_one = isinstance(batches, np.ndarray | jax.Array | KeyedJaggedArray | Mapping | str)
    if is_one or not isinstance(batches, Iterable):
        raise TypeError(
            f"batches must be an iterable of batches, such as a list or a generator, got a "
            f"{type(batches).__name__}"
        )
    return iter(batches)


# Python stops daemon threads wherever they are when it ends. In compiled code this can crash the
# process. Closing the pipelines first ends their threads.
_open_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()


@atexit.register
def _close_pipelines() -> None:
    for pipeline in list(_open_pipelines):
        pipeline.close()


class Pipeline:
    """Iterator over batches that threads read and process ahead of the consumer.

    One thread reads the source and one thread runs each stage. With ``Pipeline(reader, place)``,
    the devices compute batch ``i`` while ``place`` puts batch ``i + 1`` on the devices and
    ``reader`` makes batch ``i + 2``.

    Use the pipeline in a ``with`` block: the threads then end after an exception, too. The end of
    the program also ends them. An exception of the source or of a stage is raised by `next` in
    place of its batch, after all batches before.

    Args:
        batches: The source. One thread iterates over it, and calls its ``close`` at the end if it
            has that method. Closing the pipeline calls the source's ``interrupt``, if it has that
            method, to wake a source that waits; pipelines and `jaxrec.mesh.even_batches` have it.
        *stages: Functions of a batch, in order, such as packing ids or putting the batch on
            devices (`jaxrec.train.put_batch`, or `jaxrec.mesh.shard_batch` with a mesh).
        ahead: Number of batches that may wait after the reader and after each stage.
        on_close: Function to call when the pipeline is closed, before it waits for its threads. It
            wakes a stage that waits for something. None: no stage waits.

    Raises:
        ValueError: ``ahead`` is below 1.
        TypeError: ``batches`` is a single batch; the first `next` raises it.

    Example:
        >>> with Pipeline(range(4), lambda x: x + 1, lambda x: 10 * x) as batches:
        ...     list(batches)
        [10, 20, 30, 40]
    """

    def __init__(
        self,
        batches: Iterable[Any],
        *stages: Callable[[Any], Any],
        ahead: int = 1,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        if ahead < 1:
            raise ValueError(f"ahead is 1 or more, got {ahead}")
        self._closed = threading.Event()
        self._on_close = on_close
        self._source = batches
        self._ended = False
        queues: list[queue.Queue[_Message]] = [queue.Queue(ahead) for _ in range(len(stages) + 1)]
        self._ready = queues[-1]
        # One thread a stage, so that the queues keep the order of the batches without numbers.
        self._threads = [
            threading.Thread(target=self._read, args=(batches, queues[0]), name="reader")
        ]
        for number, stage in enumerate(stages):
            arguments = (stage, queues[number], queues[number + 1])
            self._threads.append(
                threading.Thread(target=self._work, args=arguments, name=f"stage {number}")
            )
        _open_pipelines.add(self)
        for thread in self._threads:
            # A thread that hangs in a read must not keep the program from ending.
            thread.daemon = True
            thread.start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ended or self._closed.is_set():
            raise StopIteration
        message = self._get(self._ready)
        if message is None:  # another thread closed the pipeline
            raise StopIteration
        if not message.is_end:
            return message.item
        self._ended = True
        self.close()
        if message.error is not None:
            raise message.error
        raise StopIteration

    def interrupt(self) -> None:
        """End the threads without waiting for them, and wake a thread that waits for a batch."""
        self._closed.set()
        if hasattr(self._source, "interrupt"):
            self._source.interrupt()
        if self._on_close is not None:
            self._on_close()

    def close(self) -> None:
        """End the threads and drop their batches."""
        self.interrupt()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_SECONDS)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, batches: Iterable[Any], target: queue.Queue[_Message]) -> None:
        source: Any = None
        try:
            source = each_batch(batches)
            for item in source:
                if not self._put(target, _Message(item)):
                    break
            error: BaseException | None = None
        except BaseException as raised:  # the consumer raises it
            error = raised
        # Closed by the thread that iterates: Python refuses to close a generator that runs in
        # another thread.
        if hasattr(source, "close"):
            source.close()
        self._put(target, _Message(is_end=True, error=error))

    def _work(
        self,
        stage: Callable[[Any], Any],
        source: queue.Queue[_Message],
        target: queue.Queue[_Message],
    ) -> None:
        while (message := self._get(source)) is not None:
            if not message.is_end:
                try:
                    message = _Message(stage(message.item))
                except BaseException as raised:
                    message = _Message(is_end=True, error=raised)
            if not self._put(target, message) or message.is_end:
                return

    def _put(self, target: queue.Queue[_Message], message: _Message) -> bool:
        while not self._closed.is_set():
            try:
                target.put(message, timeout=POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def _get(self, source: queue.Queue[_Message]) -> _Message | None:
        while not self._closed.is_set():
            try:
                return source.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
        return None


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    pool: concurrent.futures.Executor,
    ahead: int,
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` of each item in order; the pool computes ``ahead`` results ahead."""
    pending: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            # Executor.map would read all items at once: the bound keeps memory small.
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        # The consumer stopped early, or one item failed.
        for future in pending:
            future.cancel()


def made_ahead(
    make: Callable[[int], Result], numbers: range, threads: int, ahead: int
) -> Iterator[Result]:
    """Yield ``make(number)`` of each number in order; ``threads`` threads make them ahead."""
    with concurrent.futures.ThreadPoolExecutor(threads, "batches") as pool:
        yield from ordered_map(make, numbers, pool, ahead)
