"""Metrics of a classifier's decisions, for binary labels, classes and several labels per sample."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrec.metrics.averages import Mean
from jaxrec.metrics.domain import BINARY_LABEL, LABEL, NUMBER, PROBABILITY, Domain, Domains
from jaxrec.metrics.metric import Batch, SumMetric, Sums, Values, ratio
from jaxrec.metrics.sums import sum_by_place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accuracy(Mean):
    """The share of right decisions, ``sum w [(p >= threshold) = y] / sum w`` (``accuracy``).

    Attributes:
        threshold: Smallest prediction that decides for positive.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = Accuracy(window=None)
        >>> state = metric.update(metric.init(), jnp.array([0.9, 0.2]), jnp.array([1.0, 1.0]))
        >>> metric.compute(state)["lifetime_accuracy"].tolist()
        [0.5]
    """

    threshold: float = 0.5

    name: ClassVar[str] = "accuracy"
    total: ClassVar[str] = "right"
    domains: ClassVar[Domains] = (NUMBER, BINARY_LABEL)

    def averaged(self, batch: Batch) -> Bool[Array, "tasks batch"]:
        return (batch.predictions >= self.threshold) == batch.labels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision(SumMetric):
    """The share of positive samples among the samples decided positive (``precision``).

    Undefined if no sample is decided positive; ``compat="torchrec"`` reports 0.

    Attributes:
        threshold: Smallest prediction that decides for positive.
    """

    threshold: float = 0.5

    name: ClassVar[str] = "precision"
    torchrec_undefined: ClassVar[float] = 0.0
    domains: ClassVar[Domains] = (NUMBER, LABEL)

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
    """The share of the positive samples that are decided positive (``recall``).

    Undefined without positive samples. ``compat="torchrec"`` reports 0 there, and counts a positive
    sample as both found and missed if its prediction equals the threshold.

    Attributes:
        threshold: Smallest prediction that decides for positive.
    """

    threshold: float = 0.5

    name: ClassVar[str] = "recall"
    torchrec_undefined: ClassVar[float] = 0.0
    domains: ClassVar[Domains] = (NUMBER, LABEL)

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
    """The share of samples whose class is among the ``k`` highest scores (``multiclass_recall``).

    Reports ``[tasks, num_classes]``, for ``k`` from 1 to ``num_classes``. Predictions are
    ``[tasks, batch, num_classes]`` and labels are class numbers. The lower of two classes with
    equal scores comes first.

    A label outside the classes is an error; under ``compat="torchrec"`` it is never found.

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
    def domains(self) -> Domains:
        if self.compat is not None:
            return NUMBER, NUMBER
        return NUMBER, Domain(low=0, high=self.num_classes - 1, whole=True)

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        scores, label = batch.predictions, batch.labels.astype(jnp.int32)[..., None]
        classes = jnp.arange(self.num_classes)[None, None]
        of_label = jnp.take_along_axis(scores, jnp.clip(label, 0, self.num_classes - 1), axis=-1)
        # A rank needs no sort: it is the number of classes that come before the label's.
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

    The threshold is the first of ``0, 1 / (n - 1), ..., 1`` at which the samples with
    ``p >= threshold`` have a precision of at least ``target_precision``. Reports
    ``hindsight_target_pr_threshold_index``, ``hindsight_target_precision`` and
    ``hindsight_target_recall``. They are undefined if no threshold reaches the precision.

    Under ``compat="torchrec"`` the last threshold is reported if none reaches the precision, and a
    positive sample whose prediction equals the threshold counts twice, as found and as missed.

    Attributes:
        target_precision: Precision to reach, in (0, 1].
        num_thresholds: Number of thresholds, 2 or more.
    """

    target_precision: float
    num_thresholds: int = 1000

    name: ClassVar[str] = "hindsight_target_pr"
    domains: ClassVar[Domains] = (PROBABILITY, LABEL)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.target_precision <= 1 or self.num_thresholds < 2:
            raise ValueError(
                f"HindsightTargetPR: target_precision={self.target_precision} must be in (0, 1] "
                f"and num_thresholds={self.num_thresholds} 2 or more"
            )

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        thresholds = jnp.linspace(0, 1, self.num_thresholds, dtype=jnp.float32)
        # Each sample goes into the bin of the number of thresholds that decide it positive, which
        # are the first ones. Cumulative sums over the bins then give the counts at each threshold:
        # a batch costs a search per sample, and not a comparison per sample and threshold.
        reached = jnp.searchsorted(thresholds, batch.predictions, side="right")
        passed = jnp.searchsorted(thresholds, batch.predictions, side="left")
        positives, count = batch.weights * batch.labels, self.num_thresholds + 1
        return {
            "positives": sum_by_place(positives, reached, count),
            "negatives": sum_by_place(batch.weights - positives, reached, count),
            "missed": sum_by_place(positives, passed if self.compat else reached, count),
        }

    def values(self, sums: Sums) -> Values:
        def at_or_above(histogram: Float[np.ndarray, "tasks bins"]) -> np.ndarray:
            # Bin 0 is below all thresholds.
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
            return {name: np.nan_to_num(x) for name, x in values.items()}
        return {name: np.where(good.any(axis=1), x, np.nan) for name, x in values.items()}


# Labels are float32 in `Batch`, which holds integers of 24 bits exactly.
MAX_LABELS = 24


def label_codes(labels: Bool[Array | np.ndarray, "*batch labels"]) -> Int[Array, "*batch"]:
    """Encode the labels of each sample as one integer, label 0 in the lowest bit.

    Args:
        labels: ``[*batch, labels]``, whether a sample has each label; up to 24 labels.

    Raises:
        ValueError: The last axis has more than 24 labels.

    Example:
        >>> import jax.numpy as jnp
        >>> label_codes(jnp.array([[True, False, True], [False, True, False]])).tolist()
        [5, 2]
    """
    if labels.shape[-1] > MAX_LABELS:
        raise ValueError(
            f"label_codes takes up to {MAX_LABELS} labels, got {labels.shape[-1]}; use "
            "several metrics for parts of them"
        )
    return jnp.asarray(labels, jnp.int32) @ (1 << jnp.arange(labels.shape[-1]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiLabelPrecision(SumMetric):
    """The precision of each label (``multi_label_precision``), ``[tasks, num_labels]``.

    Predictions and labels are integers, as `label_codes` makes them: bit ``i`` is 1 if the sample
    has label ``i``. The precision of a label that was never predicted is undefined.

    ``compat="torchrec"`` reports 0 there, and ignores the bits of further labels.

    Attributes:
        num_labels: Number of labels, from 1 to 24.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = MultiLabelPrecision(num_labels=2, window=None)
        >>> scores = jnp.array([[0.9, 0.7], [0.8, 0.1]])
        >>> truth = jnp.array([[True, True], [False, True]])
        >>> state = metric.update(metric.init(), label_codes(scores > 0.5), label_codes(truth))
        >>> metric.compute(state)["lifetime_multi_label_precision"].tolist()
        [[0.5, 1.0]]
    """

    num_labels: int

    name: ClassVar[str] = "multi_label_precision"
    torchrec_undefined: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_labels <= MAX_LABELS:
            raise ValueError(
                f"MultiLabelPrecision: num_labels={self.num_labels} must be from 1 to {MAX_LABELS}"
            )

    @property
    def domains(self) -> Domains:
        labels = MAX_LABELS if self.compat else self.num_labels
        code = Domain(
            low=0,
            high=2**labels - 1,
            whole=True,
            remedy="encode whether each label applies by label_codes",
        )
        return code, code

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        def bits(codes: Float[Array, "tasks batch"]) -> Float[Array, "tasks batch labels"]:
            masks = 1 << jnp.arange(self.num_labels)[None, None]
            return ((codes.astype(jnp.int32)[..., None] & masks) > 0).astype(jnp.float32)

        predicted = batch.weights[..., None] * bits(batch.predictions)
        labels = bits(batch.labels)
        return {
            "true_positives": (predicted * labels).sum(axis=1),
            "false_positives": (predicted * (1 - labels)).sum(axis=1),
        }

    def values(self, sums: Sums) -> Values:
        predicted = sums["true_positives"] + sums["false_positives"]
        return {self.name: ratio(sums["true_positives"], predicted)}
