"""Rows on their way between the devices and a row store."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrec.embed.checkpoint_view import LogicalTable
from jaxrec.tier.id_map import IdMap
from jaxrec.tier.store_traffic import StoreTraffic
from jaxrec.tier.stores.row_store import RecordFormat, RowStore


@dataclasses.dataclass(frozen=True)
class RecordLayout:
    """Places of the rows and states of a vocabulary's tables in a record.

    Attributes:
        leaves: For each array the number of its table, its name (``"rows"`` or a state's), its
            width (None for one number a row) and its type.
    """

    leaves: tuple[tuple[int, str, int | None, np.dtype], ...]

    @classmethod
    def of(cls, shapes: Sequence[LogicalTable]) -> RecordLayout:
        """Make the layout of tables of some shapes (`TableStore.checkpoint_shapes`)."""
        leaves = []
        for number, table in enumerate(shapes):
            for name, array in {"rows": table.rows, **dict(sorted(table.state.items()))}.items():
                width = array.shape[1] if len(array.shape) > 1 else None
                leaves.append((number, name, width, np.dtype(array.dtype)))
        return cls(tuple(leaves))

    @property
    def width(self) -> int:
        """Number of bytes of a record."""
        return sum((width or 1) * dtype.itemsize for _, _, width, dtype in self.leaves)

    def record_format(self, names: Sequence[str] = (), num_ids: int | None = None) -> RecordFormat:
        """Return the format of the records for a store.

        Args:
            names: Names of the tables; without them the tables are numbered.
            num_ids: Ids are 0 to ``num_ids`` - 1; None: any 64-bit ids but -1.
        """
        fields = (
            f"{names[number] if names else f'table {number}'} {name} {dtype}[{width or 1}]"
            for number, name, width, dtype in self.leaves
        )
        return RecordFormat(self.width, ", ".join(fields), num_ids)

    def pack(self, tables: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
        """Return records, uint8 ``[n, width]``, of the rows and states of the tables."""
        parts = []
        for number, name, width, dtype in self.leaves:
            values = np.ascontiguousarray(tables[number][name], dtype)
            parts.append(values.reshape(len(values), width or 1).view(np.uint8))
        return np.concatenate(parts, axis=1)

    def unpack(self, records: np.ndarray) -> list[dict[str, np.ndarray]]:
        """Return the rows and states of the tables: the reverse of `pack`."""
        tables: dict[int, dict[str, np.ndarray]] = {}
        start = 0
        for number, name, width, dtype in self.leaves:
            stop = start + (width or 1) * dtype.itemsize
            values = np.ascontiguousarray(records[:, start:stop]).view(dtype)
            tables.setdefault(number, {})[name] = values if width else values[:, 0]
            start = stop
        return [tables[number] for number in sorted(tables)]


class EvictedRows:
    """Rows of evicted ids, from the moment of the decision until the store has them.

    Attributes:
        ids: The ids, int64 ``[n]``.
        places: Map of the ids to their indices.
        records: Future of their records.
    """

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids
        self.places = IdMap(ids.size, threads=1)
        self.places.insert(ids, np.arange(ids.size, dtype=np.int32))
        self.records: concurrent.futures.Future[np.ndarray] = concurrent.futures.Future()


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """Rows that a store has, or that are on their way to it.

    Attributes:
        transfer: The transfer.
        ids: The ids, int64 ``[n]``.
        stored: Future of the store's records of these ids.
        under_way: Evictions that were announced before.
    """

    transfer: RowTransfer
    ids: np.ndarray
    stored: concurrent.futures.Future[tuple[np.ndarray, np.ndarray]]
    under_way: tuple[EvictedRows, ...]

    def are_stored(self) -> np.ndarray:
        """Wait for the store alone; return whether each id has a row there or on its way, bool.

        Raises:
            RuntimeError: A row could not be read.
        """
        stored = self._read()[0].copy()
        for evicted in self.under_way:
            stored |= evicted.places.find(self.ids) >= 0
        return stored

    def result(self) -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
        """Wait for the rows; call it after `RowTransfer.send` of all evictions before.

        Returns:
            Whether each id has a row, bool ``[n]``, and the rows and states of the tables, of ids
            that have one.

        Raises:
            RuntimeError: A row could not be read, or not be written before.
        """
        found, records = self._read()
        for evicted in self.under_way:  # the latest eviction of an id comes last
            places = evicted.places.find(self.ids)
            here = np.flatnonzero(places >= 0)
            if here.size:
                concurrent.futures.wait([evicted.records])
                self.transfer.check()
                records[here] = evicted.records.result()[places[here]]
                found[here] = True
        return found, self.transfer.layout.unpack(records[found])

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
        # Number of rows of an earlier run, until a checkpoint takes their place.
        self.num_earlier = len(store)
        self._lock = threading.Lock()
        self._under_way: list[EvictedRows] = []
        # One thread each: rows are written in the order of their evictions.
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "row writer")
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "row reader")
        self._error: BaseException | None = None

    def announce(self, ids: np.ndarray) -> EvictedRows:
        """Register evicted ids, whose rows `send` brings later."""
        evicted = EvictedRows(ids)
        with self._lock:
            self._under_way.append(evicted)
        return evicted

    def send(self, evicted: EvictedRows, rows: Any) -> None:
        """Bring announced rows to the store.

        Args:
            evicted: The ids.
            rows: Returns the rows and states of the tables (`jaxrec.embed.row_access`) when called.
        """
        self._writer.submit(self._send, evicted, rows)

    def _send(self, evicted: EvictedRows, rows: Any) -> None:
        try:
            records = self.layout.pack(rows())
            evicted.records.set_result(records)
            with self.traffic.writing(evicted.ids.size):
                self.store.put(evicted.ids, records)
            with self._lock:
                self._under_way.remove(evicted)
        except BaseException as error:
            self._error = error
            if not evicted.records.done():
                evicted.records.set_exception(error)

    def put(self, ids: np.ndarray, tables: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Bring rows that are on the host to the store.

        Args:
            ids: Distinct ids, int64 ``[n]``.
            tables: For each table its rows, under ``"rows"``, and their state by name.
        """
        self.store.put(ids, self.layout.pack(tables))

    def fetch(self, ids: np.ndarray) -> StoredRows:
        """Start to read the rows of distinct ids."""
        with self._lock:
            under_way = tuple(self._under_way)
        return StoredRows(self, ids, self._reader.submit(self._get, ids), under_way)

    def _get(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with self.traffic.reading():
            return self.store.get(ids)

    def state(self) -> dict[str, np.ndarray]:
        """Return the store's records as arrays, for a checkpoint; after `wait`."""
        parts = list(self.store.scan())
        none = np.zeros(0, np.int64), np.zeros((0, self.layout.width), np.uint8)
        ids, records = zip(none, *parts, strict=True)
        return {"stored_ids": np.concatenate(ids), "stored_records": np.concatenate(records)}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace the store's records by the records of a `state`."""
        parts = []
        if "stored_ids" in state:
            parts.append((state["stored_ids"], state["stored_records"]))
        self.store.replace(parts)
        self.num_earlier = 0

    def load_snapshot(self, directory: pathlib.Path) -> None:
        """Replace the store's records by those of a snapshot.

        Raises:
            ValueError: The snapshot is damaged, or of another format.
            OSError: A record cannot be read or written.
        """
        self.store.load_snapshot(directory)
        self.num_earlier = 0

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
