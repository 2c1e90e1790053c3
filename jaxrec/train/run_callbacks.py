"""Callbacks of `jaxrec train`: running metrics, evaluations, checkpoints and early stopping."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from jaxrec.mesh.agree import of_all_processes, on_host
from jaxrec.train.callbacks import SaveCheckpoints
from jaxrec.train.datasets import Dataset
from jaxrec.train.early_stopping import EarlyStopping
from jaxrec.train.interrupt import Interrupt
from jaxrec.train.models.kind import (
    LOSS,
    EvaluationStopped,
    HeldOutBatches,
    Measure,
    ModelKind,
)
from jaxrec.train.open_vocabularies import describe, scalars
from jaxrec.train.progress import Progress
from jaxrec.train.run_record import RunRecord
from jaxrec.train.trainer import Callback, StepResult, Trainer

# Numbers of steps over which running values and those of samples are taken.
WINDOW = 200
SAMPLE_WINDOW = 20


@dataclasses.dataclass(eq=False)
class RunningMetrics(Callback):
    """Shows and records the metrics of the last steps.

    ``record(step, compute)`` is called every ``every`` steps and after the last one. ``compute()``
    returns the values by name; another thread may call it.
    """

    kind: ModelKind
    progress: Progress
    record: Callable[[int, Callable[[], dict[str, float]]], None]
    every: int = 100

    needs_outputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # Sums are a few numbers a step, samples a whole batch: hence the two windows.
        self._sums: collections.deque[np.ndarray] = collections.deque(maxlen=WINDOW)
        self._samples: collections.deque[dict[str, np.ndarray]] = collections.deque(
            maxlen=SAMPLE_WINDOW
        )

    def on_train_start(self, trainer: Trainer) -> None:
        self._model, self._reader = trainer.model, trainer.reader_scalars
        self._step = self._recorded_step = trainer.step

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        (outputs,) = result.outputs
        values = {name: on_host(value) for name, value in outputs.items()}
        self._step = result.step
        self._sums.append(values.pop("sums").astype(np.float64))
        self.progress.advance(int(self._sums[-1][0]))
        self._samples.append(values)
        if self.progress.is_due():
            running = self.kind.running_values(np.sum(self._sums, axis=0))
            shown = shown_values((*self.kind.measures, LOSS), running, 1)
            ids, lag = describe(self._model), self._reader().get("stream/lag")
            behind = "" if lag is None else f"lag {lag:,.0f}"
            self.progress.show(result.step, shown, ", ".join(filter(None, (ids, behind))))
        if result.step % self.every == 0:
            self._record_values()

    def on_train_end(self, trainer: Trainer) -> None:
        if self._step > self._recorded_step:
            self._record_values()

    def _record_values(self) -> None:
        self._recorded_step = self._step
        sums = np.sum(self._sums, axis=0)
        # Processes gather samples in the order of their steps, hence in this thread.
        samples = {
            name: _joined(of_all_processes(np.concatenate([each[name] for each in self._samples])))
            for name in self._samples[0]
        }
        others = scalars(self._model) | self._reader()
        if rate := self.progress.samples_per_second:
            others = {"samples_per_second": rate, **others}
        self.record(self._step, lambda: self.kind.running_values(sums, samples) | others)


def _joined(values: np.ndarray) -> np.ndarray:
    """Return ``[processes * samples, ...]`` values from ``[processes, samples, ...]``."""
    return values.reshape(-1, *values.shape[2:])


def shown_values(measures: Sequence[Measure], values: dict[str, float], count: int) -> str:
    """Return the first ``count`` measures that have a value as text: "AUC 0.8123, NE 0.8001"."""
    shown = [f"{x.title} {values[x.name]:.4f}" for x in measures if x.name in values]
    return ", ".join(shown[:count])


@dataclasses.dataclass(eq=False)
class HeldOutEvaluation(Callback):
    """Evaluates a model on held-out rows, every ``every`` steps (None: never) and on demand.

    After the steps of ``others`` it evaluates on other rows. ``report(step, values)`` gets the
    result of an evaluation. ``paused()`` returns a context for an evaluation, such as
    `Progress.paused`.
    """

    kind: ModelKind
    held_out: HeldOutBatches
    every: int | None = None
    report: Callable[[int, dict[str, float]], None] | None = None
    paused: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    others: Mapping[int, Dataset] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._values: dict[int, dict[str, float]] = {}
        self._rows = self.held_out.dataset

    def on_train_start(self, trainer: Trainer) -> None:
        # The run may have been stopped during the evaluation of the step from which it goes on.
        if trainer.step in self.others:
            self.values_at(trainer.step)

    def on_step_dispatched(self, trainer: Trainer, step: int) -> None:
        if step in self.others or (self.every is not None and step % self.every == 0):
            trainer.wait()
            self.values_at(step)

    def values_at(self, step: int) -> dict[str, float] | None:
        """Return the values of `__call__` at a step, computed once; None if it was stopped."""
        if step not in self._values:
            self.held_out.dataset = self.others.get(step, self._rows)
            with self.paused():
                values = self()
            if values is None:
                return None
            self._values[step] = values
            if self.report is not None:
                self.report(step, values)
        return self._values[step]

    def known_values(self, step: int) -> dict[str, float] | None:
        """Return the values at a step if they are computed already."""
        return self._values.get(step)

    def __call__(self) -> dict[str, float] | None:
        """Evaluate the current model; return None if ``stop`` of the held-out batches ended it."""
        try:
            return self.kind.evaluate(self.held_out)
        except EvaluationStopped:
            return None


@dataclasses.dataclass
class RunCheckpoints(SaveCheckpoints):
    """Saves checkpoints outside of the time that the progress bar measures."""

    progress: Progress = dataclasses.field(kw_only=True)
    record: RunRecord = dataclasses.field(kw_only=True)
    _saved: int | None = dataclasses.field(default=None, init=False)

    def save(self, trainer: Trainer) -> None:
        # The best step so far is saved already if its checkpoint is due as well.
        if self._saved == (step := trainer.step):
            return
        self._saved = step
        with self.progress.paused():
            # The history must be complete up to the checkpoint: a run that is killed continues from
            # the checkpoint, and does not compute earlier lines again.
            self.record.wait()
            super().save(trainer)


@dataclasses.dataclass(eq=False)
class RunStopping(EarlyStopping):
    """Stops a run by its evaluations on the held-out rows; the best step is a checkpoint."""

    evaluation: HeldOutEvaluation = dataclasses.field(kw_only=True)
    saving: RunCheckpoints = dataclasses.field(kw_only=True)
    interrupt: Interrupt = dataclasses.field(kw_only=True)
    last_step: int = dataclasses.field(default=0, init=False)

    def values(self, trainer: Trainer, step: int) -> Mapping[str, float] | None:
        return self.evaluation.values_at(step)

    def save(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        self.saving.save(trainer)

    def on_train_end(self, trainer: Trainer) -> None:
        self.last_step = trainer.step
        # A run that was interrupted goes on from its last step, and not from its best.
        if not self.interrupt:
            super().on_train_end(trainer)

    def describe(self, num_steps: int) -> str:
        """Return a sentence on the end of training and on the step that is kept."""
        kept = f"; the model is that of step {self.last_step:,}, as no {self.metric} is a number"
        if self.best_step is not None:
            kept = f"; the model is that of step {self.best_step:,}, the best by {self.metric}"
        if self.stopped_step is None:
            return f"all {num_steps:,} steps are made{kept}"
        return (
            f"stopped after step {self.stopped_step:,} of {num_steps:,}: {self.patience} "
            f"evaluations without a better {self.metric}{kept}"
        )
