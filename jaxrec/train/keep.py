"""Which checkpoints stay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which checkpoints of a directory stay.

    Attributes:
        last: How many of the newest.
        best: How many of those with the best ``metric``, besides.
        metric: Name of one of the saved metrics.
        mode: Whether the largest ("max") or the smallest ("min") is the best.

    Raises:
        ValueError: A number is below 1 (``best``: 0), or ``best`` has no ``metric``.
    """

    last: int = 1
    best: int = 0
    metric: str | None = None
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        if self.last < 1 or self.best < 0 or (self.best and self.metric is None):
            raise ValueError(
                f"of checkpoints 1 or more of the last are kept, and 0 or more of the best by a "
                f"metric that is named; got {self}"
            )

    def chosen(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The steps to keep, of the steps with their metrics.

        Example:
            >>> sorted(Keep(best=1, metric="auc").chosen({1: {"auc": 0.7}, 2: {"auc": 0.6}, 3: {}}))
            [1, 3]
        """
        return {*sorted(metrics)[-self.last :], *self.ranked(metrics)[: self.best]}

    def ranked(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The steps that have the metric, the best first."""
        sign = 1 if self.mode == "max" else -1
        rated = [
            (sign * value, step)
            for step, values in metrics.items()
            for name, value in values.items()
            if name == self.metric and not math.isnan(value)
        ]
        return [step for _, step in sorted(rated, reverse=True)]
