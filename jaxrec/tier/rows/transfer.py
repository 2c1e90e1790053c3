"""Rows on their way between the devices and a row store."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrec.mesh.agree import gather_flags, gather_rows, in_all_processes
from jaxrec.tier.ids.id_map import num_cores
from jaxrec.tier.rows.records import RecordLayout, StoreTraffic
from jaxrec.tier.rows.under_way import (
    EvictedRows,
    RowsUnderWay,
    WantedRows,
    WrittenIds,
    add_all,
    find_all,
)
from jaxrec.tier.stores.row_store import RecordFormat, RowStore
from jaxrec.tier.stores.urls import Division

_Thread = concurrent.futures.ThreadPoolExecutor
_Future = concurrent.futures.Future

# Most evictions in memory that wait for the store.
_MOST_SENT = 16


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """Rows that were requested from a row store, with those still on their way to it.

    Attributes:
        transfer: The transfer that reads them.
        ids: The ids of the rows, int64 ``[n]``.
        owners: Process whose store has each row, int ``[n]``; None: this process's store has all.
        stored: Future of this process's own ids: whether each has a row, bool ``[m]``, and the
            records of those that have one. Records of ``under_way`` rows are out of date.
        under_way: Rows that were on their way to the store when they were requested.
    """

    transfer: RowTransfer
    ids: np.ndarray
    owners: np.ndarray | None
    stored: concurrent.futures.Future[tuple[np.ndarray, np.ndarray]]
    under_way: WantedRows

    def are_stored(self) -> np.ndarray:
        """Wait for the store; return whether each id has a row there or on its way, bool ``[n]``.

        With a divided store every process calls this. A read error raises a RuntimeError.
        """
        return _flags_of_all([self], [_attempt(lambda: (self._read()[0], []))])[0]

    def result(self) -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
        """Wait for the rows; call it after `send_all` of all earlier evictions.

        Returns whether each id has a row, bool ``[n]``, and for each table the rows and states of
        the ids that have one. With a divided store every process calls this, and gets the rows of
        all stores.
        """
        own = _attempt(self._own_records)
        (found,) = _flags_of_all([self], [own])
        records = own.records
        if self.owners is not None:
            parts = gather_rows(records)
            records = np.empty((np.count_nonzero(found), records.shape[1]), np.uint8)
            for process, part in enumerate(parts):
                records[self.owners[found] == process] = part
        return found, self.transfer.layout.unpack(records)

    def _own_records(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for this process's store; return the flag of each id and the records found."""
        if self.owners is not None:
            self.transfer.check()
        found, records = self._read()
        if len(self.under_way):
            # The wait raises no error, so that `check` can raise the one of the writer, which says
            # more.
            self.under_way.wait()
            self.transfer.check()
            places = self.under_way.positions
            if len(records) < found.size:
                places = (np.cumsum(found, dtype=np.int32) - 1)[places]
            self.under_way.copy_to(records, places)
        return found, records

    def _read(self) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self.stored.result()
        except Exception as error:
            raise RuntimeError(
                f"rows of ids that return could not be read from {self.transfer.store!r}: "
                f"{error!r}; the last checkpoint is whole"
            ) from error


def fetch_all(transfers: Sequence[RowTransfer], ids: Sequence[np.ndarray]) -> list[StoredRows]:
    """Start to read rows of distinct ids, int64 ``[n]`` for each transfer, in threads."""
    # A thread gets one task for all of its stores: a wake-up for each table of a model would take
    # longer than many reads.
    tasks: dict[_Thread, list[tuple[StoredRows, np.ndarray]]] = {}
    fetched = []
    own_ids = [each._own(of_transfer) for each, of_transfer in zip(transfers, ids, strict=True)]
    # Before the read is queued: a row that arrives at the store between the two is found twice, and
    # never missed.
    all_under_way = find_all([each._under_way for each in transfers], own_ids)
    for transfer, of_transfer, own, under_way in zip(
        transfers, ids, own_ids, all_under_way, strict=True
    ):
        stored = StoredRows(
            transfer, of_transfer, transfer.owners(of_transfer), _Future(), under_way
        )
        tasks.setdefault(transfer._reader, []).append((stored, own))
        fetched.append(stored)
    for thread, task in tasks.items():
        thread.submit(_read_all, task)
    return fetched


def _read_all(task: Sequence[tuple[StoredRows, np.ndarray]]) -> None:
    by_class: dict[type[RowStore], list[tuple[StoredRows, np.ndarray]]] = {}
    for stored, own in task:
        by_class.setdefault(type(stored.transfer.store), []).append((stored, own))
    for of_class in by_class.values():
        _read_together(of_class)


def _read_together(task: Sequence[tuple[StoredRows, np.ndarray]]) -> None:
    """Read from stores of one class; one by one after an error, which is of one store."""
    try:
        transfers = [stored.transfer for stored, _ in task]
        read = _get_all(transfers, [own for _, own in task])
        for (stored, _), (found, records) in zip(task, read, strict=True):
            found[stored.under_way.positions] = True
            stored.stored.set_result((found, records if found.all() else records[found]))
    except BaseException as error:
        left = [(stored, own) for stored, own in task if not stored.stored.done()]
        if len(task) > 1:
            for each in left:
                _read_together([each])
        else:
            left[0][0].stored.set_exception(error)


def _get_all(
    transfers: Sequence[RowTransfer], ids: Sequence[np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Read records of several stores of one class.

    Returns:
        For each store whether each id has a record, and the records; contiguous arrays that may be
        changed.
    """
    results = [
        (np.zeros(0, np.bool_), np.zeros((0, each.layout.width), np.uint8)) for each in transfers
    ]
    wanted = [number for number, of_store in enumerate(ids) if of_store.size]
    if not wanted:
        return results
    stores = [transfers[number].store for number in wanted]
    with contextlib.ExitStack() as clocks:
        for number in wanted:
            clocks.enter_context(transfers[number].traffic.reading(1 / len(wanted)))
        read = type(stores[0]).get_all(stores, [ids[number] for number in wanted])
    for number, (found, records) in zip(wanted, read, strict=True):
        # A store outside of this package may return anything, and native code copies from these
        # arrays.
        size, width = ids[number].size, transfers[number].layout.width
        given = [(array.shape, array.dtype) for array in (found, records)]
        if given != [((size,), np.dtype(np.bool_)), ((size, width), np.dtype(np.uint8))]:
            raise ValueError(
                f"get of {size} ids returned {found.dtype} {list(found.shape)} and "
                f"{records.dtype} {list(records.shape)}; a RowStore returns bool [{size}] and "
                f"uint8 {[size, width]}"
            )
        arrays = (np.require(array, requirements=["C", "W"]) for array in (found, records))
        results[number] = next(arrays), next(arrays)
    return results


def announce_all(transfers: Sequence[RowTransfer], ids: Sequence[np.ndarray]) -> list[EvictedRows]:
    """Register evicted ids, int64 ``[n]`` for each transfer, whose rows `send_all` brings later."""
    own_ids = [each._own(of_transfer) for each, of_transfer in zip(transfers, ids, strict=True)]
    return add_all([each._under_way for each in transfers], own_ids)


def send_all(sent: Sequence[tuple[RowTransfer, EvictedRows, Callable[[], Any]]]) -> None:
    """Send announced rows to their stores, in threads; wait if one has `_MOST_SENT` under way.

    Each item has a function that returns the rows and states of the tables (`jaxrec.embed.rows`)
    that this process owns.
    """
    tasks: dict[_Thread, list[tuple[RowTransfer, EvictedRows, Callable[[], Any]]]] = {}
    for transfer, evicted, rows in sent:
        with transfer.traffic.waiting():
            transfer._room.acquire()
        tasks.setdefault(transfer._writer, []).append((transfer, evicted, rows))
    for thread, task in tasks.items():
        thread.submit(_send_all, task)


def _send_all(task: Sequence[tuple[RowTransfer, EvictedRows, Callable[[], Any]]]) -> None:
    by_class: dict[type[RowStore], list[tuple[RowTransfer, EvictedRows, list[np.ndarray]]]] = {}
    for transfer, evicted, rows in task:
        try:
            parts = transfer.layout.parts(rows())
            if len(parts[0]) != evicted.ids.size:
                raise ValueError(f"{evicted.ids.size} ids were announced, got {len(parts[0])} rows")
            # Before the write: an id that returns at once gets its row from here.
            evicted.parts.set_result(parts)
            by_class.setdefault(type(transfer.store), []).append((transfer, evicted, parts))
        except BaseException as error:
            transfer._error = error
            evicted.parts.set_exception(error)
            transfer._room.release()
    for of_class in by_class.values():
        _write_together(of_class)
        for transfer, _, _ in of_class:
            transfer._room.release()


def _write_together(task: Sequence[tuple[RowTransfer, EvictedRows, list[np.ndarray]]]) -> None:
    """Write to stores of one class; one by one after an error, which is of one store."""
    try:
        with contextlib.ExitStack() as clocks:
            for transfer, evicted, _ in task:
                clocks.enter_context(transfer.traffic.writing(evicted.ids.size, 1 / len(task)))
            _put_all(
                [transfer for transfer, _, _ in task],
                [evicted.ids for _, evicted, _ in task],
                [parts for _, _, parts in task],
            )
        for transfer, evicted, _ in task:
            transfer._under_way.remove(evicted)
    except BaseException as error:
        if len(task) > 1:  # Records that are written again are the same.
            for each in task:
                _write_together([each])
        else:
            task[0][0]._error = error


def _put_all(
    transfers: Sequence[RowTransfer],
    ids: Sequence[np.ndarray],
    parts: Sequence[Sequence[np.ndarray]],
) -> None:
    """Write the records of several stores of one class, from their parts."""
    wanted = [number for number, of_store in enumerate(ids) if of_store.size]
    if not wanted:
        return
    for number in wanted:
        # Noted before the write: if it fails half way, some records have changed nevertheless.
        for watcher in transfers[number].watchers:
            watcher.add(ids[number])
    stores = [transfers[number].store for number in wanted]
    put_all = type(stores[0]).put_all
    put_all(stores, [ids[number] for number in wanted], [parts[number] for number in wanted])


def receive(fetched: Sequence[StoredRows]) -> list[tuple[np.ndarray, list[dict[str, np.ndarray]]]]:
    """Wait for rows of several stores, and count them; see `StoredRows.result`.

    With divided stores every process calls this. It returns the flags of all ids, but only the rows
    that this process owns.
    """
    parts = []
    for stored in fetched:
        with stored.transfer.traffic.waiting():
            parts.append(_attempt(stored._own_records))
    flags = _flags_of_all(fetched, parts)
    for stored, part in zip(fetched, parts, strict=True):
        stored.transfer.traffic.add_received(part.found)
    return [
        (found, stored.transfer.layout.unpack(part.records))
        for stored, part, found in zip(fetched, parts, flags, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """Result of a read of this process's store: flags ``found``, bool ``[n]``, and records.

    After an ``error`` there are no flags and records.
    """

    found: np.ndarray
    records: Any
    error: Exception | None = None


def _attempt(read: Callable[[], tuple[np.ndarray, Any]]) -> _Attempt:
    try:
        return _Attempt(*read())
    except Exception as error:
        return _Attempt(np.zeros(0, np.bool_), None, error)


def _flags_of_all(fetched: Sequence[StoredRows], parts: Sequence[_Attempt]) -> list[np.ndarray]:
    """Return whether each id has a row in its owner's store, for each of ``fetched``.

    If any process has an error, all of them raise a RuntimeError.
    """
    error = next((part.error for part in parts if part.error is not None), None)
    # One exchange for all tables. A process with an error takes part in it too: others would wait.
    owners = [stored.owners for stored in fetched if stored.owners is not None]
    if not owners:
        if error is not None:
            raise error
        return [part.found for part in parts]
    return gather_flags([part.found for part in parts], owners, error)


class RowTransfer:
    """Moves rows between the devices and a row store, which it opens, in threads.

    `fetch` also finds a row that is still on its way to the store. An error of the store is raised
    by the next `check`, and by `StoredRows.result`. After `divide`, several processes share the
    rows: all of them call the methods with the same ids, and each reads and writes the rows that it
    owns.
    """

    def __init__(
        self, store: RowStore, layout: RecordLayout, format: RecordFormat | None = None
    ) -> None:
        format = layout.record_format() if format is None else format
        store.open(format)
        self.store, self.layout = store, layout
        self.traffic = StoreTraffic(layout.width)
        self.watchers: weakref.WeakSet[WrittenIds] = weakref.WeakSet()
        # Number of rows of an earlier run, until a checkpoint takes their place.
        self.num_earlier = len(store)
        self._under_way = RowsUnderWay(format.num_ids)
        # A store slower than the training step makes the step wait, or rows would fill the memory.
        self._room = threading.BoundedSemaphore(_MOST_SENT)
        # A single writer keeps the order of evictions. With two, an older row of an id could
        # overwrite a newer one.
        self._writer, self._reader = next(_shared_threads()) if store.in_memory else _new_threads()
        self._error: BaseException | None = None
        self.division: Division | None = None

    def divide(self, process: int, num_processes: int) -> None:
        """Divide the rows among processes; rows in this store that others own are ignored."""
        self.division = Division(process, num_processes, self.store.format.num_ids)

    def owners(self, ids: np.ndarray) -> np.ndarray | None:
        """Return the process whose store has each id's row; None: this process's has all."""
        return None if self.division is None else self.division.owners(ids)

    def is_own(self, ids: np.ndarray) -> np.ndarray:
        """Return whether this process's store has each id's row, bool ``[n]``."""
        if self.division is None:
            return np.ones(ids.size, np.bool_)
        return self.division.is_own(ids)

    def announce(self, ids: np.ndarray) -> EvictedRows:
        """Register evicted ids, as `announce_all`."""
        return announce_all([self], [ids])[0]

    def send(self, evicted: EvictedRows, rows: Callable[[], Any]) -> None:
        """Send announced rows to the store, as `send_all`."""
        send_all([(self, evicted, rows)])

    def put(self, ids: np.ndarray, tables: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Write rows that are on the host to the store.

        ``tables`` has for each table its rows ``[n, ...]`` under ``"rows"``, and their state by
        name.
        """
        if self.division is not None:
            is_own = self.division.is_own(ids)
            ids = ids[is_own]
            tables = [{name: x[is_own] for name, x in table.items()} for table in tables]
        self._together(lambda: _put_all([self], [ids], [self.layout.parts(tables)]))

    def delete(self, ids: np.ndarray) -> None:
        """Remove the rows of ids from the store; ids without a row are skipped."""
        own = self._own(ids)
        if own.size:
            for watcher in self.watchers:
                watcher.add(own)
        # A process that owns none of the ids still takes part, or the others would wait for it.
        self._together(lambda: self.store.delete(own) if own.size else None)

    def _own(self, ids: np.ndarray) -> np.ndarray:
        return ids if self.division is None else ids[self.division.is_own(ids)]

    def _together(self, action: Callable[[], None]) -> None:
        """Run an action in all processes that share the rows; an error is raised in all."""
        # Stores that are not divided are each their process's own: their errors concern no other.
        if self.division is None:
            action()
        else:
            in_all_processes(action)

    def get(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read the records of all ids, after all sent rows have arrived in the stores.

        With a divided store every process calls this, and gets the records of all stores.
        """
        if self.division is None:
            return _get_all([self], [ids])[0]
        own = _attempt(lambda: _get_all([self], [self._own(ids)])[0])
        owners = self.division.owners(ids)
        (found,) = gather_flags([own.found], [owners], own.error)
        records = np.zeros((ids.size, self.layout.width), np.uint8)
        for process, part in enumerate(gather_rows(own.records)):
            records[owners == process] = part
        return found, records

    def scan(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the records of all stores, as `jaxrec.tier.RowStore.scan`.

        With a divided store every process calls this, and all get the same records.
        """
        if self.division is None:
            yield from self.store.scan(size)
            return
        # All processes yield together, so that each takes its share of `size`.
        own = self.scan_own(max(1, size // self.division.num_processes))
        none = np.zeros(0, np.int64), np.zeros((0, self.layout.width), np.uint8)
        while True:
            error = None
            ids, records = none
            try:
                ids, records = next(own, none)
            except Exception as raised:
                error = raised
            # As pairs of 32-bit words: JAX, which carries them, has no 64-bit integers by default.
            all_ids = np.concatenate(gather_rows(ids.view(np.uint32).reshape(-1, 2), error))
            if not all_ids.size:
                return
            yield all_ids.view(np.int64)[:, 0], np.concatenate(gather_rows(records))

    def scan_own(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the records that this process owns; no yielded part is empty."""
        for ids, records in self.store.scan(size):
            is_own = self.is_own(ids)
            if is_own.any():
                yield ids[is_own], records[is_own]

    def fetch(self, ids: np.ndarray) -> StoredRows:
        """Start to read the rows of distinct ids, int64 ``[n]``, in a thread."""
        return fetch_all([self], [ids])[0]

    def replaced(self) -> None:
        """Note that a checkpoint's records have replaced the store's."""
        self.num_earlier = 0
        for watcher in self.watchers:
            watcher.add_all()

    def check(self) -> None:
        """Raise a RuntimeError if evicted rows could not be written to the store."""
        if self._error is not None:
            raise RuntimeError(
                f"evicted rows could not be written to {self.store!r}: {self._error!r}; the "
                "last checkpoint is whole"
            ) from self._error

    def wait(self) -> None:
        """Wait until the store has all sent rows; raise the error of a failed write."""
        # The only writer runs its tasks in turn, so that this one follows all that were sent.
        self._writer.submit(lambda: None).result()
        self.check()
        self.store.flush()

    def wait_together(self) -> None:
        """Wait until the stores of all processes have all rows that were sent."""
        self._together(self.wait)


def _new_threads() -> tuple[_Thread, _Thread]:
    """Return two threads: one that writes to row stores, and one that reads them."""
    return _Thread(1, "row writer"), _Thread(1, "row reader")


@functools.cache
def _shared_threads() -> Iterator[tuple[_Thread, _Thread]]:
    """Return an endless cycle of thread pairs, as many as cores, for stores in memory."""
    # More threads than cores would wait for each other, with a switch at each call.
    return itertools.cycle([_new_threads() for _ in range(num_cores())])
