from __future__ import annotations

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
        os.kill(os.getpid(), number)
        assert interrupt.signal == number
        assert interrupt.exit_code == code
        assert signal.getsignal(number) is before  # a second one acts at once
    assert signal.getsignal(number) is before


def test_a_second_interrupt_stops_at_once():
    with interruptible():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_other_threads_get_none():
    entered = []

    def run():
        with interruptible() as interrupt:
            entered.append(bool(interrupt))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert entered == [False]
