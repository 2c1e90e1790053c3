"""Batches of a stream: how they are filled, when they end, and what is used of them."""

from __future__ import annotations

import datetime
import json
import threading
import time

import numpy as np
import pyarrow as pa
import pytest

from jaxrec.data import DataError, Pipeline, Shard, StreamBatches
from jaxrec.data.streams.batches import ResumableBatches
from jaxrec.data.streams.source import Position, Rows, Source, SourceReader


class Numbers(Source):
    """A source of one part: message ``i`` has the row ``id = i`` and came at second ``10 * i``."""

    schema = pa.schema([("id", pa.int64())])

    def __init__(self, count, columns=None):
        self.count, self.columns = count, columns or {}
        self.commits = []

    def open(self, positions, shard, *, has_end):
        return NumbersReader(self, positions.get("numbers", Position(0)).offset, has_end)


class NumbersReader(SourceReader):
    def __init__(self, source, first, has_end):
        self.source, self.next, self.has_end = source, first, has_end
        self.is_closed = False
        self.end = source.count

    @property
    def starts(self):
        return {"numbers": Position(self.next)}

    @property
    def has_ended(self):
        return self.has_end and self.next >= self.end

    def read(self, rows):
        stop = min(self.next + rows, self.end if self.has_end else self.source.count)
        offset = np.arange(self.next, stop)
        if not len(offset):
            time.sleep(0.001)
            return None
        self.next = stop
        columns = {name: make(offset) for name, make in self.source.columns.items()}
        return Rows(
            pa.table({"id": offset, **columns}),
            ("numbers",),
            np.zeros(len(offset), np.int64),
            offset,
            np.zeros(len(offset), np.int64),
            np.arange(1, len(offset) + 1),
            np.ones(len(offset), bool),
            10.0 * offset,
        )

    def describe(self, part, offset, row):
        return f"message {offset}"

    def lag(self, positions):
        return {"numbers": self.source.count - positions["numbers"].offset}

    def commit(self, positions):
        self.source.commits.append(positions["numbers"].offset)

    def close(self):
        self.is_closed = True


def sizes(batches):
    return [len(batch) for batch in batches]


def test_is_resumable():
    assert isinstance(StreamBatches(source=Numbers(1), batch_size=1), ResumableBatches)


def test_ends():
    assert sizes(StreamBatches(source=Numbers(10), batch_size=4, until="caught_up")) == [4, 4, 2]
    assert sizes(StreamBatches(source=Numbers(10), batch_size=4, num_batches=2)) == [4, 4]
    started = time.monotonic()
    assert sizes(StreamBatches(source=Numbers(10), batch_size=4, seconds=0.05)) == [4, 4]
    assert time.monotonic() - started >= 0.05
    calls = iter([False] * 9 + [True])
    stopped = StreamBatches(source=Numbers(10), batch_size=4, stop=lambda: next(calls))
    assert sizes(stopped) == [4, 4]
    # Rows that come meanwhile are not part of what was there.
    source = Numbers(10)
    batches = StreamBatches(source=source, batch_size=4, until="caught_up")
    iterator = iter(batches)
    first = next(iterator)
    source.count = 100
    assert sizes([first, *iterator]) == [4, 4, 2]


def test_interrupt_wakes_a_waiting_reader():
    batches = StreamBatches(source=Numbers(5), batch_size=4)
    with Pipeline(batches) as pipeline:
        next(pipeline)
        timer = threading.Timer(0.05, batches.interrupt)
        timer.start()
        assert next(pipeline, None) is None
        timer.join()
    assert batches._iteration.reader.is_closed


def test_small_batches_after_a_wait():
    batches = StreamBatches(source=Numbers(5), batch_size=4, max_wait=0.02, seconds=0.3)
    assert sizes(batches) == [4, 1]
    shared = StreamBatches(
        source=Numbers(5), batch_size=4, max_wait=0.0, num_batches=4, shard=Shard(0, 2)
    )
    assert sizes(shared) == [4, 1, 0, 0]
    assert next(iter(shared)).schema == Numbers.schema


def test_used_batches():
    batches = StreamBatches(source=Numbers(20), batch_size=4)
    assert json.loads(batches.state()) == {"positions": {}, "seconds": None}
    batches.advance(1)  # nothing was given
    iterator = iter(batches)
    for _ in range(3):
        next(iterator)
    assert json.loads(batches.state())["positions"] == {"numbers": [0, 0]}
    batches.advance(1)
    batches.advance(1)
    assert batches.lag() == {"numbers": 12}
    assert json.loads(batches.state()) == {"positions": {"numbers": [8, 0]}, "seconds": 70.0}
    batches.advance(10)  # as when others add batches
    assert json.loads(batches.state())["positions"] == {"numbers": [12, 0]}
    # Reported at once, then every few seconds.
    assert batches.source.commits == [4]
    assert next(iter(batches))["id"].to_pylist() == [12, 13, 14, 15]
    batches.restore(['{"positions": {"numbers": [3, 0]}, "seconds": 20}'])
    assert next(iter(batches))["id"].to_pylist() == [3, 4, 5, 6]
    assert batches.newest_seconds == 20


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"positions": {"a": 1}, "seconds": 0}', "null"])
def test_damaged_state(text):
    batches = StreamBatches(source=Numbers(20), batch_size=4)
    with pytest.raises(DataError, match="this is no state of StreamBatches"):
        batches.restore([text])


DAY = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
TIMES = {
    "messages": (None, "s", None, lambda i: 10.0 * i),
    "seconds": ("t", "s", lambda offset: 100.0 + offset, lambda i: 100.0 + i),
    "milliseconds": ("t", "ms", lambda offset: 1000 * offset, lambda i: float(i)),
    "times": (
        "t",
        "s",
        lambda offset: pa.array(
            [DAY + datetime.timedelta(hours=int(i)) for i in offset], pa.timestamp("us", "UTC")
        ),
        lambda i: DAY.timestamp() + 3600 * i,
    ),
    "nulls": ("t", "s", lambda offset: pa.nulls(len(offset), pa.float64()), lambda i: None),
}


@pytest.mark.every_case
@pytest.mark.parametrize(("column", "unit", "make", "expected"), TIMES.values(), ids=TIMES.keys())
def test_event_time(column, unit, make, expected):
    source = Numbers(9, {} if make is None else {"t": make})
    options = {"event_time": column, "event_time_unit": unit}
    batches = StreamBatches(source=source, batch_size=3, **options)
    assert (batches.newest_seconds, batches.clock()) == (None, 0.0)
    iterator = iter(batches)
    next(iterator)
    next(iterator)
    batches.advance(1)
    assert batches.newest_seconds == expected(2)
    assert batches.clock() == (expected(5) or 0.0)


def test_bad_event_times():
    for make, problem in (
        (lambda offset: pa.array([str(i) for i in offset]), "'t' of event times is of type string"),
        (None, "no column 't' of event times; the columns are id"),
    ):
        source = Numbers(9, {} if make is None else {"t": make})
        with pytest.raises(DataError, match=problem):
            next(iter(StreamBatches(source=source, batch_size=3, event_time="t")))


def test_errors_of_the_transform():
    def refuse(table):
        if not set(table["id"].to_pylist()).isdisjoint({6, 8}):
            raise DataError("bad id")
        return table

    batches = StreamBatches(source=Numbers(20), batch_size=5, transform=refuse)
    iterator = iter(batches)
    next(iterator)
    with pytest.raises(DataError, match="message 6: bad id"):
        next(iterator)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"num_batches": 0},
        {"seconds": -1.0},
        {"max_wait": -1.0},
        {"until": "later"},
        {"event_time_unit": "h"},
    ],
    ids=str,
)
def test_options(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        StreamBatches(**{"source": Numbers(1), "batch_size": 1, **options})
