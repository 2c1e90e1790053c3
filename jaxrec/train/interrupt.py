"""Stopping between two steps rather than in the middle of one."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import jax

from jaxrec.mesh.agree import gather_numbers

# Steps between two looks at whether another process is to stop: they wait for the step under way.
LOOK_EVERY = 16

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Remembers the signal that asked to stop.

    Attributes:
        signal: SIGINT or SIGTERM once it has come, None before. With several processes: once all
            know of it, see `is_due`.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._noted: signal.Signals | None = None
        self._asked = 0

    def __bool__(self) -> bool:
        return self.signal is not None

    def note(self, number: signal.Signals) -> None:
        """Says that the signal has come, to this process."""
        self._noted = number
        if not jax.distributed.is_initialized():
            self.signal = number

    def is_due(self) -> bool:
        """Whether to stop now; with several processes all of them ask equally often.

        They then stop together, some calls after the first of them was asked to.
        """
        if jax.distributed.is_initialized():
            self._asked += 1
            if self._asked % LOOK_EVERY == 0 and not self:
                found = int(gather_numbers([self._noted or 0]).max())
                self.signal = signal.Signals(found) if found else None
        return bool(self)

    @property
    def exit_code(self) -> int:
        """What a shell expects after a signal: 130 for SIGINT, 143 for SIGTERM."""
        return 0 if self.signal is None else 128 + self.signal


@contextlib.contextmanager
def interruptible(announce: Callable[[str], None] = lambda name: None) -> Iterator[Interrupt]:
    """While it lasts, SIGINT and SIGTERM set the `Interrupt` that it gives, and nothing else.

    A second signal does what it always did, for those who cannot wait. Outside of the main thread,
    where Python allows no handlers, nothing is caught.

    Args:
        announce: Called at once with the name of the first signal, by another thread: the main one
            may be in the middle of a compilation, during which Python runs no handlers.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    previous = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        interrupt.note(signal.Signals(number))
        restore()

    for number in _SIGNALS:
        signal.signal(number, note)
    try:
        with _announced(announce):
            yield interrupt
    finally:
        restore()


@contextlib.contextmanager
def _announced(announce: Callable[[str], None]) -> Iterator[None]:
    """While it lasts, the first signal is announced by a thread."""
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def wait() -> None:
        while number := receiver.recv(1):
            if number[0] in _SIGNALS:
                announce(signal.Signals(number[0]).name)
                return

    thread = threading.Thread(target=wait, name="signals", daemon=True)
    thread.start()
    # The interpreter writes the number of each signal there as soon as it comes.
    previous = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        sender.close()
        thread.join()
        receiver.close()
