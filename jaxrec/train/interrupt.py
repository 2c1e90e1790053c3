"""Signals that end training after the current step."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import jax

from jaxrec.mesh.agree import gather_numbers
from jaxrec.train.trainer import Callback, Trainer

# Number of steps between two exchanges of signals among processes, which wait for the devices.
EXCHANGE_EVERY = 16

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt(Callback):
    """Ends training after a signal; ``signal`` is SIGINT or SIGTERM, None before it arrives.

    With several processes it is set once all of them know of the signal; see `is_due`.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._noted: signal.Signals | None = None
        self._asked = 0

    def __bool__(self) -> bool:
        return self.signal is not None

    def note(self, number: signal.Signals) -> None:
        """Note that this process got a signal."""
        self._noted = number
        # A process that stopped at once would leave the others waiting in a collective.
        if not jax.distributed.is_initialized():
            self.signal = number

    def on_step_dispatched(self, trainer: Trainer, step: int) -> None:
        if self.is_due():
            trainer.should_stop = True

    def is_due(self) -> bool:
        """Return whether to stop now.

        Each of several processes must make the same calls. All of them return True at the same
        call, at most `EXCHANGE_EVERY` calls after the first got a signal.
        """
        if jax.distributed.is_initialized():
            self._asked += 1
            if self._asked % EXCHANGE_EVERY == 0 and not self:
                number = int(gather_numbers([self._noted or 0]).max())
                self.signal = signal.Signals(number) if number else None
        return bool(self)

    @property
    def exit_code(self) -> int:
        """Exit code that shells expect after a signal: 130 for SIGINT, 143 for SIGTERM; 0: none."""
        return 0 if self.signal is None else 128 + self.signal


@contextlib.contextmanager
def interruptible(announce: Callable[[str], None] = lambda name: None) -> Iterator[Interrupt]:
    """Yield an `Interrupt` that the first SIGINT or SIGTERM sets, instead of ending the program.

    A second signal has its usual effect. Outside of the main thread, where Python allows no signal
    handlers, none is set. Another thread calls ``announce`` with the signal's name at once.
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
        # Python runs signal handlers between the main thread's instructions, and a compilation is
        # one instruction: without another thread, Ctrl-C would show no effect until it ends.
        with _announced(announce):
            yield interrupt
    finally:
        restore()


@contextlib.contextmanager
def _announced(announce: Callable[[str], None]) -> Iterator[None]:
    """Within this context, call ``announce`` with the name of the first SIGINT or SIGTERM.

    The call comes from another thread.
    """
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
