"""The training loop and the evaluation on held-out rows."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from jaxrec.data import ClickBatch
from jaxrec.embed import Optimizer, value_and_grad
from jaxrec.metrics import BinarySums, auc, binary_sums, normalized_entropy
from jaxrec.nn import DLRM
from jaxrec.train.progress import Progress
from jaxrec.train.rows import Rows
from jaxrec.train.step import compile_step
from jaxrec.train.trainer import AHEAD, NotFiniteError

# Steps over which the running NE is taken.
WINDOW = 200


def train_step(model: DLRM, optimizer: Optimizer, batch: ClickBatch) -> BinarySums:
    """One step; returns the batch's sums, taken before the update."""

    def loss_fn(model: DLRM) -> tuple[Float[Array, ""], BinarySums]:
        logits = model(batch.dense, batch.features)
        losses = optax.sigmoid_binary_cross_entropy(logits, batch.labels)
        loss = (batch.weights * losses).sum() / batch.weights.sum()
        return loss, binary_sums(logits, batch.labels, batch.weights)

    (_, sums), gradients = value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, gradients)
    return sums


def train(
    model: DLRM,
    optimizer: Optimizer,
    rows: Rows,
    *,
    batch_size: int,
    epochs: int,
    progress: Progress,
    stop: Callable[[], Any] = lambda: False,
) -> None:
    """Trains on the rows from where the optimizer's step count says that training is.

    Args:
        model, optimizer: Changed in place.
        rows: What to train on.
        batch_size: Samples of a step.
        epochs: How often to go through the rows, steps made before included.
        progress: Told of every step.
        stop: Asked after each step; training ends early once it says so.

    Raises:
        NotFiniteError: The loss of a step is NaN or infinite.
        OSError, DataError: The rows cannot be read.
    """
    step = compile_step(train_step, model, optimizer)
    per_epoch = rows.num_batches(batch_size)
    done = int(optimizer.step.get_value())
    window: collections.deque[BinarySums] = collections.deque(maxlen=WINDOW)
    under_way: collections.deque[BinarySums] = collections.deque()

    def finish_oldest() -> None:
        nonlocal done
        sums = under_way.popleft().on_host()
        done += 1
        if not np.isfinite(sums.cross_entropy):
            raise NotFiniteError(
                f"the loss is {sums.cross_entropy} at step {done}; lower the learning rates "
                "(--optimizer.learning-rate, --optimizer.table-learning-rate)"
            )
        window.append(sums)
        progress.advance(int(sums.weights))
        if progress.is_due():
            progress.show(done, normalized_entropy(sum(window, BinarySums())))

    first_epoch, first_batch = divmod(done, per_epoch)
    for epoch in range(first_epoch, epochs):
        stream = rows.batches(batch_size, first_batch if epoch == first_epoch else 0)
        try:
            for batch in stream:
                under_way.append(step(batch))
                if len(under_way) > AHEAD:
                    finish_oldest()
                if stop():
                    break
        finally:
            stream.close()
        if stop():
            break
    while under_way:
        finish_oldest()


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


def evaluate(
    model: DLRM, rows: Rows, *, batch_size: int, stop: Callable[[], Any] = lambda: False
) -> Evaluation | None:
    """Predicts the rows; None if ``stop`` said so before the last.

    Raises:
        OSError, DataError: The rows cannot be read.
    """
    graph, state = nnx.split(model)

    @jax.jit
    def predict(state: nnx.State, batch: ClickBatch) -> tuple[Float[Array, " batch"], BinarySums]:
        logits = nnx.merge(graph, state)(batch.dense, batch.features)
        return logits, binary_sums(logits, batch.labels, batch.weights)

    logits, labels, sums = [], [], BinarySums()
    for batch in rows.batches(batch_size):
        batch_logits, batch_sums = predict(state, batch)
        real = np.asarray(batch.weights) > 0
        logits.append(np.asarray(batch_logits)[real])
        labels.append(np.asarray(batch.labels)[real])
        sums = sums + batch_sums.on_host()
        if stop():
            return None
    every_label = np.concatenate(labels)
    truth = _true_probabilities(rows)
    return Evaluation(
        auc(np.concatenate(logits), every_label),
        None if truth is None else auc(truth, every_label),
        sums,
    )


def _true_probabilities(rows: Rows) -> Float[np.ndarray, " rows"] | None:
    known = []
    for chunk in rows.log.chunks(rows.start, rows.stop):
        if chunk.probabilities is None:
            return None
        known.append(chunk.probabilities)
    return np.concatenate(known)
