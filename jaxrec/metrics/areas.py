"""AUC, AUPRC and RAUC over the last samples, exactly."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from jaxrec.metrics.curves import auc, average_precision, regression_auc
from jaxrec.metrics.domain import LABEL, NUMBER, Domain
from jaxrec.metrics.samples import SampleMetric, Samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class AUC(SampleMetric):
    """The area under the ROC curve of the last samples (``window_auc``); see `auc`.

    With groups, the means over groups (``window_grouped_auc``, ``window_weighted_grouped_auc``)
    take the groups with samples of both labels. Under ``compat="torchrec"`` they take all groups,
    and a group of a single label counts 0.5. The value is 0.5 where all labels are equal and NaN if
    a prediction is NaN. For the area over all samples see `BinnedAUC`.

    Attributes:
        label_threshold: Labels from this on count as 1, others as 0 (TorchRec's ``apply_bin`` has
            0.039); None: labels as they are, 0 or 1 or shares between.

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

    @property
    def domains(self) -> tuple[Domain | None, Domain | None]:
        return NUMBER, LABEL if self.label_threshold is None else NUMBER

    def value(self, samples: Samples) -> float:
        return auc(samples.predictions, self._labels(samples), samples.weights, compat=self.compat)

    def counts(self, samples: Samples) -> bool:
        positives = (samples.weights * self._labels(samples)).sum()
        return self.compat is not None or bool(0 < positives < samples.weights.sum())

    def _labels(self, samples: Samples) -> Float[np.ndarray, " samples"]:
        if self.label_threshold is None:
            return samples.labels
        return (samples.labels >= self.label_threshold).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AUPRC(SampleMetric):
    """The area under the precision-recall curve of the last samples (``window_auprc``).

    See `average_precision`. With groups, the means over groups take the groups with positive
    samples, and all groups under ``compat="torchrec"``. NaN if a prediction is NaN.

    TorchRec's lifetime value is the mean of the values computed so far, weighed by the weight of
    the samples then in the window. `WeightedAverage`, fed with value and `weight`, is that.
    """

    name: ClassVar[str] = "auprc"

    @property
    def domains(self) -> tuple[Domain | None, Domain | None]:
        return NUMBER, LABEL

    def value(self, samples: Samples) -> float:
        return average_precision(samples.predictions, samples.labels, samples.weights)

    def counts(self, samples: Samples) -> bool:
        return self.compat is not None or bool((samples.weights * samples.labels).sum() > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RAUC(SampleMetric):
    """The share of pairs of the last samples that predictions order by label (``window_rauc``).

    See `regression_auc`. With groups, the means over groups take the groups with two labels, and
    all groups under ``compat="torchrec"``. NaN if a prediction is NaN.
    """

    name: ClassVar[str] = "rauc"

    def value(self, samples: Samples) -> float:
        return regression_auc(
            samples.predictions, samples.labels, samples.weights, compat=self.compat
        )

    def counts(self, samples: Samples) -> bool:
        return self.compat is not None or bool(np.ptp(samples.labels) > 0)
