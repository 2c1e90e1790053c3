"""The policy that decides which checkpoints are kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal


@dataclasses.dataclass(frozen=True)
class PreservationPolicy:
    """Which checkpoints of a directory are kept; others are deleted after each save.

    Attributes:
        latest: Number of newest checkpoints to keep.
        best: Number of checkpoints with the best ``metric`` to keep besides.
        metric: Name of a saved metric.
        mode: Whether the largest ("max") or the smallest ("min") value is the best.

    Raises:
        ValueError: A number is below 1 (``best``: 0), or ``best`` has no ``metric``.
    """

    latest: int = 1
    best: int = 0
    metric: str | None = None
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        if self.latest < 1 or self.best < 0 or (self.best and self.metric is None):
            raise ValueError(
                f"latest must be 1 or more and best 0 or more, and best needs a metric; got {self}"
            )

    def preserved(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Return the steps of the checkpoints to keep.

        Args:
            metrics: The metrics of each checkpoint by its step.

        Example:
            >>> policy = PreservationPolicy(latest=1, best=1, metric="auc")
            >>> sorted(policy.preserved({1: {"auc": 0.7}, 2: {"auc": 0.6}, 3: {}}))
            [1, 3]
        """
        return {*sorted(metrics)[-self.latest :], *self.ranked(metrics)[: self.best]}

    def ranked(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Return the steps of the checkpoints that have the metric, the best first."""
        sign = 1 if self.mode == "max" else -1
        rated = [
            (sign * value, step)
            for step, values in metrics.items()
            for name, value in values.items()
            if name == self.metric and not math.isnan(value)
        ]
        return [step for _, step in sorted(rated, reverse=True)]
