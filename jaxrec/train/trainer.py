"""The training loop, and the callbacks that add to it."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrec.data import empty_batch, pad_batch
from jaxrec.embed import Optimizer
from jaxrec.embed.optimizer import NotFiniteError as NotFiniteError
from jaxrec.mesh.processes import losses_first
from jaxrec.mesh.store import mesh_stores
from jaxrec.metrics import MetricGroup
from jaxrec.ragged import Packer
from jaxrec.train.checkpoint import (
    CheckpointManager,
    CheckpointMetadata,
    Difference,
    StateError,
    load,
    load_state,
    open_checkpoint,
)
from jaxrec.train.evaluation import Evaluation, Loss, Outputs
from jaxrec.train.placed_batches import placed_batches, put_batch
from jaxrec.train.reader_state import ReaderState
from jaxrec.train.step import MAX_PENDING_STEPS
from jaxrec.train.train_steps import (
    DeviceResult,
    SemiSynchronousSteps,
    SynchronousSteps,
    not_finite_error,
)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Result of a training step.

    Attributes:
        step: Number of the step, from 1.
        loss: Mean loss of its batches.
        outputs: The outputs of the loss function, one mapping for each batch of the step; empty
            unless a callback has ``needs_outputs``.
    """

    step: int
    loss: float
    outputs: tuple[Outputs, ...]


class Callback:
    """Actions at fixed moments of a training run.

    Subclass it, override the hooks you need, and pass instances as ``Trainer(callbacks=[...])``.
    At each moment the trainer calls the hook of all callbacks, in the order of the list, in the
    thread that called `Trainer.train`; with several processes, in each of them.

    JAX returns from a step before the devices have computed it, so that a step has two moments::

        on_train_start
        for each step:
            on_step_dispatched      the model holds the arrays of the updated parameters
            ...                     up to two more steps are dispatched meanwhile
            on_step_end             the loss is known
        on_train_end

    A hook may set ``trainer.should_stop = True``: training then ends after the current step. If a
    hook raises an exception, `Trainer.train` raises it without calling further hooks.

    Attributes:
        needs_outputs: Whether `on_step_end` reads ``result.outputs``. If no callback does, the
            compiled step does not return them.

    Example:
        >>> class StopAtLoss(Callback):
        ...     def on_step_end(self, trainer, result):
        ...         trainer.should_stop |= result.loss < 0.1
    """

    needs_outputs: ClassVar[bool] = False

    def on_train_start(self, trainer: Trainer) -> None:
        """Act before the first batch is read."""

    def on_step_dispatched(self, trainer: Trainer, step: int) -> None:
        """Act after a step is dispatched; for work that is done every ``n`` steps.

        Call ``trainer.wait()`` first if the action must not follow a step that fails, such as
        saving the model.

        Args:
            trainer: The trainer.
            step: Number of the step, from 1.
        """

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Act on the result of a step; called in the order of steps, not for skipped steps."""

    def on_train_end(self, trainer: Trainer) -> None:
        """Act after the last step has ended without an error."""


# Python checks no annotations, and a wrong argument would fail deep inside a trace.
# For each argument its type, and how the error describes it.
_KINDS: dict[str, tuple[Any, str]] = {
    "model": (nnx.Module, "a Flax module (flax.nnx.Module)"),
    "optimizer": (Optimizer, "jaxrec.Optimizer(model, optax.adam(1e-3))"),
    "loss": (Callable, "a function loss(model, batch)"),
    "metrics": (MetricGroup | None, "jaxrec.metrics.MetricGroup(tasks, metrics)"),
    "batch_size": (int | None, "a number of samples"),
    "callbacks": (list | tuple, "a list of callbacks"),
    "packer": (Packer, "a jaxrec.Packer"),
}


@dataclasses.dataclass(kw_only=True)
class Trainer:
    """A training loop that reads batches and puts them on the devices while they compute.

    Attributes:
        model: The model; on a mesh after `jaxrec.shard`.
        optimizer: The model's optimizer.
        loss: ``loss(model, batch)`` returns the loss to minimise and a mapping of output arrays by
            name, from which ``metrics`` are computed. With ``batch_size``, or batches of type
            `jaxrec.data.WeightedBatch`, it is called as ``loss(model, batch, weights)``; the mean
            over samples is then ``(weights * losses).sum() / weights.sum()``, and the outputs hold
            the weights if a `jaxrec.metrics.Task` names them.
        metrics: Metrics of the training batches; None: only the loss.
        batch_size: Number of samples of each batch of this process. Smaller batches, such as the
            last of an epoch, are padded with samples of weight 0 (`jaxrec.data.pad_batch`), so that
            each sample counts once on any number of devices. None: batches are not padded.
        place: Function that puts a batch on the devices; with a mesh
            ``lambda batch: jaxrec.mesh.shard_batch(batch, mesh)``.
        stages: Functions that process a batch before ``place``, each in its own thread.
        accumulate: Number of batches of one update, which takes the mean of their gradients,
            weighted by their numbers of samples. The last update of a call of `train` may have
            fewer batches.
        semi_synchronous: Whether a step looks up the embeddings of the next batch before it updates
            the tables. Lookups then do not wait for the update, and their embeddings are one update
            old; dense layers have all updates. (TorchRec's ``TrainPipelineSemiSync``.) Over a mesh,
            set the class attribute ``changes_ids = True`` on a module of your own that computes ids
            from variables which its calls change.
        max_skipped: Number of steps in a row that may be skipped because their loss or a gradient
            is not finite. A skipped step changes neither the model nor the metrics. One more in a
            row ends training; with 0 the first does.
        uneven: Behavior if some processes have fewer batches than others. "stop": all stop after
            the last batch that every process has. "empty": a process without data goes on with
            empty batches until all have ended, so that each sample counts once. Batches then need
            weights: their own, or the ones that ``batch_size`` adds. See
            `jaxrec.mesh.even_batches`.
        callbacks: Actions between the steps, such as `SaveCheckpoints` and `WriteMetrics`.
        packer: Chooses the capacities of batches that no `jaxrec.Packer` made
            (`jaxrec.Packer.fit`), so that few steps compile. Also on a mesh: ``place`` gets the
            fitted batch.
        should_stop: Set by a callback to end training after the current step.

    Raises:
        TypeError: An argument has another type, such as an optax optimizer.
        ValueError: A number is below 1, ``semi_synchronous`` comes with ``accumulate``, or
            ``uneven`` is another text.

    Example:
        >>> import numpy as np, optax, jaxrec
        >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        >>> trainer = Trainer(
        ...     model=model,
        ...     optimizer=jaxrec.Optimizer(model, optax.sgd(0.1)),
        ...     loss=lambda model, x: (((model(x) - 1) ** 2).mean(), {}),
        ... )
        >>> trainer.train([np.ones((4, 1), np.float32)] * 30)
        30
        >>> bool(abs(model(np.ones((1, 1), np.float32))[0, 0] - 1) < 1e-2)
        True
    """

    model: nnx.Module
    optimizer: Optimizer
    loss: Loss
    metrics: MetricGroup | None = None
    batch_size: int | None = None
    place: Callable[[Any], Any] = put_batch
    stages: tuple[Callable[[Any], Any], ...] = ()
    accumulate: int = 1
    semi_synchronous: bool = False
    max_skipped: int = 0
    uneven: Literal["stop", "empty"] = "stop"
    callbacks: Sequence[Callback] = ()
    packer: Packer = dataclasses.field(default_factory=Packer)
    should_stop: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        for name, (kind, wanted) in _KINDS.items():
            if not isinstance(given := getattr(self, name), kind):
                raise TypeError(f"{name} must be {wanted}, got a {type(given).__name__}")
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"callbacks must be jaxrec.train.Callback, got a {type(callback).__name__}"
                )
        for name in ("accumulate", "batch_size"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"{name} is {number}; it must be 1 or more")
        if self.max_skipped < 0:
            raise ValueError(f"max_skipped is {self.max_skipped}; it must be 0 or more")
        if self.semi_synchronous and self.accumulate > 1:
            raise ValueError(
                "semi-synchronous steps take one batch each; accumulate batches in synchronous ones"
            )
        if self.uneven not in ("stop", "empty"):
            raise ValueError(f'uneven is "stop" or "empty", got {self.uneven!r}')
        self._metric_state: nnx.Variable[Any] = nnx.Variable(
            None if self.metrics is None else self.metrics.init()
        )
        self._batches_used = 0
        self._is_restored = False
        self._reader = ReaderState()
        self._evaluation = Evaluation()
        self._steps: SynchronousSteps | SemiSynchronousSteps | None = None
        self._settings: tuple[Any, ...] = ()
        self._pending: collections.deque[tuple[int, DeviceResult, tuple[Any, ...]]] = (
            collections.deque()
        )

    @property
    def step(self) -> int:
        """Number of steps that have updated the model; waits for the devices."""
        return int(self.optimizer.step.get_value())

    def restore(
        self,
        checkpoints: CheckpointManager | str | os.PathLike[str],
        step: int | None = None,
        *,
        partial: bool = False,
    ) -> CheckpointMetadata:
        """Load the model, the optimizer and the state of the metrics from a checkpoint.

        Args:
            checkpoints: Directory of the checkpoints, or their manager, which first completes the
                checkpoint that it is writing.
            step: The checkpoint's step; None: the newest.
            partial: Whether the model, its optimizer and the metrics may differ from the saved
                ones. Parts that fit are loaded, other parts stay as they are, and ``differences``
                of the result lists them (`jaxrec.train.restore`).

        Returns:
            The checkpoint's metadata; training continues with batch number ``metadata.batches``.
            `jaxrec.data.StreamBatches` go on there by themselves.

        Raises:
            CheckpointError: There is no such checkpoint, it is damaged, or it is of another model.
            OSError: The manager cannot write its checkpoint.
        """
        if isinstance(checkpoints, CheckpointManager):
            checkpoints.wait_until_finished()
            checkpoints = checkpoints.directory
        path = open_checkpoint(checkpoints, step)
        # The state of the metrics first: it only reads, and a refusal must leave the model as it
        # was.
        state, differences = self._metric_state.get_value(), []
        try:
            state = load_state(path, state)
        except StateError as error:
            if not partial:
                raise
            differences = [Difference("state", "metrics", error.reason)]
        metadata = load(path, self.model, self.optimizer, partial=partial)
        self._metric_state.set_value(state)
        batches = metadata.batches
        self._batches_used = metadata.step * self.accumulate if batches is None else batches
        self._is_restored = True
        self._reader.saved = metadata.reader
        return dataclasses.replace(metadata, differences=(*metadata.differences, *differences))

    def save(
        self,
        manager: CheckpointManager,
        *,
        metrics: Mapping[str, float] | None = None,
        plan: str | None = None,
    ) -> None:
        """Start saving a checkpoint, with the state of the metrics.

        Args:
            manager: The manager of the checkpoints.
            metrics: Values by which the manager ranks checkpoints; None: `compute_metrics`.
            plan: The sharding plan as JSON.

        Raises:
            OSError: The checkpoint cannot be written.
        """
        manager.save(
            self.model,
            self.optimizer,
            state=self._metric_state.get_value(),
            batches=self._batches_used,
            metrics=self.compute_metrics() if metrics is None else metrics,
            plan=plan,
            reader=self._reader.states(),
        )

    def snapshot(self) -> Callable[[], None]:
        """Return a function that sets the run back to its state at this moment.

        It keeps a copy of the model, the optimizer and the state of the metrics on their devices.
        Open vocabularies and caches (`jaxrec.tier`) need a checkpoint instead. Call the function
        once.
        """
        parts, batches_used = (self.model, self.optimizer, self._metric_state), self._batches_used
        # The next step donates the arrays, so that the copy must be its own.
        copy, reader = jax.tree.map(jnp.copy, nnx.state(parts)), self._reader.snapshot()

        def set_back() -> None:
            nnx.update(parts, copy)
            self._batches_used = batches_used
            reader()

        return set_back

    @losses_first()
    def train(self, batches: Iterable[Any], steps: int | None = None) -> int:
        """Train on batches in order.

        Args:
            batches: Host batches. Give them one shape where possible, since each shape compiles a
                step. With ``accumulate`` the last step takes the batches that are left.
                `jaxrec.data.StreamBatches` go on after the batches of the model.
            steps: Largest number of steps; None: until the batches end.

        Returns:
            Number of steps that updated the model, without skipped steps; 0 if `restore` loaded the
            end of the run.

        Raises:
            NotFiniteError: The loss or a gradient of more than ``max_skipped`` steps in a row is
                not finite; the error names an id outside its table if there is one. Up to two later
                steps are dispatched by then; a finite one among them is applied and counted.
            TypeError: The loss has other arguments or results, or a batch has no numbers.
            ValueError: There are no batches, or a batch has more samples than ``batch_size``.
            Exception: Any exception of the batches, the stages or a callback.
        """
        if steps is not None and steps < 0:
            raise ValueError(f"steps is {steps}; it must be 0 or more")
        number = first = self.step
        self.should_stop = False
        self._pending.clear()
        self._reader.begin(batches)
        for callback in self.callbacks:
            callback.on_train_start(self)
        with self._placed(batches, is_training=True) as placed, self._reader:
            for step_batches, result in self._results(placed, steps):
                number += 1
                self._batches_used += len(step_batches)
                self._reader.advance(len(step_batches))
                self._pending.append((number, result, step_batches))
                self._finish_steps(MAX_PENDING_STEPS)
                for callback in self.callbacks:
                    callback.on_step_dispatched(self, number)
                if self.should_stop:
                    break
        self.wait()
        # A restored run may have used all of its batches; without a checkpoint an empty epoch is
        # most likely a generator that an earlier epoch has used up.
        goes_on = self._is_restored or self._reader.goes_on
        if number == first and steps != 0 and not goes_on:
            raise ValueError(
                "there are no batches to train on; an iterator gives its batches once, so make a "
                "new one for each epoch"
            )
        self._is_restored = False
        for callback in self.callbacks:
            callback.on_train_end(self)
        return self.step - first

    def wait(self) -> None:
        """Wait for the results of all dispatched steps, and call `Callback.on_step_end` for each.

        Raises:
            NotFiniteError: As `train`.
        """
        self._finish_steps(0)

    def _finish_steps(self, num_pending: int) -> None:
        """Wait for results until at most ``num_pending`` steps are under way."""
        while len(self._pending) > num_pending:
            step, result, batches = self._pending.popleft()
            # `float` waits for the devices, hence only for the oldest step: later ones keep them
            # busy.
            loss, skipped = float(result.loss), int(result.skipped_in_a_row)
            if skipped > self.max_skipped:
                raise not_finite_error(self.model, step, loss, batches, skipped)
            if not skipped:
                for callback in self.callbacks:
                    callback.on_step_end(self, StepResult(step, loss, result.outputs))

    def reader_scalars(self) -> dict[str, float]:
        """Return figures of the batches, such as ``stream/lag`` of `jaxrec.data.StreamBatches`."""
        return self._reader.scalars()

    def compute_metrics(self) -> dict[str, float]:
        """Return the metrics of the steps so far; waits for the devices."""
        if self.metrics is None:
            return {}
        return self.metrics.compute(self._metric_state.get_value())

    def metrics_so_far(self) -> Callable[[], dict[str, float]]:
        """Return a function that computes the metrics of the steps so far.

        The function has a copy of the metrics' state, so that any thread may call it during later
        steps, as `jaxrec.metrics.BackgroundWriter` does. It makes no calls between processes.
        """
        if self.metrics is None:
            return dict
        # The next step donates the arrays of the state, so that a thread needs its own.
        state = jax.tree.map(jnp.copy, self._metric_state.get_value())
        return functools.partial(self.metrics.compute, state)

    def evaluate(
        self, batches: Iterable[Any], metrics: MetricGroup | None = None
    ) -> dict[str, float]:
        """Measure the metrics and the mean loss over the samples of other batches.

        It evaluates a copy of the model in evaluation mode (``nnx.Module.eval``: no dropout,
        running statistics in batch normalization); the model itself does not change. A batch's loss
        is weighted by the sum of its sample weights, or by its number of samples. A second call
        compiles nothing.

        Args:
            batches: Host batches.
            metrics: The metrics; None: the trainer's.

        Returns:
            ``loss`` and the metrics by name.

        Raises:
            TypeError: As for `train`.
            ValueError: There are no batches, or a batch has more samples than ``batch_size``.
        """
        group = self.metrics if metrics is None else metrics
        with self._placed(batches, is_training=False) as placed:
            return self._evaluation(self.model, self.loss, group, placed)

    def _placed(
        self, batches: Iterable[Any], *, is_training: bool
    ) -> AbstractContextManager[Iterator[Any]]:
        """Return a context with the batches processed, padded and placed ahead of their steps."""
        stages = self.stages
        if self.batch_size is not None:
            stages = (*stages, functools.partial(pad_batch, batch_size=self.batch_size))
        accumulate = self.accumulate
        if self.semi_synchronous and mesh_stores(self.model):
            accumulate = 2  # a step is dispatched after the two batches after its own were taken
        return placed_batches(
            self.model,
            batches,
            *stages,
            place=lambda batch: self.place(self.packer.fit(batch)),
            is_training=is_training,
            accumulate=accumulate,
            empty=empty_batch if self.uneven == "empty" else None,
        )

    def _results(
        self, batches: Iterator[Any], steps: int | None
    ) -> Iterator[tuple[tuple[Any, ...], DeviceResult]]:
        """Dispatch steps; yield the batches of each step and its result on the devices."""
        kind = SemiSynchronousSteps if self.semi_synchronous else SynchronousSteps
        returns_outputs = any(callback.needs_outputs for callback in self.callbacks)
        settings = (
            kind,
            self.model,
            self.optimizer,
            self.loss,
            self.metrics,
            self._metric_state,
            returns_outputs,
        )
        # The compiled steps serve until a setting changes.
        if self._steps is None or not all(map(operator.is_, self._settings, settings)):
            self._steps, self._settings = kind(*settings[1:]), settings
        return itertools.islice(self._steps(batches, self.accumulate), steps)
