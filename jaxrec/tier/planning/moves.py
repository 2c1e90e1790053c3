"""Moves of rows between a model's tables and their stores, and the queue of planned moves."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
from flax import nnx

from jaxrec.embed.config import TableConfig
from jaxrec.embed.rows import RowsOnDevices, read, write
from jaxrec.embed.slots import TableRows
from jaxrec.embed.store import TableStore
from jaxrec.mesh.store import MeshStore
from jaxrec.tier.planning.model_tables import TableVocabulary, collection_at
from jaxrec.tier.rows.first_rows import NewRows, reset
from jaxrec.tier.rows.row_exchange import send_to_owners, write_from_owners
from jaxrec.tier.rows.transfer import StoredRows, announce_all, fetch_all, receive, send_all
from jaxrec.tier.rows.under_way import EvictedRows
from jaxrec.tier.vocabulary.assignment import NO_CHANGE, Assignment


@dataclasses.dataclass(frozen=True)
class Move:
    """Rows that leave and enter the tables of one vocabulary for a batch."""

    assignment: Assignment
    # Rows on their way to the store and rows that the store is reading; None without any.
    evicted: EvictedRows | None
    fetched: StoredRows | None


NO_MOVE = Move(NO_CHANGE, None, None)


def begin_moves(
    vocabularies: Sequence[TableVocabulary], assignments: Sequence[Assignment]
) -> list[Move]:
    """Register a batch's evicted ids, and start reading the rows of its new ids from the stores.

    There is an assignment for each vocabulary.
    """
    pairs = list(zip(vocabularies, assignments, strict=True))
    bringing = [(v, each.transfer) for v, (each, assignment) in enumerate(pairs)
                if each.transfer is not None and assignment.new_ids.size]  # fmt: skip
    # Fetch before announcing: rows that return were evicted by earlier batches. The fetch looks for
    # them among the announced rows, too, which may still be on their way to the store.
    stored = fetch_all(
        [transfer for _, transfer in bringing], [assignments[v].new_ids for v, _ in bringing]
    )
    fetched = {v: rows for (v, _), rows in zip(bringing, stored, strict=True)}
    leaving = [(v, each.transfer) for v, (each, assignment) in enumerate(pairs)
               if each.transfer is not None and assignment.evicted_ids.size]  # fmt: skip
    announced = announce_all(
        [transfer for _, transfer in leaving], [assignments[v].evicted_ids for v, _ in leaving]
    )
    evicted = {v: rows for (v, _), rows in zip(leaving, announced, strict=True)}
    return [
        Move(assignment, evicted.get(v), fetched.get(v))
        if assignment.new_ids.size or assignment.evicted_ids.size
        else NO_MOVE
        for v, assignment in enumerate(assignments)
    ]


def move_rows(
    model: nnx.Module,
    vocabularies: Sequence[TableVocabulary],
    moves: Sequence[Move],
    keys: Mapping[str, np.ndarray],
) -> None:
    """Carry out the moves of one batch on a model's tables; there is a move for each vocabulary.

    ``keys`` are the keys of first rows, uint32 ``[2]``, by path of the collection.
    """
    if all(move is NO_MOVE for move in moves):
        return
    # In each collection: read the rows that leave, then set first rows, then set rows that return.
    # New ids take over the rows of evicted ones, so the read must come first.
    fetched = _receive(moves)
    evicted: dict[tuple[int, str, str], tuple[_RowsToHost, int]] = {}
    for path in dict.fromkeys(table.collection for each in vocabularies for table in each.tables):
        collection = collection_at(model, path)
        here = [
            (v, t, table.config)
            for v, each in enumerate(vocabularies)
            for t, table in enumerate(each.tables)
            if table.collection == path
        ]
        store = collection.tables.get_value()
        placed = store.placed
        leaving = [(v, config) for v, _, config in here if moves[v].evicted is not None]
        if leaving:
            # One gather for all tables of the collection. It stays on the devices: the threads of
            # the stores copy it to the host, while the training thread dispatches the next step.
            requests = []
            for v, config in leaving:
                out = moves[v].assignment
                requests.append(
                    _request(vocabularies[v], config, out.evicted_rows, out.evicted_ids)
                )
            rows = _RowsToHost(_read(placed, requests))
            for number, (v, config) in enumerate(leaving):
                evicted[v, path, config.name] = rows, number
        fresh, returning, values = [], [], []
        for v, t, config in here:
            new_rows, new_ids = moves[v].assignment.new_rows, moves[v].assignment.new_ids
            if (stored := fetched.get(v)) is not None:
                found, of_tables = stored
                # Most batches find all rows, and slices copy nothing.
                old, new = (slice(None), slice(0)) if found.all() else (found, ~found)
                returning.append(_request(vocabularies[v], config, new_rows[old], new_ids[old]))
                values.append(of_tables[t])
                new_rows, new_ids = new_rows[new], new_ids[new]
            fresh.append(NewRows(config, new_rows, new_ids))
        placed = reset(placed, fresh, keys[path])
        placed = _write(placed, returning, values)
        collection.tables.set_value(store.with_placed(placed))
    sent = []
    for v, (each, move) in enumerate(zip(vocabularies, moves, strict=True)):
        if each.transfer is not None and move.evicted is not None:
            if each.transfer.division is None:  # `receive` raises the errors of all processes
                each.transfer.check()
            parts = [evicted[v, table.collection, table.config.name] for table in each.tables]
            sent.append((each.transfer, move.evicted, functools.partial(_to_host, parts)))
    send_all(sent)


def _receive(moves: Sequence[Move]) -> dict[int, tuple[np.ndarray, list[dict[str, np.ndarray]]]]:
    """Wait for rows from stores; return, by index of the vocabulary, what `receive` returns."""
    stored = {v: move.fetched for v, move in enumerate(moves) if move.fetched is not None}
    return dict(zip(stored, receive(list(stored.values())), strict=True))


def _request(
    each: TableVocabulary, config: TableConfig, rows: np.ndarray, ids: np.ndarray
) -> TableRows:
    """Return a request for rows of a table, with the owner of each row if stores are divided."""
    owners = None if each.transfer is None else each.transfer.owners(ids)
    return TableRows(config.name, rows, owners)


def _read(placed: TableStore, requests: Sequence[TableRows]) -> RowsOnDevices:
    """Gather the rows that leave for the stores."""
    # `Tier.divide_stores` divides all stores of a model, or none: the first request tells for all.
    if requests[0].owners is not None:
        return send_to_owners(cast(MeshStore, placed), requests)
    return read(placed, requests, is_leaving=True)


def _write(
    placed: TableStore, requests: Sequence[TableRows], values: Sequence[Mapping[str, np.ndarray]]
) -> TableStore:
    """Set the rows that return from the stores."""
    if requests and requests[0].owners is not None:
        return write_from_owners(cast(MeshStore, placed), requests, values)
    return write(placed, requests, values)


class _RowsToHost:
    """Rows on the devices, of several vocabularies, that are copied to the host once."""

    # Each vocabulary's store has a thread of its own. The first that asks copies the rows of all.

    def __init__(self, rows: RowsOnDevices) -> None:
        self._rows: RowsOnDevices | None = rows
        self._lock = threading.Lock()
        self._on_host: list[dict[str, np.ndarray]] = []

    def result(self) -> list[dict[str, np.ndarray]]:
        """Return the rows and states of each request of `_read`."""
        with self._lock:
            if self._rows is not None:
                self._on_host = self._rows.to_host()
                self._rows = None  # frees the rows on the devices
            return self._on_host


def _to_host(parts: Sequence[tuple[_RowsToHost, int]]) -> list[dict[str, np.ndarray]]:
    return [rows.result()[number] for rows, number in parts]


@dataclasses.dataclass
class _Entry:
    """Moves of one batch, one for each vocabulary."""

    sequence: int  # position in the order of planning, which counts evaluations too
    number: int  # the last training batch that was planned, this one included
    moves: tuple[Move, ...]


# A batch is planned a few batches before its step, when the tables must still be those of the
# steps before it. So its moves wait here until the loop takes it.
class PendingMoves:
    """Queue of the moves of planned batches, of training and of evaluation. Threads may share it.

    Sequence numbers count planned batches from 1. ``last`` is the number of the last one planned;
    ``settled`` is what `last` was when `carry_out` last carried out all moves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self.last = self.settled = 0

    def add(self, number: int, moves: Sequence[Move]) -> int:
        """Append the moves of a batch; return its sequence number."""
        with self._lock:
            self.last += 1
            if any(move is not NO_MOVE for move in moves):
                self._entries.append(_Entry(self.last, number, tuple(moves)))
            return self.last

    def after(self, number: int) -> list[tuple[Move, ...]]:
        """Return the waiting moves of batches planned after a training batch, in order."""
        with self._lock:
            return [entry.moves for entry in self._entries if entry.number > number]

    def restore_rows(self, v: int, ids: np.ndarray, rows: np.ndarray, number: int) -> None:
        """Fill in, in place, the rows that ids had after training batch ``number`` and lost since.

        The ids are of vocabulary ``v``. ``rows`` has the row of each id after all planned batches,
        int32 ``[n]``, -1 for none.
        """
        for moves in self.after(number):
            _restore(ids, rows, moves[v].assignment)

    def undo(self, v: int, ids: np.ndarray, rows: np.ndarray) -> None:
        """Turn ids' rows after all planned batches into their rows on the devices now, in place.

        The ids are of vocabulary ``v``. ``rows`` is int32 ``[n]``, -1 for none.
        """
        # The last moves first: an id may come and go several times while batches wait.
        for moves in reversed(self.after(-1)):
            rows[np.isin(ids, moves[v].assignment.new_ids)] = -1
            _restore(ids, rows, moves[v].assignment)

    def coming_ids(self, v: int) -> np.ndarray:
        """Return the ids that waiting moves bring to vocabulary ``v``'s tables, int64 ``[n]``."""
        ids = [moves[v].assignment.new_ids for moves in self.after(-1)]
        return np.concatenate([np.zeros(0, np.int64), *ids])

    def carry_out(
        self,
        move: Callable[[Sequence[Move]], None],
        sequence: int | None,
        wanted: Sequence[bool] | None = None,
    ) -> None:
        """Call ``move`` with the moves of each batch up to a sequence number; None: of all batches.

        ``wanted`` has a flag for each vocabulary, whether its moves are carried out; None: all are.
        A move that fails stays in the queue.
        """
        # Not under the lock while moves run: they wait for devices and stores, and `add` must not.
        with self._lock:
            last = self.last
            entries = [e for e in self._entries if sequence is None or e.sequence <= sequence]
        for entry in entries:
            is_wanted = wanted or [True] * len(entry.moves)
            pairs = list(zip(entry.moves, is_wanted, strict=True))
            move([each if now else NO_MOVE for each, now in pairs])
            with self._lock:
                entry.moves = tuple(NO_MOVE if now else each for each, now in pairs)
                self._entries = [
                    e for e in self._entries if any(each is not NO_MOVE for each in e.moves)
                ]
        if sequence is None:
            self.settled = last

    def clear(self) -> None:
        """Drop all moves."""
        with self._lock:
            self._entries.clear()


def _restore(ids: np.ndarray, rows: np.ndarray, assignment: Assignment) -> None:
    """Set the rows of ids with -1 to the rows that an assignment took from them, in place."""
    missing = np.flatnonzero(rows < 0)
    if not missing.size or not assignment.evicted_ids.size:
        return
    order = np.argsort(assignment.evicted_ids)
    place = np.searchsorted(assignment.evicted_ids, ids[missing], sorter=order)
    place = order[np.minimum(place, order.size - 1)]
    is_match = assignment.evicted_ids[place] == ids[missing]
    rows[missing[is_match]] = assignment.evicted_rows[place[is_match]]
