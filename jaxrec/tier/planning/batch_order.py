"""The order of training batches: read ahead of the loop, planned, and taken by it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxrec.data.pipeline import each_batch
from jaxrec.tier.ids.batch_ops import distinct
from jaxrec.tier.planning.batch_ids import BatchIds


@dataclasses.dataclass(frozen=True)
class ForeseenBatch:
    """A training batch, its ids, and the ids of some batches after it."""

    batch: Any
    ids: BatchIds
    # For each of the next batches, nearest first: its distinct ids, int64, for each vocabulary.
    coming: Sequence[Sequence[np.ndarray]] = ()


def foresee(
    batches: Iterable[Any], read_ids: Callable[[Any], BatchIds], num_ahead: int
) -> Generator[ForeseenBatch, None, None]:
    """Yield each batch after reading ``num_ahead`` further ones; the last batches see fewer.

    An error in reading a batch is raised after all batches before it were yielded.
    """
    waiting: collections.deque[tuple[Any, BatchIds, list[np.ndarray]]] = collections.deque()
    with contextlib.closing(_read(batches, read_ids, is_coming=num_ahead > 0)) as source:
        error: Exception | None = None
        while True:
            try:
                waiting.extend(itertools.islice(source, num_ahead + 1 - len(waiting)))
            except Exception as raised:  # raised again after the batches before it
                error = raised
            if not waiting:
                break
            batch, ids, _ = waiting.popleft()
            yield ForeseenBatch(batch, ids, [each for _, _, each in waiting])
        if error is not None:
            raise error


def _read(
    batches: Iterable[Any], read_ids: Callable[[Any], BatchIds], *, is_coming: bool
) -> Generator[tuple[Any, BatchIds, list[np.ndarray]], None, None]:
    """Yield each batch with its ids and, if ``is_coming``, its distinct ids by vocabulary."""
    # Distinct ids are computed once here, not once for each of the batches that look ahead at them.
    source: Iterator[Any] = each_batch(batches)
    try:
        for batch in source:
            ids = read_ids(batch)
            yield batch, ids, [distinct(each)[0] for each in ids.ids] if is_coming else []
    finally:
        if (close := getattr(source, "close", None)) is not None:
            close()


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """A batch whose ids are replaced by rows."""

    batch: Any
    number: int  # of an evaluation's batch: that of the last training batch taken before it
    sequence: int  # in the order of planning, see `PendingMoves`
    is_training: bool
    source: Any  # the batch with its ids


Mark: TypeAlias = tuple[int, int, int]
"""Fingerprint of a batch (`BatchIds.mark`)."""


class BatchOrder:
    """Numbers of the training batches that were planned and taken, over several loops.

    A loop that ends early leaves batches that were planned and not taken. If the next loop, or a
    run from a checkpoint, begins with the same batches, they are replayed: they keep their numbers
    and rows. Threads may share it.
    """

    # Batches have numbers from 1; `last_planned` and `last_taken` are 0 before the first. The loop
    # may take `undispatched` batches before it dispatches the step of the first of them.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = threading.Condition(self._lock)
        self.last_planned = self.last_taken = self.undispatched = 0
        self._loop = 0
        self._is_ended = False
        # Batches that were planned and not taken, by this loop and by earlier ones.
        self._planned: collections.deque[tuple[int, Mark]] = collections.deque()
        self._replayed: collections.deque[tuple[int, Mark]] = collections.deque()

    def begin(self, undispatched: int) -> int:
        """Begin a loop; return its number, for `end`."""
        with self._lock:
            self.undispatched, self._is_ended = undispatched, False
            # Batches planned by the last loop come before batches still to be replayed.
            self._replayed.extendleft(reversed(self._planned))
            self._planned.clear()
            self._loop += 1
            return self._loop

    def end(self, loop: int) -> None:
        """End a loop, so that `wait_for` no longer waits; do nothing if a later loop has begun."""
        with self._lock:
            # An iterator that was left behind may be closed late, by the garbage collector.
            if loop == self._loop:
                self.undispatched, self._is_ended = 0, True
                self._is_taken.notify_all()

    def replay(self, mark: Mark) -> int | None:
        """Return the number of a batch that an earlier loop planned; None for a new batch.

        A new batch ends the replay, since the batches to come differ from the planned ones.
        """
        with self._lock:
            if self._replayed and self._replayed[0][1] == mark:
                return self._replayed.popleft()[0]
            self._replayed.clear()
            return None

    def add(self, number: int, mark: Mark) -> None:
        """Note that a batch is planned."""
        with self._lock:
            # A replayed batch has an earlier number than the last one planned.
            self.last_planned = max(number, self.last_planned)
            self._planned.append((number, mark))

    def check_next(self, number: int) -> None:
        """Raise a RuntimeError unless a batch is the next to be taken."""
        with self._lock:
            if not self._planned or self._planned[0][0] != number:
                raise RuntimeError(
                    "another jaxrec.tier.ahead was begun, or a checkpoint restored, while "
                    "this one gives batches; end one training loop before the next"
                )

    def take(self, number: int) -> None:
        """Note that the training loop takes the next batch."""
        with self._is_taken:
            self.last_taken = number
            self._planned.popleft()
            self._is_taken.notify_all()

    def wait_for(self, number: int) -> None:
        """Wait until the loop takes a batch; raise a RuntimeError if it ends before."""
        with self._is_taken:
            self._is_taken.wait_for(lambda: self.last_taken >= number or self._is_ended)
            if self._is_ended:
                raise RuntimeError("the iterator over jaxrec.tier.ahead was closed")

    def forget_planned(self) -> None:
        """Drop the batches planned and not taken, because their rows are about to change."""
        with self._lock:
            if self._planned and not self._is_ended:
                raise RuntimeError(
                    "rows are taken from ids while jaxrec.tier.ahead plans training batches with "
                    "them; do it before or after the loop over ahead"
                )
            self._planned.clear()
            self._replayed.clear()

    def forget_replayed(self) -> None:
        """Drop the batches to be replayed, because their rows have changed."""
        with self._lock:
            self._replayed.clear()

    def state(self) -> dict[str, np.ndarray]:
        """Return the counters, and the number and mark of each planned batch, ``[batches, 4]``."""
        with self._lock:
            marks = [(number, *mark) for number, mark in (*self._planned, *self._replayed)]
            return {
                "planned": np.array(marks, np.int64).reshape(-1, 4),
                "numbers": np.array([self.last_planned, self.last_taken], np.int64),
            }

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace the counters and the planned batches by those of a `state`."""
        with self._lock:
            self.last_planned, self.last_taken = map(int, state["numbers"])
            self._planned.clear()
            self._replayed = collections.deque(
                (int(number), (int(count), int(total), int(mixed)))
                for number, count, total, mixed in state["planned"]
            )
