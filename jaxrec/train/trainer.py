"""A training loop for those who want one: steps, metrics, checkpoints, evaluation."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrec.data.padding import pad_batch
from jaxrec.embed import Optimizer, mean_gradients, value_and_grad
from jaxrec.embed.not_finite import NotFiniteError as NotFiniteError
from jaxrec.embed.not_finite import bad_id_of_batch
from jaxrec.embed.taps import Ahead, look_up_ahead, use_ahead
from jaxrec.metrics import MetricGroup
from jaxrec.metrics.writers import Writer
from jaxrec.train.ahead import RoutedSteps
from jaxrec.train.checkpoint import Run, Saver, load, load_state, open_checkpoint
from jaxrec.train.checkpoint import steps as steps_of
from jaxrec.train.evaluation import Evaluation
from jaxrec.train.held import Held
from jaxrec.train.loss import Loss, Outputs, call_loss, sample_count
from jaxrec.train.pipeline import AHEAD, Pipeline
from jaxrec.train.place import put
from jaxrec.train.step import CompiledStep, compile_step

# The type of an argument, and how to make one.
_KINDS: dict[str, tuple[Any, str]] = {
    "model": (nnx.Module, "a Flax module (flax.nnx.Module)"),
    "optimizer": (Optimizer, "jaxrec.Optimizer(model, optax.adam(1e-3))"),
    "loss": (Callable, "a function loss(model, batch)"),
    "metrics": (MetricGroup | None, "jaxrec.metrics.MetricGroup(tasks, metrics)"),
    "batch_size": (int | None, "a number of samples"),
    "saver": (Saver | None, "jaxrec.train.Saver(directory)"),
}


@dataclasses.dataclass(kw_only=True)
class Trainer:
    """Trains a model on batches that are read and put on the devices while it computes.

    Attributes:
        model: The model; on a mesh after `jaxrec.shard`.
        optimizer: Its optimizer.
        loss: ``loss(model, batch)`` returns the loss to minimise, and by name the arrays that
            ``metrics`` are made of. With ``batch_size``, or batches that are a
            `jaxrec.data.WeightedBatch`, it is ``loss(model, batch, weights)``: a mean over samples
            is ``(weights * losses).sum() / weights.sum()``, and the weights are among the outputs
            where a `jaxrec.metrics.Task` names them.
        metrics: What to measure in each step; None: nothing but the loss.
        batch_size: Samples of each batch, of this process. Smaller batches, such as the last of an
            epoch, are padded to it with samples of weight 0 (`jaxrec.data.pad_batch`), so that all
            samples count, once, on any number of devices. None: batches stay as they are.
        place: Puts a batch on the devices; with a mesh
            ``lambda batch: jaxrec.mesh.shard_batch(batch, mesh)``.
        stages: What else happens to a batch before that, each in a thread of its own.
        accumulate: Batches of a step: their gradients' mean, each batch with the weight of its
            samples, makes one update.
        semi_synchronous: Whether a step looks up the embeddings of the next before it updates the
            tables: they then lack one update, and lookups need not wait for it. (TorchRec's
            ``TrainPipelineSemiSync``.) Dense layers lack none.
        saver: Where checkpoints go; None: nowhere.
        save_every: Steps from checkpoint to checkpoint.
        writer: Where the metrics go; None: nowhere.
        write_every: Steps from writing to writing.
        stop: Asked after each step; training ends early, and saves, once it says so.
        max_skipped: Steps in a row that may be skipped because their loss or a gradient is not
            finite. Such steps change nothing, in the metrics neither; one more in a row ends
            training. 0: the first one does.
        on_step: Told the number and the loss of each step that is not skipped, two steps late.

    Raises:
        TypeError: An argument is of another type, such as an optax optimizer.
        ValueError: A number is below 1, or semi-synchronous steps are to accumulate.

    Example:
        >>> import optax, jaxrec
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
    place: Callable[[Any], Any] = put
    stages: tuple[Callable[[Any], Any], ...] = ()
    accumulate: int = 1
    semi_synchronous: bool = False
    saver: Saver | None = None
    save_every: int = 1000
    writer: Writer | None = None
    write_every: int = 100
    stop: Callable[[], Any] = lambda: False
    max_skipped: int = 0
    on_step: Callable[[int, float], None] = lambda step, loss: None

    def __post_init__(self) -> None:
        for name, (kind, wanted) in _KINDS.items():
            if not isinstance(given := getattr(self, name), kind):
                raise TypeError(f"{name} must be {wanted}, got a {type(given).__name__}")
        for name in ("accumulate", "save_every", "write_every", "batch_size"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"{name} is {number}; it must be 1 or more")
        if self.max_skipped < 0:
            raise ValueError(f"max_skipped is {self.max_skipped}; it must be 0 or more")
        if self.semi_synchronous and self.accumulate > 1:
            raise ValueError(
                "semi-synchronous steps take one batch each; accumulate batches in synchronous ones"
            )
        self._measured = Held(None if self.metrics is None else self.metrics.init())
        self._batches_used = 0
        self._goes_on = False
        self._evaluation = Evaluation()
        self._steps: _Steps | None = None

    def restore(self, step: int | None = None) -> Run:
        """Goes back to a checkpoint of the saver's directory, metrics included; None: the newest.

        One that is still being written is waited for. The data goes on at batch ``Run.batches``.

        Raises:
            CheckpointError: There is no such checkpoint, or it is of another model.
            OSError: The one that was being written could not be.
            ValueError: There is no saver.
        """
        if self.saver is None:
            raise ValueError("a trainer without a saver has nothing to restore from")
        self.saver.wait()
        path = open_checkpoint(self.saver.directory, step)
        measured = load_state(path, self._measured.get())
        run = load(path, self.model, self.optimizer)
        self._measured.set(measured)
        self._batches_used = run.batches or 0
        self._goes_on = True
        return run

    def train(self, batches: Iterable[Any], steps: int | None = None) -> int:
        """Trains on the batches, in order.

        Args:
            batches: Host batches, all of one shape where possible, as each shape compiles a step.
                Those of a step that is not full at the end are left out.
            steps: How many to make at most; None: until the batches end.

        Returns:
            Steps made, without those that were skipped; 0 where `restore` found the run at its end.

        Raises:
            NotFiniteError: The loss or a gradient of more than ``max_skipped`` steps in a row is
                not finite; the error names an id outside its table if there is one. What was saved
                before stays.
            TypeError: The loss takes or returns something else, or a batch has no numbers.
            ValueError: There are no batches, or too few for a step, or a batch has more samples
                than ``batch_size``.
            Exception: What the batches, the stages or the writer raise.
        """
        if steps is not None and steps < 0:
            raise ValueError(f"steps is {steps}; it must be 0 or more")
        number = first = int(self.optimizer.step.get_value())
        under_way: collections.deque[tuple[int, StepResult, tuple[Any, ...]]] = collections.deque()

        def finish(left: int) -> None:
            while len(under_way) > left:
                step, result, step_batches = under_way.popleft()
                loss, skipped = float(result.loss), int(result.skipped_in_a_row)
                if skipped > self.max_skipped:
                    raise not_finite(self.model, step, loss, step_batches, skipped)
                if not skipped:
                    self.on_step(step, loss)

        with Pipeline(batches, *self.stages, self._put) as placed:
            for step_batches, result in self._results(placed, steps):
                number += 1
                self._batches_used += self.accumulate
                under_way.append((number, result, step_batches))
                finish(AHEAD)
                if self.writer is not None and number % self.write_every == 0:
                    finish(0)
                    self.writer.write(number, {"loss": float(result.loss), **self.measured()})
                if self.stop():
                    break
                if self.saver is not None and number % self.save_every == 0:
                    finish(0)
                    self.save()
        finish(0)
        if number == first and steps != 0 and not self._goes_on:
            raise ValueError(
                "there are no batches to train on; an iterator gives its batches once, so make a "
                "new one for each epoch"
            )
        self._goes_on = False
        made = int(self.optimizer.step.get_value()) - first
        if self.saver is not None:
            self.saver.wait()
            # A checkpoint that is there is not written again: while it is, there would be none.
            if made and first + made not in steps_of(self.saver.directory):
                self.save()
                self.saver.wait()
        return made

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Saves now, while training goes on; ``metrics`` to choose the best checkpoints by.

        Raises:
            OSError: It cannot be written.
            ValueError: There is no saver.
        """
        if self.saver is None:
            raise ValueError("a trainer without a saver cannot save")
        self.saver.save(
            self.model,
            self.optimizer,
            state=self._measured.get(),
            batches=self._batches_used,
            metrics=self.measured() if metrics is None else metrics,
        )

    def measured(self) -> dict[str, float]:
        """The metrics of the steps so far; waits for them."""
        return {} if self.metrics is None else self.metrics.compute(self._measured.get())

    def evaluate(
        self, batches: Iterable[Any], metrics: MetricGroup | None = None
    ) -> dict[str, float]:
        """Measure the model on other batches: the metrics, and the mean loss over the samples.

        A copy of the model in evaluation mode does it (``nnx.Module.eval``: no dropout, running
        statistics in batch normalization), so that the model itself stays as it is. The loss of
        each batch counts by the sum of its weights, or by its samples where it has none. Programs
        are kept for the next call.

        Args:
            batches: Host batches.
            metrics: What to measure; None: what training measures.

        Raises:
            TypeError: As for `train`.
            ValueError: There are no batches, or a batch has more samples than ``batch_size``.
        """
        group = self.metrics if metrics is None else metrics
        with Pipeline(batches, *self.stages, self._put) as placed:
            return self._evaluation(self.model, self.loss, group, placed)

    def _put(self, batch: Any) -> Any:
        """A host batch, padded, on the devices."""
        return self.place(batch if self.batch_size is None else pad_batch(batch, self.batch_size))

    def _loss(self, model: nnx.Module, batch: Any) -> tuple[Float[Array, ""], Outputs]:
        return call_loss(self.loss, model, batch, has_metrics=self.metrics is not None)

    def _results(
        self, batches: Iterator[Any], steps: int | None
    ) -> Iterator[tuple[tuple[Any, ...], StepResult]]:
        """Make steps; yield the batches and the result of each, not waited for."""
        results = self._behind(batches) if self.semi_synchronous else self._in_order(batches)
        return itertools.islice(results, steps)

    def _in_order(self, batches: Iterator[Any]) -> Iterator[tuple[tuple[Any, ...], StepResult]]:
        def parts() -> Iterator[tuple[Any, ...]]:
            is_first = True
            while len(part := tuple(itertools.islice(batches, self.accumulate))) == self.accumulate:
                yield part
                is_first = False
            if is_first and part:
                raise ValueError(
                    f"a step takes accumulate={self.accumulate} batches, but there are only "
                    f"{len(part)}"
                )

        def forward(model: nnx.Module, part: tuple[Any, ...]) -> None:
            for batch in part:
                self._loss(model, batch)

        steps = self._compiled(
            lambda: RoutedSteps(self._step, forward, self.model, self.optimizer, self._measured)
        )
        return steps(parts())

    def _compiled(self, make: Callable[[], Any]) -> Any:
        """Steps made earlier, and others once a setting that they were made for has changed."""
        settings = [
            getattr(self, name)
            for name in ("model", "optimizer", "loss", "metrics", "semi_synchronous")
        ]
        if self._steps is None or not all(map(operator.is_, self._steps.settings, settings)):
            self._steps = _Steps(settings, make())
        return self._steps.steps

    def _step(
        self, model: nnx.Module, optimizer: Optimizer, measured: Held, batches: tuple[Any, ...]
    ) -> StepResult:
        # The mean of the gradients divides by the number of batches, not by their samples.
        counts = [sample_count(batch) for batch in batches] if len(batches) > 1 else [1]
        losses, parts, before = [], [], measured.get()
        for batch, count in zip(batches, counts, strict=True):
            share = count * len(counts) / sum(counts)

            def loss_fn(
                model: nnx.Module, batch: Any, share: Any = share
            ) -> tuple[Float[Array, ""], Outputs]:
                loss, outputs = self._loss(model, batch)
                return loss * share, outputs

            (loss, outputs), gradients = value_and_grad(loss_fn, has_aux=True)(model, batch)
            self._measure(measured, outputs)
            losses.append(loss)
            parts.append(gradients)
        optimizer.update(model, parts[0] if len(parts) == 1 else mean_gradients(parts))
        return _finish_step(optimizer, measured, before, sum(losses) / len(losses))

    def _measure(self, measured: Held, outputs: Mapping[str, Array]) -> None:
        if self.metrics is not None:
            measured.set(self.metrics.update(measured.get(), outputs))

    def _behind(self, batches: Iterator[Any]) -> Iterator[tuple[tuple[Any, ...], StepResult]]:
        batch = next(batches, None)
        if batch is None:
            return
        first, ahead, step = self._compiled(self._make_steps_behind)
        ahead.set(first(*nnx.split(self.model), batch))
        for following in itertools.chain(batches, (None,)):
            # After the last there is nothing to look up; it looks itself up again.
            yield (batch,), step(batch, batch if following is None else following)
            batch = following

    def _make_steps_behind(self) -> tuple[Any, Held, CompiledStep]:
        """The lookup of the first batch, the embeddings looked up ahead, and the step."""
        ahead = Held(None)
        first = jax.jit(
            lambda graph, state, batch: self._look_up(nnx.merge(graph, state), batch),
            static_argnums=0,
        )
        modules = (self.model, self.optimizer, self._measured, ahead)
        return first, ahead, compile_step(self._step_behind, *modules)

    def _look_up(self, model: nnx.Module, batch: Any) -> dict[str, list[Ahead]]:
        return look_up_ahead(lambda model: self._loss(model, batch), model)

    def _step_behind(
        self,
        model: nnx.Module,
        optimizer: Optimizer,
        measured: Held,
        found: Held,
        batch: Any,
        following: Any,
    ) -> StepResult:
        before = measured.get()
        with use_ahead(model, found.get()):
            (loss, outputs), gradients = value_and_grad(self._loss, has_aux=True)(model, batch)
        self._measure(measured, outputs)
        next_found = self._look_up(model, following)
        # The tables may be written when the lookups have read them, and not before.
        looked_up = [call.activations for calls in next_found.values() for call in calls]
        read = sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(looked_up))
        gradients = gradients.tied_to(jnp.asarray(read, jnp.float32))
        optimizer.update(model, gradients)
        found.set(next_found)
        return _finish_step(optimizer, measured, before, loss)


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Compiled steps, and the settings that they were made for."""

    settings: list[Any]
    steps: Any


class StepResult(NamedTuple):
    """The result of a step.

    Attributes:
        loss: The mean loss of its batches.
        skipped_in_a_row: Steps skipped since the last update, this one included.
    """

    loss: Float[Array, ""]
    skipped_in_a_row: Int[Array, ""]


def _finish_step(
    optimizer: Optimizer, measured: Held, before: Any, loss: Float[Array, ""]
) -> StepResult:
    """Set the metrics back where the step was skipped, and return its result."""
    skipped = optimizer.skipped_in_a_row.get_value()
    keep = lambda new, old: jnp.where(skipped > 0, old, new)  # noqa: E731
    measured.set(jax.tree.map(keep, measured.get(), before))
    return StepResult(loss, skipped)


def not_finite(
    model: nnx.Module, step: int, loss: float, batches: tuple[Any, ...], skipped: int = 1
) -> NotFiniteError:
    """Return the error of a step that was skipped.

    Args:
        model: The model.
        step: The number of the step.
        loss: Its loss.
        batches: Its batches, which are looked through for ids outside their tables.
        skipped: Steps skipped in a row, this one included.
    """
    subject = "a gradient is not finite" if np.isfinite(loss) else f"the loss is {loss}"
    where = f"{subject} at step {step}"
    if skipped > 1:
        where += f", the last of {skipped} in a row that are skipped"
    for number, batch in enumerate(batches):
        if (bad_id := bad_id_of_batch(model, batch)) is not None:
            which = f", batch {number} of the step" if len(batches) > 1 else ""
            return NotFiniteError(
                f"{where}{which}: {bad_id}; give bounds=collection.bounds to the batch's "
                "constructor to check ids, or to clamp them, when batches are made"
            )
    return NotFiniteError(
        f"{where}; lower the learning rates, look at the data of that step, or find out by "
        "jaxrec.Optimizer(..., debug=True) which gradient it is"
    )
