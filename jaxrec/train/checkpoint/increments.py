"""Which checkpoints hold changes alone, and on which one they build."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import secrets
import sys
from collections.abc import Mapping

import numpy as np

from jaxrec.tier.changes.change_tracker import ChangeTracker
from jaxrec.tier.changes.changes import HandOver
from jaxrec.tier.changes.tracked_table import ChangedIds
from jaxrec.tier.deltas.process_zero import on_process_zero
from jaxrec.tier.rows.under_way import WrittenIds
from jaxrec.train.checkpoint.files import CheckpointError, Link, chain, read_link


@dataclasses.dataclass(frozen=True)
class Changes:
    """Changes since the checkpoint before, which an incremental one saves.

    Attributes:
        tables: The changed ids, by path of the collection and name of the table.
        stores: Ids whose records in the row store changed, by name of the vocabulary; None: all.
    """

    tables: Mapping[tuple[str, str], ChangedIds]
    stores: Mapping[str, np.ndarray | None]


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
        self._written: dict[str, WrittenIds] = {}
        for each in tracker.vocabularies:
            if each.transfer is not None:
                self._written[each.name] = written = WrittenIds()
                each.transfer.watchers.add(written)

    def begin(self, step: int) -> Increment:
        """Prepare for the checkpoint of a step."""
        return Increment(self, step)

    def hand_over(self) -> contextlib.AbstractContextManager[HandOver]:
        """Enter the context of the tracker's changes."""
        return self._tracker.hand_over(self._consumer)

    def take_written(self) -> dict[str, np.ndarray | None]:
        """Return the ids whose records in row stores changed; see `WrittenIds.take`."""
        return {name: written.take() for name, written in self._written.items()}

    def give_back_written(self, taken: Mapping[str, np.ndarray | None]) -> None:
        """Note the result of `take_written` again."""
        for name, ids in taken.items():
            self._written[name].give_back(ids)

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
        self._written: dict[str, np.ndarray | None] = {}
        self.link = Link()

    def take(self) -> Changes | None:
        """Return the changes, if the checkpoint is incremental; None: it is full."""
        self._written = self._increments.take_written()
        self._changes = changes = self._stack.enter_context(self._increments.hand_over())
        link = on_process_zero(lambda: vars(self._increments.link(self._step, changes.position)))
        self.link = Link(**link)
        return None if self.link.base is None else Changes(changes.ids, self._written)

    def complete(self) -> None:
        """Record that the checkpoint is complete."""
        if self._changes is not None:
            self._changes.position = f"{self._step} {self.link.token}"
        self._stack.close()

    def fail(self) -> None:
        """Leave the changes to the next checkpoint; call it where an error is handled."""
        self._increments.give_back_written(self._written)
        self._stack.__exit__(*sys.exc_info())
