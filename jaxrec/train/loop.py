"""The training loop and the evaluation on held-out rows."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrec.data import ClickBatch
from jaxrec.embed import Optimizer, value_and_grad
from jaxrec.mesh.agree import of_all_processes, on_host
from jaxrec.metrics import BinarySums, auc, binary_sums, log_loss, normalized_entropy
from jaxrec.train.ahead import RoutedSteps
from jaxrec.train.model import Model, predict
from jaxrec.train.pipeline import AHEAD, Pipeline
from jaxrec.train.place import put
from jaxrec.train.progress import Progress
from jaxrec.train.rows import ParquetRows, Rows
from jaxrec.train.trace import StepTrace
from jaxrec.train.trainer import NotFiniteError as NotFiniteError
from jaxrec.train.trainer import not_finite

# Steps over which the running values are taken, and those of them that AUC is made of.
WINDOW = 200
AUC_WINDOW = 20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Measured:
    """What a step measures on its batch, before the update.

    Attributes:
        sums: For loss, normalized entropy and calibration.
        samples: Number of samples that are no padding.
        logits: ``[batch]`` float32, NaN in padding.
        skipped: Steps skipped since the last update, this one included.
    """

    sums: BinarySums
    samples: Int[Array, ""]
    logits: Float[Array, " batch"]
    skipped: Int[Array, ""]


def train_step(model: Model, optimizer: Optimizer, batch: ClickBatch) -> Measured:
    """One step."""

    def loss_fn(model: Model) -> tuple[Float[Array, ""], Measured]:
        logits = predict(model, batch)
        losses = optax.sigmoid_binary_cross_entropy(logits, batch.labels)
        total = batch.weights.sum()
        # All samples of a batch may have the weight 0.
        loss = (batch.weights * losses).sum() / jnp.where(total > 0, total, 1)
        sums = binary_sums(logits, batch.labels, batch.weights)
        is_real = batch.weights > 0
        measured = Measured(
            sums, is_real.sum(), jnp.where(is_real, logits, jnp.nan), jnp.zeros((), jnp.int32)
        )
        return loss, measured

    (_, measured), gradients = value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, gradients)
    return dataclasses.replace(measured, skipped=optimizer.skipped_in_a_row.get_value())


def train(
    model: Model,
    optimizer: Optimizer,
    rows: Rows | ParquetRows,
    *,
    batch_size: int,
    epochs: int,
    progress: Progress,
    stop: Callable[[], Any] = lambda: False,
    record: Callable[[int, dict[str, float]], None] = lambda step, values: None,
    record_every: int = 100,
    save: Callable[[], Any] = lambda: None,
    save_every: int | None = None,
    evaluate: Callable[[], Any] = lambda: None,
    evaluate_every: int | None = None,
    trace: StepTrace | None = None,
    place: Callable[[ClickBatch], ClickBatch] = put,
) -> None:
    """Trains on the rows from where the optimizer's step count says that training is.

    Args:
        model, optimizer: Changed in place.
        rows: What to train on.
        batch_size: Samples of a step.
        epochs: How often to go through the rows, steps made before included.
        progress: Told of every step.
        stop: Asked after each step; training ends early once it says so.
        record: Told the step and the running values, every ``record_every`` steps and at the end.
        record_every: See ``record``.
        save: Called every ``save_every`` steps, when the losses of all steps so far are numbers.
        save_every: See ``save``; None: never.
        evaluate: Called every ``evaluate_every`` steps, before ``save``.
        evaluate_every: See ``evaluate``; None: never.
        trace: Told of every step.
        place: Puts a batch on the devices.

    Raises:
        NotFiniteError: The loss of a step is NaN or infinite.
        OSError, DataError: The rows cannot be read.
    """
    steps = RoutedSteps(train_step, predict, model, optimizer)
    per_epoch = rows.num_batches(batch_size)
    started = done = recorded = int(optimizer.step.get_value())
    window: collections.deque[BinarySums] = collections.deque(maxlen=WINDOW)
    scored: collections.deque[list[np.ndarray]] = collections.deque(maxlen=AUC_WINDOW)
    under_way: collections.deque[tuple[ClickBatch, Measured]] = collections.deque()

    def record_now() -> None:
        nonlocal recorded
        recorded = done
        record(done, _running(window, scored, progress))

    def finish(left: int) -> None:
        nonlocal done
        while len(under_way) > left:
            batch, measured = under_way.popleft()
            sums = measured.sums.on_host()
            done += 1
            if int(on_host(measured.skipped)):
                raise not_finite(model, done, float(sums.cross_entropy), (batch,))
            window.append(sums)
            progress.advance(int(on_host(measured.samples)))
            scored.append([on_host(x) for x in (measured.logits, batch.labels, batch.weights)])
            if progress.is_due():
                progress.show(done, normalized_entropy(sum(window, BinarySums())))
            if done % record_every == 0:
                record_now()

    first_epoch, first_batch = divmod(done, per_epoch)
    for epoch in range(first_epoch, epochs):
        stream = rows.batches(batch_size, first_batch if epoch == first_epoch else 0, epoch)
        with Pipeline(stream, place) as placed:
            for batch, measured in steps(placed):
                if trace is not None:
                    trace.step()
                under_way.append((batch, measured))
                finish(AHEAD)
                made = done + len(under_way)
                for call, every in ((evaluate, evaluate_every), (save, save_every)):
                    if every is not None and made % every == 0 and made > started:
                        finish(0)
                        with progress.paused():
                            call()
                if stop():
                    break
        if stop():
            break
    finish(0)
    if done > recorded:
        record_now()


def _running(
    window: Iterable[BinarySums],
    scored: Iterable[list[np.ndarray]],
    progress: Progress,
) -> dict[str, float]:
    """The values of the last steps."""
    sums = sum(window, BinarySums())
    columns = (np.concatenate(column) for column in zip(*scored, strict=True))
    logits, labels, weights = (of_all_processes(column).reshape(-1) for column in columns)
    real = ~np.isnan(logits)
    values = {
        "log_loss": log_loss(sums),
        "normalized_entropy": normalized_entropy(sums),
        "auc": auc(logits[real], labels[real], weights[real]),
    }
    rate = progress.samples_per_second
    return values | ({"samples_per_second": rate} if rate else {})


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How well a model predicts rows that it was not trained on.

    Attributes:
        auc: Area under the ROC curve.
        best_auc: The area that the true probabilities have, where they are known.
        sums: For normalized entropy, log loss and calibration.
    """

    auc: float
    best_auc: float | None
    sums: BinarySums


class Evaluator:
    """Predicts held-out rows, as often as asked; it compiles once.

    Args:
        model: The model; each call takes it as it is then.
        rows: What to predict.
        batch_size: Samples at a time.
        place: As for `train`.
    """

    def __init__(
        self,
        model: Model,
        rows: Rows | ParquetRows,
        *,
        batch_size: int,
        place: Callable[[ClickBatch], ClickBatch] = put,
    ):
        self._model, self._rows = model, rows
        self._batch_size, self._place = batch_size, place
        graph, _ = nnx.split(model)

        def predict_and_sum(
            state: nnx.State, batch: ClickBatch
        ) -> tuple[Float[Array, " batch"], BinarySums]:
            logits = predict(nnx.merge(graph, state), batch)
            return logits, binary_sums(logits, batch.labels, batch.weights)

        self._predict = jax.jit(predict_and_sum)

    def __call__(self, stop: Callable[[], Any] = lambda: False) -> Evaluation | None:
        """Predicts the rows; None if ``stop`` said so before the last.

        Raises:
            OSError, DataError: The rows cannot be read.
        """
        _, state = nnx.split(self._model)
        predicted, sums = [], BinarySums()
        with Pipeline(self._rows.batches(self._batch_size), self._place) as placed:
            for batch in placed:
                logits, batch_sums = self._predict(state, batch)
                predicted.append([on_host(x) for x in (logits, batch.labels, batch.weights)])
                sums = sums + batch_sums.on_host()
                if stop():
                    return None
        # [batches, processes, samples] is the order of the rows.
        logits, labels, weights = (
            np.moveaxis(of_all_processes(np.stack(column)), 0, 1).reshape(-1)
            for column in zip(*predicted, strict=True)
        )
        real = weights > 0
        truth = self._rows.probabilities()
        return Evaluation(
            auc(logits[real], labels[real], weights[real]),
            None if truth is None else auc(truth, labels[real]),
            sums,
        )
