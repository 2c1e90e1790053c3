"""Loss and metrics of models that predict clicks."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from jaxrec.data import ClickBatch
from jaxrec.mesh.agree import of_all_processes, on_host
from jaxrec.metrics import Calibration, LogLoss, NormalizedEntropy, auc
from jaxrec.nn import sum_in_chunks
from jaxrec.train.datasets import LogDataset, ParquetDataset
from jaxrec.train.evaluation import Evaluation
from jaxrec.train.model import Model, with_rows
from jaxrec.train.open_vocabularies import describe, scalars
from jaxrec.train.placed_batches import placed_batches, put_batch
from jaxrec.train.progress import Progress
from jaxrec.train.trainer import Callback, StepResult, Trainer

# Names of the sums in the outputs of `click_loss`, in order, and of its arrays of samples.
SUMS = ("samples", "cross_entropy", "predictions", "positives", "weights")
SAMPLES = ("logits", "labels", "weights")

# Numbers of steps over which running values and their AUC are taken.
WINDOW = 200
AUC_WINDOW = 20


def click_loss(model: Model, batch: ClickBatch) -> tuple[Float[Array, ""], Mapping[str, Array]]:
    """Return the weighted mean cross entropy of a batch, and the outputs for `click_metrics`.

    The outputs are ``logits``, ``labels`` and ``weights``, each ``[batch]``, and ``sums``,
    ``[len(SUMS)]``.
    """
    batch = with_rows(model, batch)
    labels, weights = jnp.asarray(batch.labels), jnp.asarray(batch.weights)
    # Embeddings are looked up for the whole batch. The layers then run in chunks, whose activations
    # stay in a CPU's caches.
    embedded = model.lookup(batch.features)
    cross_entropy, logits = sum_in_chunks(
        _cross_entropy, model, batch.dense, embedded, labels, weights
    )
    total = weights.sum()
    predictions, positives = (weights * jax.nn.sigmoid(logits)).sum(), (weights * labels).sum()
    samples = (weights > 0).sum().astype(jnp.float32)
    sums = jnp.stack([samples, cross_entropy, predictions, positives, total])
    outputs = {"logits": logits, "labels": labels, "weights": weights, "sums": sums}
    # All samples of a batch may have weight 0.
    return cross_entropy / jnp.where(total > 0, total, 1), outputs


def _cross_entropy(
    model: Model,
    dense: Any,
    embedded: Any,
    labels: Float[Array, " batch"],
    weights: Float[Array, " batch"],
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """Return each sample's weighted cross entropy and logit."""
    logits = model.logits(dense, embedded)
    return weights * optax.sigmoid_binary_cross_entropy(logits, labels), logits


def click_metrics(sums: Float[np.ndarray, " sums"]) -> dict[str, float]:
    """Return normalized entropy, log loss and calibration from float64 sums, ``[len(SUMS)]``."""
    by_name = {name: sums[[i]] for i, name in enumerate(SUMS)}
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "normalized_entropy": NormalizedEntropy().values(by_name)["ne"].item(),
            "log_loss": LogLoss().values(by_name)["logloss"].item(),
            "calibration": Calibration().values(by_name)["calibration"].item(),
        }


@dataclasses.dataclass(eq=False)
class RunningMetrics(Callback):
    """Shows and records the metrics of the last steps.

    ``record(step, compute)`` is called every ``every`` steps and after the last one. ``compute()``
    returns the values by name; another thread may call it.
    """

    progress: Progress
    record: Callable[[int, Callable[[], dict[str, float]]], None]
    every: int = 100

    needs_outputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # Sums are five numbers a step, samples a whole batch: hence the two windows.
        self._sums: collections.deque[np.ndarray] = collections.deque(maxlen=WINDOW)
        self._samples: collections.deque[list[np.ndarray]] = collections.deque(maxlen=AUC_WINDOW)

    def on_train_start(self, trainer: Trainer) -> None:
        self._model = trainer.model
        self._step = self._recorded_step = trainer.step

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        (outputs,) = result.outputs
        self._step = result.step
        self._sums.append(on_host(outputs["sums"]).astype(np.float64))
        self.progress.advance(int(self._sums[-1][SUMS.index("samples")]))
        self._samples.append([on_host(outputs[name]) for name in SAMPLES])
        if self.progress.is_due():
            values = click_metrics(np.sum(self._sums, axis=0))
            self.progress.show(result.step, values["normalized_entropy"], describe(self._model))
        if result.step % self.every == 0:
            self._record_values()

    def on_train_end(self, trainer: Trainer) -> None:
        if self._step > self._recorded_step:
            self._record_values()

    def _record_values(self) -> None:
        self._recorded_step = self._step
        sums = np.sum(self._sums, axis=0)
        columns = (np.concatenate(column) for column in zip(*self._samples, strict=True))
        # Processes gather samples in the order of their steps, hence in this thread.
        logits, labels, weights = (of_all_processes(column).reshape(-1) for column in columns)
        others = scalars(self._model)
        if rate := self.progress.samples_per_second:
            others = {"samples_per_second": rate, **others}

        def compute() -> dict[str, float]:
            values = click_metrics(sums)
            del values["calibration"]
            is_real = weights > 0
            values["auc"] = auc(logits[is_real], labels[is_real], weights[is_real])
            return values | others

        self.record(self._step, compute)


@dataclasses.dataclass(eq=False)
class HeldOutEvaluation(Callback):
    """Evaluates a model on held-out rows, every ``every`` steps (None: never) and on demand.

    An evaluation ends after a batch if ``stop()`` returns True; ``report(step, values)`` gets its
    result. ``paused()`` returns a context for an evaluation, such as `Progress.paused`.
    """

    model: nnx.Module
    dataset: LogDataset | ParquetDataset
    batch_size: int
    place: Callable[[ClickBatch], ClickBatch] = put_batch
    stop: Callable[[], bool] = lambda: False
    every: int | None = None
    report: Callable[[int, dict[str, float]], None] | None = None
    paused: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __post_init__(self) -> None:
        self._evaluation = Evaluation()
        self._latest: tuple[int, dict[str, float]] | None = None

    def on_step_dispatched(self, trainer: Trainer, step: int) -> None:
        if self.every is not None and step % self.every == 0:
            trainer.wait()
            self.values_at(step)

    def values_at(self, step: int) -> dict[str, float] | None:
        """Return the values of `__call__` at a step, computed once; None if ``stop`` ended it."""
        if self._latest is None or self._latest[0] != step:
            with self.paused():
                values = self()
            if values is None:
                return None
            self._latest = step, values
            if self.report is not None:
                self.report(step, values)
        return self._latest[1]

    def __call__(self) -> dict[str, float] | None:
        """Evaluate the current model; return None if ``stop`` ended the evaluation.

        The values are ``auc``, the values of `click_metrics`, and ``best_auc``, the AUC of the true
        probabilities, where they are known.
        """
        columns, sums = [], np.zeros(len(SUMS))
        host_batches = self.dataset.batches(self.batch_size)
        with placed_batches(
            self.model, host_batches, place=self.place, is_training=False
        ) as batches:
            for outputs in self._evaluation.outputs(self.model, click_loss, batches):
                columns.append([on_host(outputs[name]) for name in SAMPLES])
                sums += on_host(outputs["sums"])
                if self.stop():
                    return None
        # From `[processes, batches, samples]` to `[batches, processes, samples]`, the order of the
        # rows and so of their true probabilities.
        logits, labels, weights = (
            np.moveaxis(of_all_processes(np.stack(column)), 0, 1).reshape(-1)
            for column in zip(*columns, strict=True)
        )
        is_real = weights > 0
        values = {"auc": auc(logits[is_real], labels[is_real], weights[is_real])}
        probabilities = self.dataset.probabilities()
        if probabilities is not None:
            values["best_auc"] = auc(probabilities, labels[is_real])
        return values | click_metrics(sums)
