"""Loss and metrics of labels: of clicks, by cross entropy, and of numbers, by the squared error."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxrec.data import ClickBatch, TableEncoder
from jaxrec.data.statistics import Moments
from jaxrec.metrics import Calibration, LogLoss, NormalizedEntropy, auc
from jaxrec.nn import sum_in_chunks
from jaxrec.nn.click_model import ClickModel
from jaxrec.train.models.kind import Measure
from jaxrec.train.open_vocabularies import with_rows

# The first sums of a loss's output "sums", before those of each task.
_SHARED = ("samples", "weights")


class LabelTask(abc.ABC):
    """Loss and metrics of a label, of which a model computes one number for each sample."""

    measures: ClassVar[tuple[Measure, ...]]
    loss_measure: ClassVar[str]
    """Name of the one of `measures` that the losses give."""
    sums: ClassVar[tuple[str, ...]]
    """Names of the sums of `terms`; the first is the sum of the losses."""

    @abc.abstractmethod
    def losses(
        self, outputs: Float[Array, " batch"], labels: Float[Array, " batch"]
    ) -> Float[Array, " batch"]:
        """Return the loss of each sample."""

    @abc.abstractmethod
    def terms(
        self, outputs: Float[Array, " batch"], labels: Float[Array, " batch"]
    ) -> list[Float[Array, " batch"]]:
        """Return each sample's terms of the sums, apart from the loss, which is the first."""

    @abc.abstractmethod
    def values(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return metrics from sums of weighted terms, ``[1]`` float64 each, and of the weights."""

    def sample_values(
        self,
        outputs: Float[np.ndarray, " samples"],
        labels: Float[np.ndarray, " samples"],
        weights: Float[np.ndarray, " samples"],
    ) -> dict[str, float]:
        """Return metrics that do not follow from sums."""
        return {}

    @abc.abstractmethod
    def predictions(self, outputs: Float[Array, " batch"]) -> dict[str, Array]:
        """Return the exported model's outputs, ``[batch]`` by name; first the prediction."""

    def in_units(self, labels: Float[np.ndarray, " samples"]) -> Float[np.ndarray, " samples"]:
        """Return labels of batches in the units of the predictions."""
        return labels


class ClickTask(LabelTask):
    """A label of 0 or 1; the model's output is its logit."""

    measures = (
        Measure("auc", "AUC", "max"),
        Measure("normalized_entropy", "NE", "min"),
        Measure("log_loss", "log loss", "min", " nats"),
        Measure("calibration", "calibration"),
    )
    loss_measure = "log_loss"
    sums = ("cross_entropy", "predictions", "positives")

    def losses(
        self, outputs: Float[Array, " batch"], labels: Float[Array, " batch"]
    ) -> Float[Array, " batch"]:
        return optax.sigmoid_binary_cross_entropy(outputs, labels)

    def terms(
        self, outputs: Float[Array, " batch"], labels: Float[Array, " batch"]
    ) -> list[Float[Array, " batch"]]:
        return [jax.nn.sigmoid(outputs), labels]

    def values(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return {
                "normalized_entropy": NormalizedEntropy().values(sums)["ne"].item(),
                "log_loss": LogLoss().values(sums)["logloss"].item(),
                "calibration": Calibration().values(sums)["calibration"].item(),
            }

    def sample_values(
        self,
        outputs: Float[np.ndarray, " samples"],
        labels: Float[np.ndarray, " samples"],
        weights: Float[np.ndarray, " samples"],
    ) -> dict[str, float]:
        return {"auc": auc(outputs, labels, weights)}

    def predictions(self, outputs: Float[Array, " batch"]) -> dict[str, Array]:
        return {"probability": jax.nn.sigmoid(outputs), "logit": outputs}


@dataclasses.dataclass(frozen=True)
class NumberTask(LabelTask):
    """A label of any numbers; the model's output is the standardized number.

    Attributes:
        moments: Mean and variance of the label in the training rows.
    """

    moments: Moments

    measures = (
        Measure("rmse", "RMSE", "min"),
        Measure("mae", "MAE", "min"),
        Measure("r2", "R2", "max"),
    )
    loss_measure = "rmse"
    sums = ("squares", "absolute", "labels", "label_squares")

    def losses(
        self, outputs: Float[Array, " batch"], labels: Float[Array, " batch"]
    ) -> Float[Array, " batch"]:
        return optax.squared_error(outputs, labels)

    def terms(
        self, outputs: Float[Array, " batch"], labels: Float[Array, " batch"]
    ) -> list[Float[Array, " batch"]]:
        return [jnp.abs(outputs - labels), labels, labels**2]

    def values(self, sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        with np.errstate(divide="ignore", invalid="ignore"):
            means = {name: (sums[name] / sums["weights"]).item() for name in self.sums}
            variance = np.float64(means["label_squares"] - means["labels"] ** 2)
            r2 = float(1 - means["squares"] / variance)
        scale = self.moments.scale
        return {
            "rmse": means["squares"] ** 0.5 * scale, "mae": means["absolute"] * scale, "r2": r2,
        }  # fmt: skip

    def predictions(self, outputs: Float[Array, " batch"]) -> dict[str, Array]:
        return {"prediction": outputs * self.moments.scale + self.moments.mean}

    def in_units(self, labels: Float[np.ndarray, " samples"]) -> Float[np.ndarray, " samples"]:
        return labels * self.moments.scale + self.moments.mean


def label_tasks(encoder: TableEncoder) -> dict[str, LabelTask]:
    """Return the task of each label of a table, by the label's name."""
    return {
        name: NumberTask(encoder.moments[name]) if label.kind == "number" else ClickTask()
        for name, label in encoder.schema.labels.items()
    }


def label_loss(
    tasks: Sequence[LabelTask], model: Any, batch: ClickBatch
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the weighted mean of the samples' losses, added over the tasks, and the outputs.

    The outputs are ``outputs`` and ``labels``, ``[batch, tasks]``, ``weights``, ``[batch]``, and
    ``sums``, as `task_sums` reads them.
    """
    batch = with_rows(model, batch)
    weights = jnp.asarray(batch.weights)
    labels = jnp.asarray(batch.labels).reshape(weights.shape[0], -1)
    if isinstance(model, ClickModel):
        # Embeddings are looked up for the whole batch. The layers then run in chunks, whose
        # activations stay in a CPU's caches.
        embedded = model.lookup(batch.features)
        losses = functools.partial(_chunk_losses, tasks)
        loss, (outputs, each) = sum_in_chunks(losses, model, batch.dense, embedded, labels, weights)
    else:
        outputs = model(batch.dense, batch.features)
        of_samples, (outputs, each) = _losses(tasks, outputs, labels, weights)
        loss = of_samples.sum()
    total = weights.sum()
    sums = [(weights > 0).sum().astype(jnp.float32), total]
    for number, task in enumerate(tasks):
        sums.append(each[:, number].sum())
        terms = task.terms(outputs[:, number], labels[:, number])
        sums += [(weights * term).sum() for term in terms]
    named = {"outputs": outputs, "labels": labels, "weights": weights, "sums": jnp.stack(sums)}
    # All samples of a batch may have weight 0.
    return loss / jnp.where(total > 0, total, 1), named


def _chunk_losses(
    tasks: Sequence[LabelTask], model: ClickModel, dense: Any, embedded: Any, *rest: Array
) -> Any:
    """Return the result of `_losses` for some samples of a batch."""
    return _losses(tasks, model.logits(dense, embedded), *rest)


def _losses(
    tasks: Sequence[LabelTask],
    outputs: Float[Array, "batch *tasks"],
    labels: Float[Array, "batch tasks"],
    weights: Float[Array, " batch"],
) -> tuple[Float[Array, " batch"], tuple[Float[Array, "batch tasks"], Float[Array, "batch tasks"]]]:
    """Return each sample's weighted loss, its outputs, and its weighted loss of each task."""
    outputs = outputs.reshape(labels.shape).astype(jnp.float32)
    each = jnp.stack(
        [
            weights * task.losses(outputs[:, number], labels[:, number])
            for number, task in enumerate(tasks)
        ],
        axis=1,
    )
    return each.sum(axis=1), (outputs, each)


def task_sums(
    tasks: Sequence[LabelTask], sums: Float[np.ndarray, " sums"]
) -> list[dict[str, np.ndarray]]:
    """Return each task's sums by name, ``[1]`` float64, from the sums of `label_loss`."""
    shared = {name: sums[[place]] for place, name in enumerate(_SHARED)}
    parts, first = [], len(_SHARED)
    for task in tasks:
        parts.append({name: sums[[place]] for place, name in enumerate(task.sums, first)} | shared)
        first += len(task.sums)
    return parts


def click_loss(model: Any, batch: ClickBatch) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the weighted mean cross entropy of a batch of clicks, and outputs for metrics."""
    return label_loss((ClickTask(),), model, batch)
