from __future__ import annotations

import hashlib
import os
import signal
import threading

import pytest

from jaxrec.train.interrupt import interruptible


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_is_remembered(number, code):
    before = signal.getsignal(number)
    with interruptible() as interrupt:
        assert not interrupt
        assert interrupt.exit_code == 0
        signal.raise_signal(number)
        assert interrupt.signal == number
        assert interrupt.exit_code == code
        assert signal.getsignal(number) is before  # a second one acts at once
    assert signal.getsignal(number) is before


@pytest.fixture
def _interrupts_raise():
    """Gives SIGINT its effect: shells start what runs in the background with it ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("_interrupts_raise")
def test_a_second_interrupt_stops_at_once():
    # `os.kill` may reach another thread, where two signals can become one.
    with interruptible():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_first_signal_is_announced_at_once():
    """While the main thread is where Python runs no handlers, as in a compilation."""
    begun, told = threading.Event(), []

    def announce(name):
        told.append((name, interrupt.signal))

    def send():
        begun.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    with interruptible(announce) as interrupt:
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"long", b"call", 2_000_000)
        assert interrupt.signal == signal.SIGTERM
        sender.join()
    assert told == [("SIGTERM", None)], "before the handler ran"
    previous = signal.set_wakeup_fd(-1)
    assert previous == -1, "all is as it was"


def test_other_threads_get_none():
    entered = []

    def run():
        with interruptible() as interrupt:
            entered.append(bool(interrupt))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert entered == [False]
