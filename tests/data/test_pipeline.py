from __future__ import annotations

import concurrent.futures
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxrec.data import Pipeline
from jaxrec.data.pipeline import ordered_map

pytestmark = pytest.mark.every_case


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


@pytest.mark.parametrize(("stages", "ahead", "most"), [(1, 1, 4), (0, 2, 3)])
def test_runs_no_further_ahead_than_told(stages, ahead, most):
    read = []

    def reader():
        for i in range(100):
            read.append(i)
            yield i

    with Pipeline(reader(), *[lambda x: x] * stages, ahead=ahead) as batches:
        assert next(batches) == 0
        # As many wait in each queue as may, and each thread has one at hand.
        until = time.monotonic() + 5
        while len(read) < 1 + most and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)
        assert len(read) == 1 + most
        assert list(batches) == list(range(1, 100))


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
        "import signal, time\nfrom jaxrec.data import pipeline\npipeline.CLOSE_SECONDS = 0.2\n"
        # A shell starts what runs in the background with this signal ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
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


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield pool


def test_results_come_in_order(pool):
    """The first is the last to be ready."""
    others = threading.Barrier(2)

    def square(x):
        if x < 2:
            others.wait(5)  # 0 is computed while 1 is
        return x * x

    assert list(ordered_map(square, range(6), pool, ahead=3)) == [0, 1, 4, 9, 16, 25]


def test_so_many_results_are_ahead(pool):
    taken = []
    results = ordered_map(taken.append, range(10), pool, ahead=3)
    next(results)
    pool.shutdown(wait=False)
    assert set(taken) <= {0, 1, 2, 3}
    results.close()


def test_an_error_comes_in_its_place(pool):
    results = ordered_map(lambda x: 1 // x, [1, 0, 1], pool, ahead=2)
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)
