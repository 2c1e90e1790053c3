"""Observers of a model's vocabularies."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from jaxrec.tier.planning.planned_batch import PlannedBatch
from jaxrec.tier.vocabulary.vocabulary import Assignment


class TierObserver(abc.ABC):
    """Follows what a `Tier` does to the tables, in the thread that trains."""

    @abc.abstractmethod
    def moved(self, assignments: Sequence[Assignment]) -> None:
        """Rows were evicted and given to new ids, for each vocabulary; the tables have changed."""

    @abc.abstractmethod
    def taken(self, batch: Any) -> None:
        """The loop takes a training batch, on the host with rows in the place of ids."""

    def given(self, planned: PlannedBatch) -> None:
        """The loop takes a batch, of training or of evaluation; the tables have its rows."""
        return

    @abc.abstractmethod
    def restored(self) -> None:
        """The vocabularies are those of a checkpoint."""
