"""AUC and its kin over the last samples, exactly."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from jaxrec.metrics.auc import auc, average_precision, regression_auc
from jaxrec.metrics.samples import SampleMetric, Samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class AUC(SampleMetric):
    """The area under the ROC curve of the last samples (``window_auc``); see `auc`.

    With groups the mean over groups as well (``window_grouped_auc``): over those that have samples
    of both labels, and under ``compat="torchrec"`` over all, one of a single label counting 0.5.
    0.5 where all labels are equal; NaN if a prediction is NaN. For the area over all samples see
    `BinnedAUC`.

    Attributes:
        label_threshold: Labels from this on count as 1, others as 0 (TorchRec's ``apply_bin`` has
            0.039); None: labels as they are.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = AUC(window=4)
        >>> state = metric.update(
        ...     metric.init(), jnp.array([0.1, 0.4, 0.4, 0.8]), jnp.array([0.0, 0.0, 1.0, 1.0])
        ... )
        >>> metric.compute(state)["window_auc"].tolist()
        [0.875]
    """

    label_threshold: float | None = None

    name: ClassVar[str] = "auc"

    def value(self, samples: Samples) -> float:
        labels = samples.labels
        if self.label_threshold is not None:
            labels = (labels >= self.label_threshold).astype(np.float32)
        if np.isnan(samples.predictions).any():
            return float("nan")
        return auc(samples.predictions, labels, samples.weights, compat=self.compat)

    def grouped(self, groups: list[Samples]) -> float:
        if self.compat is None:
            groups = [group for group in groups if 0 < _positives(group) < group.weights.sum()]
        return _mean([self.value(group) for group in groups])


def _positives(samples: Samples) -> float:
    return float((samples.weights * samples.labels).sum())


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AUPRC(SampleMetric):
    """The area under the precision-recall curve of the last samples (``window_auprc``).

    See `average_precision`. With groups the mean over groups as well (``window_grouped_auprc``):
    over those that have positive samples, and under ``compat="torchrec"`` over all. NaN if a
    prediction is NaN.

    TorchRec's lifetime value is the mean of the values computed so far, weighed by the weight of
    the samples then in the window. `WeightedAverage`, fed with value and `weight`, is that.
    """

    name: ClassVar[str] = "auprc"

    def value(self, samples: Samples) -> float:
        if np.isnan(samples.predictions).any():
            return float("nan")
        return average_precision(samples.predictions, samples.labels, samples.weights)

    def grouped(self, groups: list[Samples]) -> float:
        if self.compat is None:
            groups = [group for group in groups if _positives(group) > 0]
        return _mean([self.value(group) for group in groups])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RAUC(SampleMetric):
    """How often predictions order two of the last samples as their labels do (``window_rauc``).

    See `regression_auc`. With groups the mean over groups as well (``window_grouped_rauc``): over
    those that have two labels, and under ``compat="torchrec"`` over all. NaN if a prediction is
    NaN.
    """

    name: ClassVar[str] = "rauc"

    def value(self, samples: Samples) -> float:
        if np.isnan(samples.predictions).any():
            return float("nan")
        return regression_auc(
            samples.predictions, samples.labels, samples.weights, compat=self.compat
        )

    def grouped(self, groups: list[Samples]) -> float:
        if self.compat is None:
            groups = [group for group in groups if np.ptp(group.labels) > 0]
        return _mean([self.value(group) for group in groups])
