"""Rows on their way between the devices and a row store."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrec.tier.rows.record_layout import RecordLayout
from jaxrec.tier.rows.store_traffic import StoreTraffic
from jaxrec.tier.rows.under_way import EvictedRows, RowsUnderWay, WantedRows
from jaxrec.tier.rows.written_ids import WrittenIds
from jaxrec.tier.stores.row_store import RecordFormat, RowStore

# Evictions that wait for the store at most, in memory.
_MOST_SENT = 16


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """Rows that a store has, or that are on their way to it.

    Attributes:
        transfer: The transfer.
        stored: Future of whether each id has a row, bool ``[n]``, and of the records of those that
            have one; those of ``under_way`` are not up to date.
        under_way: Rows that were on their way to the store when they were asked for.
    """

    transfer: RowTransfer
    stored: concurrent.futures.Future[tuple[np.ndarray, np.ndarray]]
    under_way: tuple[WantedRows, ...]

    def are_stored(self) -> np.ndarray:
        """Wait for the store alone; return whether each id has a row there or on its way, bool.

        Raises:
            RuntimeError: A row could not be read.
        """
        return self._read()[0]

    def result(self) -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
        """Wait for the rows; call it after `RowTransfer.send` of all evictions before.

        Returns:
            Whether each id has a row, bool ``[n]``, and the rows and states of the tables, of ids
            that have one.

        Raises:
            RuntimeError: A row could not be read, or not be written before.
        """
        found, records = self._read()
        if self.under_way:
            place = np.cumsum(found) - 1
        for wanted in self.under_way:
            concurrent.futures.wait([wanted.evicted.records])
            self.transfer.check()
            records[place[wanted.positions]] = wanted.evicted.records.result()[wanted.index]
        return found, self.transfer.layout.unpack(records)

    def _read(self) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self.stored.result()
        except Exception as error:
            raise RuntimeError(
                f"rows of ids that return could not be read from {self.transfer.store!r}: "
                f"{error!r}; the last checkpoint is whole"
            ) from error


class RowTransfer:
    """Moves rows between the devices and a row store, in threads.

    A row that is on its way to the store is found all the same. An error of the store is raised by
    the next `check`, and by `StoredRows.result`.

    Args:
        store: The store; opened here.
        layout: The layout of its records.
        format: Their format; None: that of the layout, for any ids.

    Raises:
        ValueError: The store has records of another format.
        BlockingIOError: Another run has the store open.
        OSError: The store cannot be reached, read or written.
    """

    def __init__(
        self, store: RowStore, layout: RecordLayout, format: RecordFormat | None = None
    ) -> None:
        store.open(layout.record_format() if format is None else format)
        self.store, self.layout = store, layout
        self.traffic = StoreTraffic(layout.width)
        self.watchers: weakref.WeakSet[WrittenIds] = weakref.WeakSet()
        # Number of rows of an earlier run, until a checkpoint takes their place.
        self.num_earlier = len(store)
        self._under_way = RowsUnderWay()
        # A store slower than the training step makes the step wait, or rows would fill the memory.
        self._room = threading.BoundedSemaphore(_MOST_SENT)
        # One thread each: rows are written in the order of their evictions.
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "row writer")
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "row reader")
        self._error: BaseException | None = None

    def announce(self, ids: np.ndarray) -> EvictedRows:
        """Register evicted ids, whose rows `send` brings later."""
        return self._under_way.add(ids)

    def send(self, evicted: EvictedRows, rows: Any) -> None:
        """Bring announced rows to the store; wait if it is too far behind.

        Args:
            evicted: The ids.
            rows: Returns the rows and states of the tables (`jaxrec.embed.row_access`) when called.
        """
        with self.traffic.waiting():
            self._room.acquire()
        self._writer.submit(self._send, evicted, rows)

    def _send(self, evicted: EvictedRows, rows: Any) -> None:
        try:
            records = self.layout.pack(rows())
            evicted.records.set_result(records)
            with self.traffic.writing(evicted.ids.size):
                self._put(evicted.ids, records)
            self._under_way.remove(evicted)
        except BaseException as error:
            self._error = error
            if not evicted.records.done():
                evicted.records.set_exception(error)
        finally:
            self._room.release()

    def put(self, ids: np.ndarray, tables: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Bring rows that are on the host to the store.

        Args:
            ids: Distinct ids, int64 ``[n]``.
            tables: For each table its rows, under ``"rows"``, and their state by name.
        """
        self._put(ids, self.layout.pack(tables))

    def delete(self, ids: np.ndarray) -> None:
        """Remove the rows of ids from the store; ids without a row there are skipped."""
        for watcher in self.watchers:
            watcher.add(ids)
        self.store.delete(ids)

    def _put(self, ids: np.ndarray, records: np.ndarray) -> None:
        for watcher in self.watchers:
            watcher.add(ids)
        self.store.put(ids, records)

    def fetch(self, ids: np.ndarray) -> StoredRows:
        """Start to read the rows of distinct ids."""
        under_way = self._under_way.find(ids)
        return StoredRows(self, self._reader.submit(self._get, ids, under_way), under_way)

    def _get(
        self, ids: np.ndarray, under_way: tuple[WantedRows, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        with self.traffic.reading():
            found, records = self.store.get(ids)
        for wanted in under_way:
            found[wanted.positions] = True
        return found, records if found.all() else records[found]

    def replaced(self) -> None:
        """Note that the store's records were replaced by those of a checkpoint."""
        self.num_earlier = 0
        for watcher in self.watchers:
            watcher.add_all()

    def check(self) -> None:
        """Raise the error of a row that could not be written."""
        if self._error is not None:
            raise RuntimeError(
                f"evicted rows could not be written to {self.store!r}: {self._error!r}; the "
                "last checkpoint is whole"
            ) from self._error

    def wait(self) -> None:
        """Wait until the store has all rows that were sent.

        Raises:
            RuntimeError: A row could not be written.
        """
        self._writer.submit(lambda: None).result()
        self.check()
        self.store.flush()
