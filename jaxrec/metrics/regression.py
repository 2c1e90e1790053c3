"""Errors of predicted numbers."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrec.metrics.metric import Batch, SumMetric, Sums, Values, ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanSquaredError(SumMetric):
    """``sum w (y - p)^2 / sum w``, its root, and the share of variance explained.

    Reports ``mse``, ``rmse`` and ``r_squared = 1 - sum w (y - p)^2 / sum w (y - mean)^2``, which
    has no value where all labels are equal.

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
        variation = sums["squared_labels"] - ratio(sums["labels"] ** 2, sums["weights"])
        return {
            "mse": mse,
            "rmse": np.sqrt(mse),
            "r_squared": 1 - ratio(sums["squared_error"], variation),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanAbsoluteError(SumMetric):
    """``sum w |y - p| / sum w`` (``mae``)."""

    name: ClassVar[str] = "mae"

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        error = jnp.abs(batch.labels - batch.predictions)
        return {
            "absolute_error": (batch.weights * error).sum(axis=1),
            "weights": batch.weights.sum(axis=1),
        }

    def values(self, sums: Sums) -> Values:
        return {self.name: ratio(sums["absolute_error"], sums["weights"])}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormalizedMeanSquaredError(SumMetric):
    """The squared error over that of a constant prediction (``nmse``, its root ``nrmse``).

    Attributes:
        constant: The prediction compared with; TorchRec's is 1.
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
