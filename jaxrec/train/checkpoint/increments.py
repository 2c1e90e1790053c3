"""Which checkpoints hold changes alone, and on which one they build."""

from __future__ import annotations

import contextlib
import pathlib
import secrets
import sys
from collections.abc import Mapping

from jaxrec.tier.changes.change_tracker import ChangeTracker
from jaxrec.tier.changes.changes import HandOver
from jaxrec.tier.changes.tracked_table import ChangedIds
from jaxrec.tier.deltas.process_zero import on_process_zero
from jaxrec.train.checkpoint.files import CheckpointError, Link, chain, read_link


class Increments:
    """Decides which saves of a manager are incremental.

    Args:
        directory: Directory of the checkpoints.
        tracker: Tracks the changes of the model.
        consumer: Name of the tracker's consumer for these checkpoints.
        full_every: Number of checkpoints from one full one to the next.
    """

    def __init__(
        self, directory: pathlib.Path, tracker: ChangeTracker, consumer: str, full_every: int
    ) -> None:
        if consumer not in tracker.consumers:
            names = ", ".join(map(repr, tracker.consumers))
            raise KeyError(f"the tracker has no consumer {consumer!r}; it has {names}")
        self._directory, self._tracker, self._consumer = directory, tracker, consumer
        self._full_every = full_every

    def begin(self, step: int) -> Increment:
        """Prepare for the checkpoint of a step."""
        return Increment(self, step)

    def hand_over(self) -> contextlib.AbstractContextManager[HandOver]:
        """Enter the context of the tracker's changes."""
        return self._tracker.hand_over(self._consumer)

    def link(self, step: int, position: str | None) -> Link:
        """Return the place of the checkpoint of a step in a chain.

        Args:
            step: The step.
            position: Step and token of the checkpoint since which changes are known.
        """
        token = secrets.token_hex(8)
        if position is None:
            return Link(token)
        base, base_token = position.split()
        path = self._directory / base
        if int(base) >= step or (self._directory / str(step)).exists() or not path.exists():
            return Link(token)
        try:
            follows = read_link(path).token == base_token and len(chain(path)) < self._full_every
        except CheckpointError:
            follows = False
        return Link(token, int(base), base_token) if follows else Link(token)


class Increment:
    """Changes that a checkpoint takes over when it is complete.

    Args:
        increments: The manager's.
        step: Step of the checkpoint.
    """

    def __init__(self, increments: Increments, step: int) -> None:
        self._increments, self._step = increments, step
        self._stack = contextlib.ExitStack()
        self._changes: HandOver | None = None
        self.link = Link()

    def take(self) -> Mapping[tuple[str, str], ChangedIds] | None:
        """Return the changed ids, if the checkpoint is incremental; see `tree.TakeChanges`."""
        self._changes = changes = self._stack.enter_context(self._increments.hand_over())
        link = on_process_zero(lambda: vars(self._increments.link(self._step, changes.position)))
        self.link = Link(**link)
        return None if self.link.base is None else changes.ids

    def complete(self) -> None:
        """Record that the checkpoint is complete."""
        if self._changes is not None:
            self._changes.position = f"{self._step} {self.link.token}"
        self._stack.close()

    def fail(self) -> None:
        """Leave the changes to the next checkpoint; call it where an error is handled."""
        self._stack.__exit__(*sys.exc_info())
