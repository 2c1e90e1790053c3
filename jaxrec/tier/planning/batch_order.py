"""Order in which batches are planned by one thread and taken by the training loop."""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

Mark: TypeAlias = tuple[int, int, int]
"""Fingerprint of a batch (`BatchIds.mark`)."""


class BatchOrder:
    """Numbers of the training batches that were planned and taken, across several loops.

    A loop that ends early leaves batches that were planned and not taken. If the next loop, or a
    run from a checkpoint, begins with the same batches, they keep their numbers: they are replayed.
    Threads may share it.

    Attributes:
        last_planned: Number of the last training batch that was planned; 0 before the first.
        last_taken: Number of the last one that the training loop took.
        undispatched: Number of batches that may be taken before the step of the first of them is
            dispatched.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = threading.Condition(self._lock)
        self.last_planned = self.last_taken = self.undispatched = 0
        self._loop = 0
        self._is_ended = False
        # Batches that were planned and not taken, in this loop and in earlier ones.
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
        """End a loop, if it is the last that was begun: `wait_for` no longer waits."""
        with self._lock:
            if loop == self._loop:
                self.undispatched, self._is_ended = 0, True
                self._is_taken.notify_all()

    def replay(self, mark: Mark) -> int | None:
        """Return the number of a batch that was planned before; None: it is a new batch.

        A new batch ends the replay: the batches differ from the planned ones.
        """
        with self._lock:
            if self._replayed and self._replayed[0][1] == mark:
                return self._replayed.popleft()[0]
            self._replayed.clear()
            return None

    def add(self, number: int, mark: Mark) -> None:
        """Note that a batch is planned."""
        with self._lock:
            self.last_planned = max(number, self.last_planned)
            self._planned.append((number, mark))

    def check_next(self, number: int) -> None:
        """Raise a RuntimeError if a batch is not the next to be taken."""
        with self._lock:
            if not self._planned or self._planned[0][0] != number:
                raise RuntimeError(
                    "another jaxrec.tier.ahead was begun, or a checkpoint restored, while "
                    "this one gives batches; end one training loop before the next"
                )

    def take(self, number: int) -> None:
        """Note that the training loop has the batch."""
        with self._is_taken:
            self.last_taken = number
            self._planned.popleft()
            self._is_taken.notify_all()

    def wait_for(self, number: int) -> None:
        """Wait until a batch was taken.

        Raises:
            RuntimeError: The loop was ended.
        """
        with self._is_taken:
            self._is_taken.wait_for(lambda: self.last_taken >= number or self._is_ended)
            if self._is_ended:
                raise RuntimeError("the iterator over jaxrec.tier.ahead was closed")

    def forget_planned(self) -> None:
        """Drop the batches that were planned and not taken, whose rows change.

        Raises:
            RuntimeError: A loop is under way.
        """
        with self._lock:
            if self._planned and not self._is_ended:
                raise RuntimeError(
                    "rows are taken from ids while jaxrec.tier.ahead plans training batches with "
                    "them; do it before or after the loop over ahead"
                )
            self._planned.clear()
            self._replayed.clear()

    def forget_replayed(self) -> None:
        """Drop the batches to be replayed, whose rows changed."""
        with self._lock:
            self._replayed.clear()

    def state(self) -> dict[str, np.ndarray]:
        """Return the numbers and the planned batches as arrays, for checkpoints."""
        with self._lock:
            marks = [(number, *mark) for number, mark in (*self._planned, *self._replayed)]
            return {
                "planned": np.array(marks, np.int64).reshape(-1, 4),
                "numbers": np.array([self.last_planned, self.last_taken], np.int64),
            }

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over the result of `state`."""
        with self._lock:
            self.last_planned, self.last_taken = map(int, state["numbers"])
            self._planned.clear()
            self._replayed = collections.deque(
                (int(number), (int(count), int(total), int(mixed)))
                for number, count, total, mixed in state["planned"]
            )
