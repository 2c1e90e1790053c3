"""Stopping between two steps rather than in the middle of one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupt:
    """Remembers the signal that asked to stop.

    Attributes:
        signal: SIGINT or SIGTERM once it has come, None before.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """What a shell expects after a signal: 130 for SIGINT, 143 for SIGTERM."""
        return 0 if self.signal is None else 128 + self.signal


@contextlib.contextmanager
def interruptible() -> Iterator[Interrupt]:
    """While it lasts, SIGINT and SIGTERM set the `Interrupt` that it gives, and nothing else.

    A second signal does what it always did, for those who cannot wait. Outside of the main thread,
    where Python allows no handlers, nothing is caught.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in signals}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        interrupt.signal = signal.Signals(number)
        restore()

    for number in signals:
        signal.signal(number, note)
    try:
        yield interrupt
    finally:
        restore()
