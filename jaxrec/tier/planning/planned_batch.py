"""Batches whose ids are replaced by rows."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class PlannedBatch:
    """A batch whose ids are replaced by rows.

    Attributes:
        batch: The batch, with rows.
        number: Its number; of a batch of an evaluation, that of the last training batch before.
        sequence: Its place in the order of planning (`PendingMoves`).
        is_training: Whether it is a training batch.
        source: The batch as it was.
    """

    batch: Any
    number: int
    sequence: int
    is_training: bool
    source: Any
