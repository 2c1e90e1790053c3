"""Moves of rows that are planned and not yet carried out on the devices."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

import numpy as np

from jaxrec.tier.planning.moves import NO_MOVE, Move
from jaxrec.tier.vocabulary.vocabulary import Assignment


@dataclasses.dataclass
class _Entry:
    """Moves of one batch.

    Attributes:
        sequence: Place in the order of planning.
        number: Number of the last training batch that was planned.
        moves: A move for each vocabulary.
    """

    sequence: int
    number: int
    moves: tuple[Move, ...]


class PendingMoves:
    """Queue of the moves of planned batches, of training and of evaluation. Threads may share it.

    Attributes:
        last: Place in the order of planning of the last batch; 0 before the first.
        settled: Place of the last batch when all moves were carried out at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self.last = self.settled = 0

    def add(self, number: int, moves: Sequence[Move]) -> int:
        """Append the moves of a batch; return its place in the order of planning."""
        with self._lock:
            self.last += 1
            if any(move is not NO_MOVE for move in moves):
                self._entries.append(_Entry(self.last, number, tuple(moves)))
            return self.last

    def after(self, number: int) -> list[tuple[Move, ...]]:
        """Return the moves of batches after a training batch, in order."""
        with self._lock:
            return [entry.moves for entry in self._entries if entry.number > number]

    def restore_rows(self, v: int, ids: np.ndarray, rows: np.ndarray, number: int) -> None:
        """Set the rows of ids without one that batches after a training batch evict.

        Args:
            v: Index of the vocabulary.
            ids: int64 ``[n]``.
            rows: Row of each id after all planned batches, -1 for none; changed.
            number: Number of the training batch.
        """
        for moves in self.after(number):
            _restore(ids, rows, moves[v].assignment)

    def undo(self, v: int, ids: np.ndarray, rows: np.ndarray) -> None:
        """Set the rows of ids to those on the devices, where no move is carried out yet.

        Args:
            v, ids, rows: As for `restore_rows`.
        """
        for moves in reversed(self.after(-1)):
            rows[np.isin(ids, moves[v].assignment.new_ids)] = -1
            _restore(ids, rows, moves[v].assignment)

    def coming_ids(self, v: int) -> np.ndarray:
        """Return the ids that get rows of a vocabulary's tables, int64 ``[n]``."""
        ids = [moves[v].assignment.new_ids for moves in self.after(-1)]
        return np.concatenate([np.zeros(0, np.int64), *ids])

    def carry_out(
        self,
        move: Callable[[Sequence[Move]], None],
        sequence: int | None,
        wanted: Sequence[bool] | None = None,
    ) -> None:
        """Carry out moves in order; those that fail stay.

        Args:
            move: Carries out the moves of a batch.
            sequence: Place of the last batch whose moves are carried out; None: all.
            wanted: Whether each vocabulary's moves are carried out; None: all.
        """
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
    """Set the rows of evicted ids, where ids have none."""
    missing = np.flatnonzero(rows < 0)
    if not missing.size or not assignment.evicted_ids.size:
        return
    order = np.argsort(assignment.evicted_ids)
    place = np.searchsorted(assignment.evicted_ids, ids[missing], sorter=order)
    place = order[np.minimum(place, order.size - 1)]
    is_match = assignment.evicted_ids[place] == ids[missing]
    rows[missing[is_match]] = assignment.evicted_rows[place[is_match]]
