from __future__ import annotations

import threading

import pytest

from jaxrec.data import prefetch


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
