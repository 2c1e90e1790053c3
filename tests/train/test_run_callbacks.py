from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxrec.metrics import auc
from jaxrec.train import NotFiniteError, Trainer, checkpoint
from jaxrec.train.checkpoint.tree import saved_tree
from jaxrec.train.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from jaxrec.train.datasets import LogDataset, run_batches, split_datasets
from jaxrec.train.model import make_model
from jaxrec.train.models import model_kind
from jaxrec.train.models.kind import HeldOutBatches
from jaxrec.train.models.labels import click_loss
from jaxrec.train.progress import Progress
from jaxrec.train.run_callbacks import HeldOutEvaluation, RunningMetrics
from tests.train.ranker import make

BATCH = 64
CONFIG = TrainConfig(
    data=DataConfig(batch_size=BATCH, generated_rows=300, generated_eval_rows=100, epochs=2),
    model=ModelConfig(embedding_dim=4, bottom_layer_sizes=(), top_layer_sizes=(8,)),
)
KIND = model_kind(CONFIG)


def run(model, optimizer, rows, *, steps=None, loss=click_loss, callbacks=()):
    trainer = Trainer(model=model, optimizer=optimizer, loss=loss, callbacks=callbacks)
    trainer.train(run_batches(rows, BATCH, 2, first=trainer.step), steps)


def numbers(model):
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(saved_tree(*model, None))]


def test_every_row_trains_and_one_program_serves_all():
    traced, seen = [], []

    def counted(model, batch):
        traced.append(batch.labels.shape)
        return click_loss(model, batch)

    class Watched(LogDataset):
        def batches(self, batch_size, first=0, epoch=0):
            for batch in super().batches(batch_size, first, epoch):
                seen.append(batch.weights.sum())
                yield batch

    rows, _ = split_datasets(CONFIG)
    model, optimizer = make_model(CONFIG, 10)
    run(model, optimizer, Watched(rows.log, rows.start, rows.stop), loss=counted)
    in_all, traced[:] = list(traced), []
    run(*make_model(CONFIG, 10), rows, steps=1, loss=counted)
    assert in_all == traced, "later steps compile nothing"
    assert set(traced) == {(BATCH,)}
    assert seen == [64, 64, 64, 64, 44] * 2
    assert int(optimizer.step.get_value()) == 10


@pytest.fixture(scope="module")
def never_stopped():
    rows, _ = split_datasets(CONFIG)
    trained = make_model(CONFIG, 10)
    run(*trained, rows)
    return trained


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [5, 7],
    ids=["between-epochs", "in-the-second"],
)
def test_stopped_and_resumed_is_as_never_stopped(tmp_path, never_stopped, steps):
    rows, _ = split_datasets(CONFIG)
    stopped = make_model(CONFIG, 10)
    run(*stopped, rows, steps=steps)
    assert int(stopped[1].step.get_value()) == steps
    checkpoint.save(tmp_path, *stopped)
    resumed = make_model(dataclasses.replace(CONFIG, seed=5), 10)
    checkpoint.restore(resumed[0], tmp_path, resumed[1])
    run(*resumed, rows)
    for got, wanted in zip(numbers(resumed), numbers(never_stopped), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_loss_that_is_no_number():
    config = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(learning_rate=1e30))
    rows, _ = split_datasets(config)
    with pytest.raises(NotFiniteError, match=r"the loss is .* at step .*lower the learning rates"):
        run(*make_model(config, 10), rows)


def test_evaluation_counts_each_row_once():
    _, held_out = split_datasets(CONFIG)
    model, _ = make_model(CONFIG, 10)
    values = HeldOutEvaluation(KIND, HeldOutBatches(model, held_out, BATCH))()
    (clicks,) = held_out.log.chunks(held_out.start, held_out.stop)
    batch = next(held_out.batches(len(clicks)))
    logits = np.asarray(model(batch.dense, batch.features), np.float64)
    assert values["auc"] == pytest.approx(auc(logits, clicks.labels), abs=1e-6)
    assert values["best_auc"] == auc(clicks.probabilities, clicks.labels)
    loss = (np.logaddexp(0, logits) - clicks.labels * logits).mean()
    rate = clicks.labels.mean(dtype=np.float64)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert values["log_loss"] == pytest.approx(loss, rel=1e-5)
    assert values["normalized_entropy"] == pytest.approx(loss / entropy, rel=1e-5)
    calibration = (1 / (1 + np.exp(-logits))).mean() / rate
    assert values["calibration"] == pytest.approx(calibration, rel=1e-5)


def test_evaluation_can_be_stopped():
    _, held_out = split_datasets(CONFIG)
    model, _ = make_model(CONFIG, 10)
    batches = HeldOutBatches(model, held_out, BATCH, stop=lambda: True)
    evaluation = HeldOutEvaluation(KIND, batches)
    assert evaluation() is None
    assert evaluation.values_at(3) is None


def test_evaluation_in_training():
    """Every third step, once for a step however often it is asked for."""
    rows, held_out = split_datasets(CONFIG)
    model, optimizer = make_model(CONFIG, 10)
    reported = []
    evaluation = HeldOutEvaluation(
        KIND,
        HeldOutBatches(model, held_out, BATCH),
        every=3,
        report=lambda step, values: reported.append((step, values)),
    )
    run(model, optimizer, rows, callbacks=[evaluation])
    assert [step for step, _ in reported] == [3, 6, 9]
    assert evaluation.values_at(9) == reported[-1][1]
    assert evaluation.values_at(10) == evaluation() == reported[-1][1]
    assert [step for step, _ in reported] == [3, 6, 9, 10]


def test_an_evaluation_that_was_stopped_is_made_by_the_resumed_run():
    """Of a window of time, before the run trains on it."""
    kind = SimpleNamespace(evaluate=lambda held_out: {"auc": held_out.dataset})
    trainer, reported = make(), []
    for step in (3, trainer.step):
        evaluation = HeldOutEvaluation(
            kind,
            SimpleNamespace(dataset=0.5),
            report=lambda step, values: reported.append((step, values)),
            others={step: 0.75},
        )
        evaluation.on_train_start(trainer)
    assert reported == [(trainer.step, {"auc": 0.75})]


def test_running_metrics():
    """The values of the last steps, each batch with the parameters from before its update."""
    rows, _ = split_datasets(CONFIG)
    model, optimizer = make_model(CONFIG, 10)
    recorded = []
    progress = Progress(Console(quiet=True), num_steps=10)
    record = lambda step, compute: recorded.append((step, compute()))  # noqa: E731
    run(
        model, optimizer, rows, steps=7, callbacks=[RunningMetrics(KIND, progress, record, every=3)]
    )
    assert [step for step, _ in recorded] == [3, 6, 7]
    assert {"auc", "log_loss", "normalized_entropy"} <= set(recorded[-1][1])

    model, optimizer = make_model(CONFIG, 10)
    logits, labels = [], []
    for batch in run_batches(rows, BATCH, 1):
        if len(logits) == 3:
            break
        logits.append(np.asarray(model(batch.dense, batch.features), np.float64))
        labels.append(batch.labels)
        Trainer(model=model, optimizer=optimizer, loss=click_loss).train([batch])
    x, y = np.concatenate(logits), np.concatenate(labels)
    values = recorded[0][1]
    assert values["auc"] == pytest.approx(auc(x, y), abs=1e-6)
    assert values["log_loss"] == pytest.approx((np.logaddexp(0, x) - y * x).mean(), rel=1e-5)
