from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxrec.train import Pipeline


def threads():
    return [t for t in threading.enumerate() if t.name == "reader" or t.name.startswith("stage")]


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("stages", [0, 1, 3])
def test_same_batches_in_order(ahead, stages):
    with Pipeline(range(50), *[lambda x: x + 1] * stages, ahead=ahead) as batches:
        assert list(batches) == [i + stages for i in range(50)]
        assert next(batches, None) is None
    assert threads() == []


def test_stages_run_at_once():
    """Three stages of 20 ms each take little more than 20 ms a batch."""

    def stage(x):
        time.sleep(0.02)
        return x

    def reader():
        for i in range(20):
            time.sleep(0.02)
            yield i

    start = time.perf_counter()
    with Pipeline(reader(), stage, stage) as batches:
        assert list(batches) == list(range(20))
    assert time.perf_counter() - start < 0.8 * 60 * 0.02


def test_runs_no_further_ahead_than_told():
    read = []

    def reader():
        for i in range(100):
            read.append(i)
            yield i

    with Pipeline(reader(), lambda x: x) as batches:
        assert next(batches) == 0
        time.sleep(0.3)
        # One waits in each of two queues, one is at hand in each of two threads.
        assert len(read) <= 1 + 4


@pytest.mark.parametrize("where", ["reader", "stage", "iter"])
def test_errors_come_in_their_place(where):
    def reader():
        for i in range(5):
            if where == "reader" and i == 3:
                raise OSError("disk on fire")
            yield i

    def stage(x):
        if where == "stage" and x == 3:
            raise OSError("disk on fire")
        return x

    class NoIterator:
        def __iter__(self):
            raise OSError("disk on fire")

    got: list[int] = []
    source = NoIterator() if where == "iter" else reader()
    with Pipeline(source, stage, stage) as batches, pytest.raises(OSError, match="on fire"):
        got.extend(batches)
    assert got == ([] if where == "iter" else [0, 1, 2])
    assert threads() == []


def test_leaving_early_closes_the_source():
    closed = threading.Event()

    def reader():
        try:
            while True:
                yield 1
        finally:
            closed.set()

    def consume():
        with Pipeline(reader(), lambda x: x) as batches:
            next(batches)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert closed.wait(5)
    assert threads() == []


def test_ctrl_c_ends_a_program_that_waits_for_a_slow_reader():
    program = (
        "import time\nfrom jaxrec.train import pipeline\npipeline.CLOSE_SECONDS = 0.2\n"
        "def reader():\n    yield 1\n    time.sleep(100)\n"
        "with pipeline.Pipeline(reader(), abs) as batches:\n"
        "    for batch in batches:\n        print('one', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "one\n"
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert time.monotonic() - start < 20
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors


def test_ahead_is_a_number_of_batches():
    with pytest.raises(ValueError, match="ahead is 1 or more, got 0"):
        Pipeline([], ahead=0)
