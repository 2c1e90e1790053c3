"""Callbacks that save checkpoints, synchronize replicas, write metrics and trace steps."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Mapping

import jax

from jaxrec.mesh.replicas import average_replicas, synchronize_replicas
from jaxrec.metrics.writers import BackgroundWriter, Writer
from jaxrec.train.checkpoint import CheckpointManager, all_steps
from jaxrec.train.open_vocabularies import scalars
from jaxrec.train.trainer import Callback, StepResult, Trainer

# Number of the first traced step of a run; earlier steps compile and warm up.
FIRST_STEP = 5
STEPS = 10


def _check_interval(callback: Callback, every: int) -> None:
    if every < 1:
        raise ValueError(f"{type(callback).__name__}: every={every} must be 1 or more")


@dataclasses.dataclass
class SaveCheckpoints(Callback):
    """Saves a checkpoint every ``every`` steps and at the end of training.

    Attributes:
        manager: The manager of the checkpoints.
        every: Number of steps between two checkpoints.
        metrics: Function that returns the values by which the manager ranks a checkpoint; None:
            the metrics of training.
        plan: The sharding plan as JSON, for the checkpoints' metadata.

    Raises:
        TypeError: ``manager`` is not a `CheckpointManager`.
        ValueError: ``every`` is below 1.
    """

    manager: CheckpointManager
    every: int = 1000
    metrics: Callable[[], Mapping[str, float]] | None = None
    plan: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.manager, CheckpointManager):
            raise TypeError(
                "manager must be jaxrec.train.CheckpointManager(directory), got a "
                f"{type(self.manager).__name__}"
            )
        _check_interval(self, self.every)

    def on_step_dispatched(self, trainer: Trainer, step: int) -> None:
        if step % self.every == 0:
            trainer.wait()
            self.save(trainer)

    def on_train_end(self, trainer: Trainer) -> None:
        self.manager.wait_until_finished()
        # Saving a step again would delete its checkpoint until the new one is complete.
        if trainer.step not in all_steps(self.manager.directory):
            self.save(trainer)
            self.manager.wait_until_finished()

    def save(self, trainer: Trainer) -> None:
        """Start saving a checkpoint."""
        metrics = None if self.metrics is None else self.metrics()
        trainer.save(self.manager, metrics=metrics, plan=self.plan)


@dataclasses.dataclass
class SynchronizeReplicas(Callback):
    """Calls `jaxrec.mesh.synchronize_replicas` every ``every`` steps.

    After the last step the replicas are averaged, so that tables can be read.

    Attributes:
        every: Number of steps between two synchronizations.

    Raises:
        ValueError: ``every`` is below 1; at the first synchronization, the model has no tables with
            replicas.
    """

    every: int = 16

    def __post_init__(self) -> None:
        _check_interval(self, self.every)

    def on_step_dispatched(self, trainer: Trainer, step: int) -> None:
        if step % self.every == 0:
            synchronize_replicas(trainer.model)

    def on_train_end(self, trainer: Trainer) -> None:
        # Local updates made the replicas differ since the last synchronization; a table has one
        # value only after they are averaged.
        average_replicas(trainer.model)


@dataclasses.dataclass
class WriteMetrics(Callback):
    """Writes the loss and the metrics of training every ``every`` steps.

    Open vocabularies add the values of `jaxrec.tier.statistics`, such as
    ``vocabulary/item/hit_rate`` of the table ``item``; row stores add their own, such as
    ``vocabulary/item/stall_ms``. `jaxrec.data.StreamBatches` add ``stream/lag`` and others.

    Attributes:
        writer: The writer, such as `jaxrec.metrics.JSONLinesWriter`. A
            `jaxrec.metrics.BackgroundWriter` computes the metrics in its thread, while training
            goes on; after the last step, training waits for it.
        every: Number of steps between two writes.

    Raises:
        ValueError: ``every`` is below 1.
    """

    writer: Writer
    every: int = 100

    def __post_init__(self) -> None:
        _check_interval(self, self.every)
        self._loss = float("nan")

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self._loss = result.loss

    def on_step_dispatched(self, trainer: Trainer, step: int) -> None:
        if step % self.every == 0:
            trainer.wait()
            of_step, of_model = {"loss": self._loss}, scalars(trainer.model)
            of_model |= trainer.reader_scalars()
            if isinstance(self.writer, BackgroundWriter):
                # The state is copied in this thread, before the next step donates its arrays.
                compute = trainer.metrics_so_far()
                self.writer.write(step, lambda: {**of_step, **compute(), **of_model})
            else:
                self.writer.write(step, {**of_step, **trainer.compute_metrics(), **of_model})

    def on_train_end(self, trainer: Trainer) -> None:
        if isinstance(self.writer, BackgroundWriter):
            self.writer.wait()


@dataclasses.dataclass(eq=False)
class StepTrace(Callback):
    """Traces `STEPS` steps of a run for TensorBoard's profiler or Perfetto.

    The trace is written to ``directory``; None: no trace. ``paused()`` returns a context for the
    traced steps, such as `Progress.paused`.
    """

    directory: pathlib.Path | None
    paused: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __post_init__(self) -> None:
        self._pause = contextlib.ExitStack()
        self._steps = 0
        self._is_on = False

    def on_step_dispatched(self, trainer: Trainer, step: int) -> None:
        self.step()

    def step(self) -> None:
        """Count a dispatched step; start the trace, or stop it, if it is due."""
        if self.directory is None:
            return
        self._steps += 1
        if self._steps == FIRST_STEP:
            # Traced steps are slower than others, and would lower the samples per second.
            self._pause.enter_context(self.paused())
            jax.profiler.start_trace(self.directory)
            self._is_on = True
        elif self._steps == FIRST_STEP + STEPS:
            self._stop()

    def _stop(self) -> None:
        if self._is_on:
            jax.profiler.stop_trace()
            self._is_on = False
            self._pause.close()

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()
