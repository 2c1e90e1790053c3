"""Metrics of the decisions of a classifier."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrec.metrics.domain import (
    BINARY_LABEL,
    LABEL,
    NUMBER,
    PROBABILITY,
    Domain,
)
from jaxrec.metrics.metric import Batch, SumMetric, Sums, Values, ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accuracy(SumMetric):
    """The share of samples decided right, ``sum w [(p >= threshold) = y] / sum w`` (``accuracy``).

    Attributes:
        threshold: From which prediction on a sample is taken for positive.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = Accuracy(window=None)
        >>> state = metric.update(metric.init(), jnp.array([0.9, 0.2]), jnp.array([1.0, 1.0]))
        >>> metric.compute(state)["lifetime_accuracy"].tolist()
        [0.5]
    """

    threshold: float = 0.5

    name: ClassVar[str] = "accuracy"

    @property
    def domains(self) -> tuple[Domain | None, Domain | None]:
        return NUMBER, BINARY_LABEL

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        right = (batch.predictions >= self.threshold) == batch.labels
        return {
            "right": (batch.weights * right).sum(axis=1),
            "weights": batch.weights.sum(axis=1),
        }

    def values(self, sums: Sums) -> Values:
        return {self.name: ratio(sums["right"], sums["weights"])}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision(SumMetric):
    """The share of positive samples among those taken for positive (``precision``).

    No value where none is taken for positive; ``compat="torchrec"`` reports 0.

    Attributes:
        threshold: From which prediction on a sample is taken for positive.
    """

    threshold: float = 0.5

    name: ClassVar[str] = "precision"
    torchrec_undefined: ClassVar[float] = 0.0

    @property
    def domains(self) -> tuple[Domain | None, Domain | None]:
        return NUMBER, LABEL

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        predicted = batch.weights * (batch.predictions >= self.threshold)
        return {
            "true_positives": (predicted * batch.labels).sum(axis=1),
            "false_positives": (predicted * (1 - batch.labels)).sum(axis=1),
        }

    def values(self, sums: Sums) -> Values:
        predicted = sums["true_positives"] + sums["false_positives"]
        return {self.name: ratio(sums["true_positives"], predicted)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall(SumMetric):
    """The share of the positive samples that is taken for positive (``recall``).

    No value without positives. ``compat="torchrec"`` reports 0 there, and counts a positive sample
    of exactly the threshold as found and as missed both.

    Attributes:
        threshold: From which prediction on a sample is taken for positive.
    """

    threshold: float = 0.5

    name: ClassVar[str] = "recall"
    torchrec_undefined: ClassVar[float] = 0.0

    @property
    def domains(self) -> tuple[Domain | None, Domain | None]:
        return NUMBER, LABEL

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        positive, predictions = batch.weights * batch.labels, batch.predictions
        missed = predictions <= self.threshold if self.compat else predictions < self.threshold
        return {
            "true_positives": (positive * (predictions >= self.threshold)).sum(axis=1),
            "false_negatives": (positive * missed).sum(axis=1),
        }

    def values(self, sums: Sums) -> Values:
        positives = sums["true_positives"] + sums["false_negatives"]
        return {self.name: ratio(sums["true_positives"], positives)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MulticlassRecall(SumMetric):
    """The share of samples whose label is among the ``k`` highest scores (``multiclass_recall``).

    ``[tasks, num_classes]``, ``k`` from 1 on. Predictions are ``[tasks, batch, num_classes]`` and
    labels are class numbers. The lower of two classes with equal scores comes first.

    Under ``compat="torchrec"`` a label outside the classes is never found.

    Attributes:
        num_classes: Number of classes.
    """

    num_classes: int

    name: ClassVar[str] = "multiclass_recall"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_classes < 1:
            raise ValueError(f"MulticlassRecall: num_classes={self.num_classes} must be 1 or more")

    @property
    def trailing(self) -> tuple[int, ...]:
        return (self.num_classes,)

    @property
    def domains(self) -> tuple[Domain | None, Domain | None]:
        if self.compat is not None:
            return NUMBER, NUMBER
        return NUMBER, Domain(low=0, high=self.num_classes - 1, whole=True)

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        scores, label = batch.predictions, batch.labels.astype(jnp.int32)[..., None]
        classes = jnp.arange(self.num_classes)[None, None]
        of_label = jnp.take_along_axis(scores, jnp.clip(label, 0, self.num_classes - 1), axis=-1)
        before = (scores > of_label) | ((scores == of_label) & (classes < label))
        rank = before.sum(axis=-1)
        # TorchRec never finds a label outside the classes.
        valid = (label[..., 0] >= 0) & (label[..., 0] < self.num_classes)
        hits = (rank[..., None] <= classes) & valid[..., None]
        return {
            "found": (batch.weights[..., None] * hits).sum(axis=1),
            "weights": batch.weights.sum(axis=1),
        }

    def values(self, sums: Sums) -> Values:
        return {self.name: ratio(sums["found"], sums["weights"][:, None])}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HindsightTargetPR(SumMetric):
    """The lowest threshold that would have reached a precision, and the recall there.

    The first of the thresholds ``0, 1 / (n - 1), ..., 1`` at which the samples taken for positive
    (``p >= threshold``) have a precision of at least ``target_precision``. Reports
    ``hindsight_target_pr_threshold_index``, ``hindsight_target_precision`` and
    ``hindsight_target_recall``; undefined if no threshold reaches the precision.

    Under ``compat="torchrec"`` the last threshold stands in if none reaches the precision, and a
    positive sample of exactly the threshold counts as found and as missed. (TorchRec hides the
    index in the size of a tensor of arbitrary numbers.)

    Attributes:
        target_precision: In (0, 1].
        num_thresholds: Number of thresholds, 2 or more.
    """

    target_precision: float
    num_thresholds: int = 1000

    name: ClassVar[str] = "hindsight_target_pr"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.target_precision <= 1 or self.num_thresholds < 2:
            raise ValueError(
                f"HindsightTargetPR: target_precision={self.target_precision} must be in (0, 1] "
                f"and num_thresholds={self.num_thresholds} 2 or more"
            )

    @property
    def domains(self) -> tuple[Domain | None, Domain | None]:
        return PROBABILITY, LABEL

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        thresholds = jnp.linspace(0, 1, self.num_thresholds, dtype=jnp.float32)
        # A sample is taken for positive at this many thresholds: the first ones.
        reached = jnp.searchsorted(thresholds, batch.predictions, side="right")
        passed = jnp.searchsorted(thresholds, batch.predictions, side="left")
        positives = batch.weights * batch.labels

        def histogram(x: Float[Array, "tasks batch"], bins: Array) -> Float[Array, "tasks bins"]:
            count = self.num_thresholds + 1
            return jax.vmap(lambda x, b: jax.ops.segment_sum(x, b, count))(x, bins)

        return {
            "positives": histogram(positives, reached),
            "negatives": histogram(batch.weights - positives, reached),
            "missed": histogram(positives, passed if self.compat else reached),
        }

    def values(self, sums: Sums) -> Values:
        def at_or_above(histogram: Float[np.ndarray, "tasks bins"]) -> np.ndarray:
            return np.cumsum(histogram[:, ::-1], axis=1)[:, ::-1][:, 1:]

        true, false = at_or_above(sums["positives"]), at_or_above(sums["negatives"])
        missed = np.cumsum(sums["missed"], axis=1)[:, :-1]
        precision = np.nan_to_num(ratio(true, true + false))
        good = precision >= self.target_precision
        index = np.where(good.any(axis=1), good.argmax(axis=1), self.num_thresholds - 1)
        rows = np.arange(self.tasks)
        values = {
            "hindsight_target_pr_threshold_index": index.astype(np.float64),
            "hindsight_target_precision": precision[rows, index],
            "hindsight_target_recall": ratio(
                true[rows, index], true[rows, index] + missed[rows, index]
            ),
        }
        if self.compat is not None:
            return values | {
                "hindsight_target_recall": np.nan_to_num(values["hindsight_target_recall"])
            }
        return {name: np.where(good.any(axis=1), x, np.nan) for name, x in values.items()}
