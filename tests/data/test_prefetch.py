from __future__ import annotations

import concurrent.futures
import threading

import pytest

from jaxrec.data import prefetch
from jaxrec.data.prefetch import ordered_map


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_same_items():
    assert list(prefetch(iter(range(20)), size=3)) == list(range(20))
    assert threads() == []


def test_errors_come_where_they_happened():
    def items():
        yield 1
        raise RuntimeError("broken")

    stream = prefetch(items())
    assert next(stream) == 1
    with pytest.raises(RuntimeError, match="broken"):
        next(stream)
    assert threads() == []


def test_closing_ends_the_thread_and_the_source():
    closed = []

    def items():
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    stream = prefetch(items(), size=1)
    next(stream)
    assert len(threads()) == 1
    stream.close()
    assert threads() == []
    assert closed == [True]


def test_runs_at_most_size_ahead():
    made, half = [], threading.Event()

    def items():
        for i in range(10):
            made.append(i)
            if i == 3:
                half.set()
            yield i

    stream = prefetch(items(), size=2)
    assert next(stream) == 0
    assert half.wait(5)  # 0 is out, 1 and 2 are ready, 3 waits for room
    assert max(made) == 3
    assert list(stream) == list(range(1, 10))


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
    assert taken <= [0, 1, 2, 3]
    results.close()


def test_an_error_comes_in_its_place(pool):
    results = ordered_map(lambda x: 1 // x, [1, 0, 1], pool, ahead=2)
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)
