"""Making batches while the device is busy."""

from __future__ import annotations

import collections
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_END = object()


def prefetch(items: Iterable[T], size: int = 4) -> Generator[T, None, None]:
    """The same items, made by a thread that is up to ``size`` of them ahead.

    An exception of ``items`` is raised where the item would have come. The thread ends when the
    iterator is exhausted or closed.

    Example:
        >>> list(prefetch(range(3)))
        [0, 1, 2]
    """
    ready: queue.Queue = queue.Queue(size)
    closed = threading.Event()

    def put(item: object) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def produce() -> None:
        try:
            for item in items:
                if not put((item, None)):
                    return
            put((_END, None))
        except BaseException as error:  # whatever it is, it belongs to the consumer
            put((_END, error))

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        closed.set()
        thread.join()


def ordered_map(
    function: Callable[[T], R],
    items: Iterable[T],
    pool: concurrent.futures.Executor,
    ahead: int,
) -> Generator[R, None, None]:
    """Yield ``function(item)`` of each item in order, computed by a pool.

    Args:
        function: Called by the pool's threads.
        items: Its arguments.
        pool: Runs the calls.
        ahead: Results that are computed, or wait, before they are asked for.

    Raises:
        Exception: ``function`` raised it; it comes where the result would have come.

    Example:
        >>> with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ...     list(ordered_map(str, range(3), pool, ahead=2))
        ['0', '1', '2']
    """
    under_way: collections.deque[concurrent.futures.Future[R]] = collections.deque()
    try:
        for item in items:
            under_way.append(pool.submit(function, item))
            if len(under_way) > ahead:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()
