"""Values that a thread computes and writes are those of the foreground, in order, and complete."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from jaxrec.metrics import BackgroundWriter


class Recorder:
    def __init__(self, fails_at=None):
        self.written, self.threads, self.fails_at = [], set(), fails_at
        self.is_closed = False

    def write(self, step, values):
        assert not self.is_closed
        if step == self.fails_at:
            raise OSError("the disk is full")
        self.threads.add(threading.get_ident())
        self.written.append((step, dict(values)))

    def close(self):
        self.is_closed = True


def test_values_are_written_in_order_by_one_thread():
    recorder = Recorder()
    writer = BackgroundWriter(recorder)
    for step in range(20):
        writer.write(step, (lambda step=step: {"x": step}) if step % 2 else {"x": step})
    writer.wait()
    assert recorder.written == [(step, {"x": step}) for step in range(20)]
    assert recorder.threads.isdisjoint({threading.get_ident()})
    assert len(recorder.threads) == 1
    writer.close()
    assert recorder.is_closed
    with pytest.raises(ValueError, match="the writer is closed"):
        writer.write(20, {})


def test_writes_wait_for_the_oldest_where_too_many_wait():
    """So that no more than `max_waiting` states exist."""
    go_on, alive, largest = threading.Event(), [], []

    def compute():
        go_on.wait(10)
        largest.append(len(alive))
        alive.pop()
        return {}

    writer = BackgroundWriter(Recorder(), max_waiting=3)
    for step in range(8):
        alive.append(step)
        if step == 3:
            threading.Timer(0.05, go_on.set).start()
        writer.write(step, compute)
        assert go_on.is_set() == (step >= 3)
    writer.close()
    assert max(largest) <= 4


@pytest.mark.parametrize("kind", ["compute", "write"])
def test_errors_are_raised_in_the_calling_thread_once(kind):
    recorder = Recorder(fails_at=1 if kind == "write" else None)
    writer = BackgroundWriter(recorder)

    def fail():
        raise OSError("the disk is full")

    writer.write(0, {})
    writer.write(1, fail if kind == "compute" else {})
    with pytest.raises(OSError, match="disk is full"):  # noqa: PT012
        for step in range(2, 6):
            writer.write(step, {})
    writer.close()
    assert [step for step, _ in recorder.written] == [0]
    assert recorder.is_closed


def test_an_interrupt_while_it_waits_loses_nothing():
    recorder, go_on = Recorder(), threading.Event()
    writer = BackgroundWriter(recorder, max_waiting=1)

    def compute():
        go_on.wait(10)
        return {"x": 1}

    class Interrupted:
        """A future whose wait is interrupted once."""

        def __init__(self, future):
            self.future, self.is_first = future, True

        def done(self):
            return self.future.done()

        def exception(self):
            if self.is_first:
                self.is_first = False
                raise KeyboardInterrupt
            return self.future.exception()

        def result(self):
            return self.future.result()

    writer.write(1, compute)
    writer._waiting[0] = Interrupted(writer._waiting[0])
    with pytest.raises(KeyboardInterrupt):
        writer.write(2, {})
    go_on.set()
    writer.close()
    assert recorder.written == [(1, {"x": 1})]


def test_an_interrupted_program_writes_what_waits(tmp_path):
    """Ctrl-C ends the program without a call of `close`."""
    path = tmp_path / "metrics.jsonl"
    program = f"""
import time
from jaxrec.metrics import BackgroundWriter, JSONLinesWriter
writer = BackgroundWriter(JSONLinesWriter({str(path)!r}))
for step in range(2):
    writer.write(step, lambda: time.sleep(0.1) or {{"x": 1.0}})
raise KeyboardInterrupt
"""
    ended = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=False)
    assert b"KeyboardInterrupt" in ended.stderr
    assert len(path.read_text().splitlines()) == 2


def test_at_least_one_may_wait():
    with pytest.raises(ValueError, match="max_waiting is 0"):
        BackgroundWriter(Recorder(), max_waiting=0)
