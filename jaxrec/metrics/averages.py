"""Metrics that are means and sums of predictions and labels, such as calibration and errors."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrec.metrics.domain import AMOUNT, LABEL, NUMBER, PROBABILITY, Domains
from jaxrec.metrics.entropy import CountsExamples, check_coefficient, recalibrated
from jaxrec.metrics.metric import Batch, SumMetric, Sums, Values, ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean(SumMetric):
    """Base of metrics that are the weighted mean of one number per sample, ``sum w x / sum w``.

    Attributes:
        total: Name of ``sum w x`` in the state, by which checkpoints save it.
    """

    total: ClassVar[str] = "total"

    @abc.abstractmethod
    def averaged(self, batch: Batch) -> Float[Array, "tasks batch"]:
        """Return the number of each sample to average, ``[tasks, batch]``."""

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        return {
            self.total: (batch.weights * self.averaged(batch)).sum(axis=1),
            "weights": batch.weights.sum(axis=1),
        }

    def values(self, sums: Sums) -> Values:
        return {self.name: ratio(sums[self.total], sums["weights"])}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration(SumMetric):
    """Predicted over actual positives, ``sum w p / sum w y`` (``calibration``).

    1 is best: the predictions are right on average. Without positives the value is undefined;
    ``compat="torchrec"`` reports 0.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = Calibration(window=None)
        >>> state = metric.update(metric.init(), jnp.array([0.75, 0.5]), jnp.array([0.0, 1.0]))
        >>> metric.compute(state)["lifetime_calibration"].tolist()
        [1.25]
    """

    name: ClassVar[str] = "calibration"
    torchrec_undefined: ClassVar[float] = 0.0
    domains: ClassVar[Domains] = (AMOUNT, AMOUNT)

    def probabilities(self, batch: Batch) -> Float[Array, "tasks batch"]:
        """Return the predictions to compare with the labels, ``[tasks, batch]``."""
        return batch.predictions

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        return {
            "predictions": (batch.weights * self.probabilities(batch)).sum(axis=1),
            "positives": (batch.weights * batch.labels).sum(axis=1),
        }

    def values(self, sums: Sums) -> Values:
        return {self.name: ratio(sums["predictions"], sums["positives"])}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecalibratedCalibration(Calibration):
    """`Calibration` of ``p / (p + (1 - p) / c)``; see `RecalibratedNormalizedEntropy`.

    Attributes:
        coefficient: ``c``, above 0.
    """

    coefficient: float = 1.0

    name: ClassVar[str] = "calibration"
    domains: ClassVar[Domains] = (PROBABILITY, AMOUNT)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_coefficient(self, self.coefficient)

    def probabilities(self, batch: Batch) -> Float[Array, "tasks batch"]:
        return recalibrated(batch.predictions, self.coefficient)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingCalibration(CountsExamples, Calibration):
    """`Calibration` with its number of samples (``calibration``, ``total_examples``).

    ``total_examples`` counts all samples so far whose weight is above 0.
    """

    name: ClassVar[str] = "calibration"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickThroughRate(Mean):
    """The mean label ``sum w y / sum w`` (``ctr``).

    Without samples it is undefined; ``compat="torchrec"`` reports 0.
    """

    name: ClassVar[str] = "ctr"
    total: ClassVar[str] = "positives"
    torchrec_undefined: ClassVar[float] = 0.0
    domains: ClassVar[Domains] = (None, LABEL)

    def averaged(self, batch: Batch) -> Float[Array, "tasks batch"]:
        return batch.labels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Average(SumMetric):
    """The mean label and the mean prediction (``label_average``, ``prediction_average``)."""

    name: ClassVar[str] = "average"

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        return {
            "labels": (batch.weights * batch.labels).sum(axis=1),
            "predictions": (batch.weights * batch.predictions).sum(axis=1),
            "weights": batch.weights.sum(axis=1),
        }

    def values(self, sums: Sums) -> Values:
        return {
            "label_average": ratio(sums["labels"], sums["weights"]),
            "prediction_average": ratio(sums["predictions"], sums["weights"]),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedAverage(Mean):
    """The mean prediction ``sum w p / sum w`` (``weighted_avg``).

    TorchRec counts each update as one sample of the window; this metric counts its samples, also
    under ``compat="torchrec"``.
    """

    name: ClassVar[str] = "weighted_avg"
    domains: ClassVar[Domains] = (NUMBER, None)

    def averaged(self, batch: Batch) -> Float[Array, "tasks batch"]:
        return jnp.where(batch.real, batch.predictions, 0)  # compat leaves padding in


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorWeightedAverage(WeightedAverage):
    """The weighted mean of an array with one number per sample (``weighted_avg``).

    Without weights it is the plain mean (TorchRec's ``weighted=False``).

    Attributes:
        tensor: Name of the array among the inputs of `update`, ``[batch]`` or ``[tasks, batch]``.
    """

    tensor: str

    name: ClassVar[str] = "weighted_avg"
    domains: ClassVar[Domains] = (None, None)

    @property
    def required(self) -> tuple[str, ...]:
        return (self.tensor,)

    @property
    def whole(self) -> tuple[str, ...]:
        return ()

    def averaged(self, batch: Batch) -> Float[Array, "tasks batch"]:
        # `Metric.batch` clears the predictions of padding, but not further inputs.
        return jnp.where(batch.real, batch.inputs[self.tensor].astype(jnp.float32), 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingLoss(CountsExamples, TensorWeightedAverage):
    """The weighted mean of a loss that the model reports per sample, with the number of samples.

    ``ServingLoss(tensor="ae_loss")`` reports ``serving_ae_loss``, a name of TorchRec, which does
    not define the loss. ``total_examples`` counts all samples so far whose weight is above 0.

    Attributes:
        tensor: Name of the loss among the inputs of `update`, ``[batch]`` or ``[tasks, batch]``.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = ServingLoss(tensor="ae_loss", window=None)
        >>> x = jnp.zeros(2)
        >>> state = metric.update(metric.init(), x, x, ae_loss=jnp.array([1.0, 2.0]))
        >>> metric.compute(state)["lifetime_serving_ae_loss"].tolist()
        [1.5]
    """

    def values(self, sums: Sums) -> Values:
        return {f"serving_{self.tensor}": ratio(sums["total"], sums["weights"])}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumOfWeights(SumMetric):
    """The total weight of the samples, ``sum w`` (``sum_weights``)."""

    name: ClassVar[str] = "sum_weights"
    domains: ClassVar[Domains] = (None, None)

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        return {"weights": batch.weights.sum(axis=1)}

    def values(self, sums: Sums) -> Values:
        return {self.name: sums["weights"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedSumOfPredictions(SumMetric):
    """The weighted sum of the predictions, ``sum w p`` (``weighted_sum_predictions``)."""

    name: ClassVar[str] = "weighted_sum_predictions"
    domains: ClassVar[Domains] = (NUMBER, None)

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        return {"predictions": (batch.weights * batch.predictions).sum(axis=1)}

    def values(self, sums: Sums) -> Values:
        return {self.name: sums["predictions"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumPositives(SumMetric):
    """The number of samples with a label above 0 (``num_positive_samples``).

    A label of NaN is missing and not counted. ``compat="torchrec"`` gives ``sum w y``, which is not
    a count in spite of its name.
    """

    name: ClassVar[str] = "num_positive_samples"
    domains: ClassVar[Domains] = (None, None)

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        if self.compat is not None:
            counted = batch.weights * jnp.nan_to_num(batch.labels)
        else:
            # NaN compares false; the labels of padding are 0.
            counted = (batch.labels > 0).astype(jnp.float32)
        return {"positives": counted.sum(axis=1)}

    def values(self, sums: Sums) -> Values:
        return {self.name: sums["positives"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumMissingLabels(SumMetric):
    """The number of labels that are NaN (``num_missing_labels``).

    ``compat="torchrec"`` gives the sum of their samples' weights.
    """

    name: ClassVar[str] = "num_missing_labels"
    domains: ClassVar[Domains] = (None, None)

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        missing = jnp.isnan(batch.labels)
        counted = jnp.where(missing, batch.weights if self.compat else 1.0, 0.0)
        return {"missing": counted.sum(axis=1)}

    def values(self, sums: Sums) -> Values:
        return {self.name: sums["missing"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanSquaredError(SumMetric):
    """The mean squared error, its root, and the share of the labels' variance that is explained.

    Reports ``mse = sum w (y - p)^2 / sum w``, ``rmse`` and
    ``r_squared = 1 - sum w (y - p)^2 / sum w (y - mean)^2``, where ``mean`` is the mean label.
    ``r_squared`` is undefined if all labels are equal.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = MeanSquaredError(window=None)
        >>> state = metric.update(metric.init(), jnp.array([1.0, 2.0]), jnp.array([1.0, 4.0]))
        >>> metric.compute(state)["lifetime_mse"].tolist()
        [2.0]
    """

    name: ClassVar[str] = "mse"

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        weights, labels = batch.weights, batch.labels
        return {
            "squared_error": (weights * (labels - batch.predictions) ** 2).sum(axis=1),
            "labels": (weights * labels).sum(axis=1),
            "squared_labels": (weights * labels**2).sum(axis=1),
            "weights": weights.sum(axis=1),
        }

    def values(self, sums: Sums) -> Values:
        mse = ratio(sums["squared_error"], sums["weights"])
        # sum w (y - mean)^2, from sums that can be added up batch by batch.
        variation = sums["squared_labels"] - ratio(sums["labels"] ** 2, sums["weights"])
        return {
            "mse": mse,
            "rmse": np.sqrt(mse),
            "r_squared": 1 - ratio(sums["squared_error"], variation),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanAbsoluteError(Mean):
    """The mean absolute error ``sum w |y - p| / sum w`` (``mae``)."""

    name: ClassVar[str] = "mae"
    total: ClassVar[str] = "absolute_error"

    def averaged(self, batch: Batch) -> Float[Array, "tasks batch"]:
        return jnp.abs(batch.labels - batch.predictions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormalizedMeanSquaredError(SumMetric):
    """The squared error over the squared error of a constant prediction (``nmse``).

    Its root is reported as ``nrmse``.

    Attributes:
        constant: The constant prediction; TorchRec's is 1.
    """

    constant: float = 1.0

    name: ClassVar[str] = "nmse"

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        weights, labels = batch.weights, batch.labels
        return {
            "squared_error": (weights * (labels - batch.predictions) ** 2).sum(axis=1),
            "of_constant": (weights * (labels - self.constant) ** 2).sum(axis=1),
        }

    def values(self, sums: Sums) -> Values:
        nmse = ratio(sums["squared_error"], sums["of_constant"])
        return {"nmse": nmse, "nrmse": np.sqrt(nmse)}
