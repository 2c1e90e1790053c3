"""Early stopping: training ends when a metric no longer improves, and the best step is kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from jaxrec.mesh.agree import on_process_zero
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train.checkpoint import CheckpointManager
from jaxrec.train.checkpoint.files import all_steps, read_run
from jaxrec.train.trainer import Callback, Trainer


@dataclasses.dataclass(eq=False)
class EarlyStopping(Callback):
    """Ends training after ``patience`` evaluations without a better value of a metric.

    Training is evaluated every ``every`` steps and at its end. At each value that is the best so
    far, the model, its optimizer and the state of its metrics are kept: as a copy on the devices,
    or as a checkpoint of ``manager``. At the end of training they are set to those of the best
    step, so that `Trainer.step` is the best step.

    Attributes:
        metric: Name of a value of `Trainer.evaluate`, such as "loss" or "click/auc".
        patience: Number of evaluations in a row without a better value after which training ends.
        restore_best: Whether to go back to the best step at the end.
        batches: Function that returns the host batches to evaluate on, such as
            ``lambda: held_out.from_batch(0)``.
        every: Number of steps between two evaluations.
        mode: Whether the smallest ("min") or the largest ("max") value is the best.
        min_delta: Smallest difference from the best value that counts as better.
        manager: Saves the best steps as checkpoints, by a policy that keeps the best one by
            ``metric``. At the end the best of its checkpoints is restored, also if another callback
            saved it between two evaluations, and the checkpoints of later steps are deleted, so
            that the best is the newest. A run that goes on from a checkpoint knows the best step so
            far. None: the best step is a copy on the devices, which take twice the memory of the
            model.
        best: The best value so far; None: no value yet.
        best_step: Its step.
        stopped_step: Step after which patience was over; None: training ended otherwise.

    Raises:
        ValueError: ``patience`` or ``every`` is below 1, ``mode`` is another text, or the manager's
            policy does not keep the best checkpoint by ``metric``. When training begins: there are
            no ``batches``; the model has an open vocabulary or a cache, and there is no
            ``manager``; or the evaluation has no value ``metric``.

    Example:
        >>> import jaxrec, numpy as np, optax
        >>> from flax import nnx
        >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        >>> batches = [np.ones((4, 1), np.float32)] * 100
        >>> stopping = EarlyStopping("loss", patience=2, batches=lambda: batches[:1], every=5)
        >>> trainer = jaxrec.train.Trainer(
        ...     model=model,
        ...     optimizer=jaxrec.Optimizer(model, optax.sgd(1.5)),  # too large a rate
        ...     loss=lambda model, x: (((model(x) - 1) ** 2).mean(), {}),
        ...     callbacks=[stopping],
        ... )
        >>> _ = trainer.train(batches)
        >>> trainer.step, stopping.best_step, stopping.stopped_step
        (5, 5, 15)
    """

    metric: str
    patience: int
    restore_best: bool = True
    _: dataclasses.KW_ONLY
    batches: Callable[[], Iterable[Any]] | None = None
    every: int = 1000
    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0
    manager: CheckpointManager | None = None
    best: float | None = dataclasses.field(default=None, init=False)
    best_step: int | None = dataclasses.field(default=None, init=False)
    stopped_step: int | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        for name in ("patience", "every"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"EarlyStopping: {name}={value} must be 1 or more")
        if self.mode not in ("min", "max"):
            raise ValueError(f'EarlyStopping: mode is "min" or "max", got {self.mode!r}')
        if self.manager is not None:
            policy = self.manager.preservation_policy
            if not policy.best or (policy.metric, policy.mode) != (self.metric, self.mode):
                raise ValueError(
                    f"EarlyStopping: the manager must keep the best checkpoint by {self.metric!r}; "
                    f"give it PreservationPolicy(best=1, metric={self.metric!r}, "
                    f"mode={self.mode!r})"
                )
        self._restore: Callable[[], None] | None = None
        self._start = 0
        self._evaluated: int | None = None

    def values(self, trainer: Trainer, step: int) -> Mapping[str, float] | None:
        """Return the values of an evaluation at a step; None: it was stopped, and does not count.

        A subclass may evaluate in its own way.
        """
        if self.batches is None:
            raise ValueError(
                "EarlyStopping evaluates on batches; give it a function that returns them, "
                "batches=lambda: held_out.from_batch(0)"
            )
        return trainer.evaluate(self.batches())

    def save(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Save a checkpoint of the best step so far; called only with a ``manager``."""
        assert self.manager is not None
        trainer.save(self.manager, metrics=values)

    def on_train_start(self, trainer: Trainer) -> None:
        self._start, self._evaluated = trainer.step, None
        self.best = self.best_step = self.stopped_step = self._restore = None
        if self.manager is None:
            if self.restore_best and tier_of(trainer.model) is not None:
                raise ValueError(
                    "EarlyStopping keeps no copy of open vocabularies and caches in memory; give "
                    "it manager=CheckpointManager(directory, PreservationPolicy(best=1, ...))"
                )
            return
        # A run that goes on has the best step of its earlier part among its checkpoints.
        for step, value in on_process_zero(self._saved_values):
            if step <= self._start and self._is_better(value):
                self.best, self.best_step = value, step

    def on_step_dispatched(self, trainer: Trainer, step: int) -> None:
        if step % self.every == 0:
            trainer.wait()
            # Skipped steps do not count: checkpoints have the number of updates as their name.
            if self._evaluated != trainer.step:
                self._evaluate(trainer, trainer.step)

    def on_train_end(self, trainer: Trainer) -> None:
        step = trainer.step
        if self._evaluated != step and step > self._start:
            self._evaluate(trainer, step)
        if not self.restore_best or self.best_step is None:
            return
        if self.manager is not None:
            self.best_step, self.best = self._best_checkpoint(self.manager, step)
        if self.best_step != step:
            self._go_back(trainer, self.best_step)
        # The best of several calls of `train` is that of the last one: each begins anew.
        self._restore = None

    def _evaluate(self, trainer: Trainer, step: int) -> None:
        """Compare the value of a step with the best one; end training if patience is over."""
        values = self.values(trainer, step)
        if values is None:
            return
        if self.metric not in values:
            raise ValueError(
                f"EarlyStopping: {self.metric!r} is not a value of the evaluation; its values are "
                f"{', '.join(values)}"
            )
        self._evaluated = step
        # The value of process 0 decides for all: they must stop at the same step, also if the last
        # bit of their values differs.
        if self._is_better(value := on_process_zero(lambda: float(values[self.metric]))):
            self.best, self.best_step = value, step
            if self.manager is not None:
                self.save(trainer, values)
            elif self.restore_best:
                self._restore = trainer.snapshot()
        # Steps and not evaluations are counted: a run that was killed goes on from its checkpoints,
        # which know the best step.
        elif step - (self.best_step or self._start) >= self.patience * self.every:
            self.stopped_step = step
            trainer.should_stop = True

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        sign = 1 if self.mode == "max" else -1
        return self.best is None or sign * (value - self.best) > self.min_delta

    def _saved_values(self) -> list[tuple[int, float]]:
        """Return the steps of the saved checkpoints that have a value, and their values."""
        assert self.manager is not None
        directory = self.manager.directory
        metrics = {step: read_run(directory / str(step)).metrics for step in all_steps(directory)}
        return [
            (step, value)
            for step, x in metrics.items()
            if (value := x.get(self.metric)) is not None
        ]

    def _best_checkpoint(self, manager: CheckpointManager, last: int) -> tuple[int, float]:
        """Return the step and the value of the best checkpoint up to the step ``last``."""
        # A callback may have saved a better step between two evaluations, or one that is as good;
        # the manager may then have deleted the checkpoint of the best evaluation.
        manager.wait_until_finished()

        def best() -> tuple[int, float]:
            values = {
                step: read_run(manager.directory / str(step)).metrics
                for step in all_steps(manager.directory)
                if step <= last
            }
            step = manager.preservation_policy.ranked(values)[0]
            return step, values[step][self.metric]

        # Process 0 reads, as it alone knows which checkpoints it has deleted.
        step, value = on_process_zero(best)
        return step, value

    def _go_back(self, trainer: Trainer, step: int) -> None:
        if self.manager is not None:
            trainer.restore(self.manager, step)
            self.manager.remove_after(step)
        elif self._restore is not None:
            self._restore()
