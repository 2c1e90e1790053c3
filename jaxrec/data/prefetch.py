"""Making batches while the device is busy."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")

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
