"""Rows on their way to a store and back, and stores that fail."""

from __future__ import annotations

import threading
import time

import jax
import numpy as np
import pytest

from jaxrec.embed.checkpoint_view import LogicalTable
from jaxrec.tier.ids.id_map import num_cores
from jaxrec.tier.rows.records import RecordLayout
from jaxrec.tier.rows.transfer import (
    _MOST_SENT,
    RowTransfer,
    announce_all,
    fetch_all,
    send_all,
)
from jaxrec.tier.rows.under_way import WrittenIds
from jaxrec.tier.stores.memory_store import MemoryStore

TIMEOUT = 20


def shape(*sizes: int, dtype: object = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def layout_of(dim: int = 2) -> RecordLayout:
    return RecordLayout.of([LogicalTable(shape(10, dim), {"sum": shape(10)})])


def rows_of(ids: np.ndarray, number: float = 0.0) -> list[dict[str, np.ndarray]]:
    """Rows and state of one table that tell their id and a number."""
    rows = np.stack([ids, np.full(ids.size, number)], axis=1).astype(np.float32)
    return [{"rows": rows, "sum": ids.astype(np.float32) + 1}]


def assert_rows(tables: list[dict[str, np.ndarray]], ids: np.ndarray, number: float = 0.0) -> None:
    (expected,) = rows_of(ids, number)
    assert len(tables) == 1
    assert tables[0].keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(tables[0][name], array)


class SlowStore(MemoryStore):
    """A store that puts when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_put, self.puts = threading.Event(), 0

    def put(self, ids, records):
        assert self.may_put.wait(TIMEOUT)
        super().put(ids, records)
        self.puts += 1


class RemoteStore(SlowStore):
    """A store that waits for something outside of the process."""

    in_memory = False


class BadStore(MemoryStore):
    """A store that fails to put or to get."""

    def __init__(self, bad: str) -> None:
        super().__init__()
        self.bad = bad

    def __repr__(self) -> str:
        return "BadStore()"

    def put(self, ids, records):
        if self.bad == "put":
            raise OSError("no space left")
        super().put(ids, records)

    def get(self, ids):
        if self.bad == "get":
            raise OSError("connection lost")
        return super().get(ids)


# Rows on their way.


def test_rows_go_and_return():
    transfer = RowTransfer(MemoryStore(), layout_of())
    ids = np.array([5, -(2**63), 7])
    transfer.send(transfer.announce(ids), lambda: rows_of(ids, 1))
    transfer.wait()
    assert len(transfer.store) == 3
    found, tables = transfer.fetch(np.array([7, 8, 5])).result()
    assert found.tolist() == [True, False, True]
    assert_rows(tables, np.array([7, 5]), 1)


def test_no_rows():
    transfer = RowTransfer(MemoryStore(), layout_of())
    found, tables = transfer.fetch(np.array([7, 8])).result()
    assert not found.any()
    assert_rows(tables, np.zeros(0, np.int64))


def test_stores_that_wait_do_not_wait_for_each_other():
    transfers = [RowTransfer(RemoteStore(), layout_of()) for _ in range(2 * num_cores() + 1)]
    ids = np.array([5, 6])
    for transfer in transfers:
        transfer.send(transfer.announce(ids), lambda: rows_of(ids, 1))
    for transfer in reversed(transfers):  # the last store is the first that may put
        transfer.store.may_put.set()
        transfer.wait()
        assert transfer.store.puts == 1


def test_stores_in_memory_share_threads():
    ids = np.array([5, 6])
    for _ in range(2):
        transfers = [RowTransfer(MemoryStore(), layout_of()) for _ in range(2 * num_cores() + 1)]
        for number, transfer in enumerate(transfers):
            transfer.send(transfer.announce(ids), lambda number=number: rows_of(ids, number))
        for number, transfer in enumerate(transfers):
            found, tables = transfer.fetch(ids).result()
            assert found.all()
            assert_rows(tables, ids, number)
        used = {transfer._writer for transfer in transfers}
        assert len(used) == num_cores()


def test_a_row_on_its_way_is_found():
    transfer = RowTransfer(SlowStore(), layout_of())
    ids = np.array([5, 6])
    transfer.send(transfer.announce(ids), lambda: rows_of(ids, 1))
    found, tables = transfer.fetch(np.array([6, 9])).result()
    assert found.tolist() == [True, False]
    assert_rows(tables, np.array([6]), 1)
    assert transfer.store.puts == 0
    transfer.store.may_put.set()
    transfer.wait()
    assert transfer.store.puts == 1


def test_the_latest_eviction_counts():
    """An id that was evicted, returned and was evicted again, all before the store was written."""
    store = SlowStore()
    transfer = RowTransfer(store, layout_of())
    ids = np.array([5, 6])
    transfer.send(transfer.announce(ids), lambda: rows_of(ids, 1))
    transfer.send(transfer.announce(ids[:1]), lambda: rows_of(ids[:1], 2))
    fetched = [transfer.fetch(ids)]
    store.may_put.set()
    transfer.wait()
    fetched.append(transfer.fetch(ids))
    for each in fetched:
        found, tables = each.result()
        assert found.tolist() == [True, True]
        np.testing.assert_array_equal(tables[0]["rows"], [[5, 2], [6, 1]])


def test_a_row_that_is_announced_is_waited_for():
    transfer = RowTransfer(MemoryStore(), layout_of())
    ids = np.array([5])
    evicted = transfer.announce(ids)
    fetched = transfer.fetch(ids)
    transfer.send(evicted, lambda: rows_of(ids, 3))
    _, tables = fetched.result()
    assert_rows(tables, ids, 3)


def test_a_fetch_does_not_see_later_evictions():
    transfer = RowTransfer(SlowStore(), layout_of())
    ids = np.array([5])
    fetched = transfer.fetch(ids)
    transfer.send(transfer.announce(ids), lambda: rows_of(ids, 1))
    assert fetched.result()[0].tolist() == [False]
    transfer.store.may_put.set()
    transfer.wait()


def test_random_traffic():
    """Ids leave and return in a random order; each returns as it left."""
    rng = np.random.default_rng(0)
    transfer = RowTransfer(MemoryStore(), layout_of())
    latest = {}
    for number in range(300):
        ids = rng.choice(50, rng.integers(1, 8), replace=False)
        transfer.send(transfer.announce(ids), lambda ids=ids, number=number: rows_of(ids, number))
        latest |= dict.fromkeys(ids.tolist(), number)
        wanted = rng.choice(60, 5, replace=False)
        found, tables = transfer.fetch(wanted).result()
        assert found.tolist() == [i in latest for i in wanted.tolist()]
        expected = [[i, latest[i]] for i in wanted[found].tolist()]
        assert tables[0]["rows"].tolist() == expected
        transfer.check()
    transfer.wait()
    assert len(transfer.store) == len(latest)
    assert len(transfer._under_way) == 0


def test_a_slow_store_makes_the_step_wait():
    transfer, ids, sent = RowTransfer(SlowStore(), layout_of()), np.array([5]), []

    def train():
        for number in range(100):
            transfer.send(transfer.announce(ids), lambda number=number: rows_of(ids, number))
            sent.append(number)

    thread = threading.Thread(target=train)
    thread.start()
    end = time.monotonic() + TIMEOUT
    while len(sent) < _MOST_SENT and time.monotonic() < end:
        time.sleep(0.01)
    thread.join(0.1)
    assert len(sent) == _MOST_SENT
    transfer.store.may_put.set()
    thread.join(TIMEOUT)
    transfer.wait()
    assert len(sent) == 100
    assert_rows(transfer.fetch(ids).result()[1], ids, 99)


def test_watchers_see_each_write_of_the_store():
    transfer = RowTransfer(MemoryStore(), layout_of())
    written = WrittenIds()
    transfer.watchers.add(written)
    assert written.take() is None
    ids = np.array([5, 6])
    transfer.send(transfer.announce(ids), lambda: rows_of(ids, 1))
    transfer.wait()
    transfer.put(np.array([9]), rows_of(np.array([9]), 1))
    transfer.delete(np.array([6, 11]))
    assert written.take().tolist() == [5, 6, 9, 11]
    transfer.replaced()
    assert written.take() is None
    assert written.take().tolist() == []


class OddStore(SlowStore):
    """A store whose `get` returns its arrays changed."""

    def __init__(self, change) -> None:
        super().__init__()
        self.change = change

    def get(self, ids):
        return self.change(*super().get(ids))


def frozen(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


@pytest.mark.parametrize(
    "change",
    [
        lambda found, records: (frozen(found), frozen(records)),
        lambda found, records: (found[::-1][::-1], np.asfortranarray(records)),
    ],
    ids=["read_only", "not_contiguous"],
)
def test_rows_under_way_replace_those_of_any_arrays(change):
    transfer = RowTransfer(OddStore(change), layout_of())
    transfer.store.may_put.set()
    ids = np.array([5, 6, 7])
    transfer.send(transfer.announce(ids), lambda: rows_of(ids, 1))
    transfer.wait()
    transfer.store.may_put.clear()
    transfer.send(transfer.announce(ids[:2]), lambda: rows_of(ids[:2], 2))
    found, tables = transfer.fetch(ids).result()
    assert found.all()
    for at, number in [(slice(0, 2), 2), (slice(2, 3), 1)]:
        part = [{name: array[at] for name, array in tables[0].items()}]
        assert_rows(part, ids[at], number)
    transfer.store.may_put.set()
    transfer.wait()


# Failures.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found, records: (found, records[:, 1:]), r"uint8 \[1, 11\]; .* uint8 \[1, 12\]"),
        (lambda found, records: (found, records.view(np.int8)), r"int8 \[1, 12\]; a RowStore"),
        (lambda found, records: (found[:0], records), r"get of 1 ids returned bool \[0\]"),
    ],
    ids=["width", "type", "flags"],
)
def test_a_store_that_returns_other_arrays(change, message):
    store = OddStore(change)
    transfer, ids = RowTransfer(store, layout_of()), np.array([5])
    # A row under way is copied into the record: a narrower one would be written past its end.
    transfer.send(transfer.announce(ids), lambda: rows_of(ids, 1))
    with pytest.raises(RuntimeError, match=message):
        transfer.fetch(ids).result()
    store.may_put.set()
    transfer.wait()


def failed_put() -> RowTransfer:
    transfer = RowTransfer(BadStore("put"), layout_of())
    ids = np.array([5])
    transfer.send(transfer.announce(ids), lambda: rows_of(ids))
    return transfer


PUT_MESSAGE = (
    r"evicted rows could not be written to BadStore\(\): OSError\('no space left'\); the last "
    "checkpoint is whole"
)


def test_a_store_that_cannot_be_written():
    transfer = failed_put()
    with pytest.raises(RuntimeError, match=PUT_MESSAGE):
        transfer.wait()
    with pytest.raises(RuntimeError, match=PUT_MESSAGE):
        transfer.check()
    # What came so far is known all the same.
    assert transfer.fetch(np.array([6])).result()[0].tolist() == [False]


def test_rows_that_cannot_be_read_from_the_devices():
    def rows():
        raise MemoryError("device")

    transfer = RowTransfer(MemoryStore(), layout_of())
    ids = np.array([5])
    evicted = transfer.announce(ids)
    fetched = transfer.fetch(ids)
    transfer.send(evicted, rows)
    with pytest.raises(RuntimeError, match=r"could not be written to .*MemoryError\('device'\)"):
        fetched.result()


def test_fewer_rows_than_were_announced():
    """Native code reads a row for each id, also where an id returns before the store is written."""
    transfer = RowTransfer(MemoryStore(), layout_of())
    evicted = transfer.announce(np.array([5, 6, 7]))
    fetched = transfer.fetch(np.array([7]))
    transfer.send(evicted, lambda: rows_of(np.array([5, 6])))
    with pytest.raises(RuntimeError, match="3 ids were announced, got 2 rows"):
        fetched.result()


def test_a_store_that_cannot_be_read():
    transfer = RowTransfer(BadStore("get"), layout_of())
    message = (
        r"rows of ids that return could not be read from BadStore\(\): "
        r"OSError\('connection lost'\); the last checkpoint is whole"
    )
    with pytest.raises(RuntimeError, match=message) as caught:
        transfer.fetch(np.array([5])).result()
    assert isinstance(caught.value.__cause__, OSError)


class OneFails(MemoryStore):
    """A class of stores of which one fails."""

    fails = False

    def get(self, ids):
        if self.fails:
            raise OSError("connection lost")
        return super().get(ids)

    def put(self, ids, records):
        if self.fails:
            raise OSError("no space left")
        super().put(ids, records)


@pytest.mark.parametrize("task", ["read", "written"])
def test_an_error_is_that_of_one_store_among_those_of_its_thread(task):
    transfers = [RowTransfer(OneFails(), layout_of()) for _ in range(3 * num_cores())]
    bad, *good = transfers
    ids = np.array([5, 7])
    if task == "read":
        for transfer in transfers:
            transfer.put(ids, rows_of(ids))
        bad.store.fails = True
        fetched = fetch_all(transfers, [ids] * len(transfers))
        with pytest.raises(RuntimeError, match="connection lost"):
            fetched[0].result()
        for each in fetched[1:]:
            found, tables = each.result()
            assert found.all()
            assert_rows(tables, ids)
        return
    bad.store.fails = True
    evicted = announce_all(transfers, [ids] * len(transfers))
    send_all(
        [(each, rows, lambda: rows_of(ids)) for each, rows in zip(transfers, evicted, strict=True)]
    )
    with pytest.raises(RuntimeError, match="no space left"):
        bad.wait()
    for each in good:
        each.wait()
        assert_rows(each.layout.unpack(each.store.get(ids)[1]), ids)


def test_a_store_of_records_of_another_width():
    store = MemoryStore()
    RowTransfer(store, layout_of())
    with pytest.raises(ValueError, match="a memory store serves one vocabulary"):
        RowTransfer(store, layout_of(3))
