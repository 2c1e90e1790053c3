"""A training loop for those who want one: steps, metrics, checkpoints, evaluation."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxrec.embed import Optimizer, mean_gradients, value_and_grad
from jaxrec.embed.gradients import after
from jaxrec.embed.taps import Ahead, look_up_ahead, use_ahead
from jaxrec.metrics import MetricGroup
from jaxrec.metrics.writers import Writer
from jaxrec.train.ahead import RoutedSteps
from jaxrec.train.checkpoint import Run, Saver, restore, restore_state
from jaxrec.train.checkpoint import steps as steps_of
from jaxrec.train.held import Held
from jaxrec.train.pipeline import Pipeline
from jaxrec.train.place import put
from jaxrec.train.step import compile_step

# Steps that may be under way at once.
AHEAD = 2

Loss = Callable[[Any, Any], tuple[Float[Array, ""], Mapping[str, Array]]]


class NotFiniteError(ArithmeticError):
    """The loss is NaN or infinite."""


@dataclasses.dataclass(kw_only=True)
class Trainer:
    """Trains a model on batches that are read and put on the devices while it computes.

    Attributes:
        model: The model; on a mesh after `jaxrec.shard`.
        optimizer: Its optimizer.
        loss: Function of model and batch that returns the loss to minimise, and by name the arrays
            that ``metrics`` are made of.
        metrics: What to measure in each step; None: nothing but the loss.
        place: Puts a batch on the devices; with a mesh
            ``lambda batch: jaxrec.mesh.shard_batch(batch, mesh)``.
        stages: What else happens to a batch before that, each in a thread of its own.
        accumulate: Batches of a step: their gradients' mean makes one update.
        semi_synchronous: Whether a step looks up the embeddings of the next before it updates the
            tables: they then lack one update, and lookups need not wait for it. (TorchRec's
            ``TrainPipelineSemiSync``.) Dense layers lack none.
        saver: Where checkpoints go; None: nowhere.
        save_every: Steps from checkpoint to checkpoint.
        writer: Where the metrics go; None: nowhere.
        write_every: Steps from writing to writing.
        stop: Asked after each step; training ends early, and saves, once it says so.
        on_step: Told the number and the loss of each step, two steps late.

    Raises:
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
    place: Callable[[Any], Any] = put
    stages: tuple[Callable[[Any], Any], ...] = ()
    accumulate: int = 1
    semi_synchronous: bool = False
    saver: Saver | None = None
    save_every: int = 1000
    writer: Writer | None = None
    write_every: int = 100
    stop: Callable[[], Any] = lambda: False
    on_step: Callable[[int, float], None] = lambda step, loss: None

    def __post_init__(self) -> None:
        for name in ("accumulate", "save_every", "write_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is 1 or more, got {getattr(self, name)}")
        if self.semi_synchronous and self.accumulate > 1:
            raise ValueError(
                "semi-synchronous steps take one batch each; accumulate batches in synchronous ones"
            )
        self._measured = Held(None if self.metrics is None else self.metrics.init())
        self._batches_used = 0

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
        directory = self.saver.directory
        run = restore(directory, self.model, self.optimizer, step=step)
        self._measured.set(restore_state(directory, self._measured.get(), step=run.step))
        self._batches_used = run.batches or 0
        return run

    def train(self, batches: Iterable[Any], steps: int | None = None) -> int:
        """Trains on the batches, in order.

        Args:
            batches: Host batches, all of one shape where possible, as each shape compiles a step.
                Those of a step that is not full at the end are left out.
            steps: How many to make at most; None: until the batches end.

        Returns:
            Steps made.

        Raises:
            NotFiniteError: The loss of a step is no number; what was saved before stays.
            Exception: What the batches, the stages or the writer raise.
        """
        number = first = int(self.optimizer.step.get_value())
        under_way: collections.deque[tuple[int, Array]] = collections.deque()

        def finish(left: int) -> None:
            while len(under_way) > left:
                step, loss = under_way.popleft()
                value = float(loss)
                if not np.isfinite(value):
                    raise NotFiniteError(
                        f"the loss is {value} at step {step}; lower the learning rates, or look at "
                        "the data of that step"
                    )
                self.on_step(step, value)

        with Pipeline(batches, *self.stages, self.place) as placed:
            for loss in self._losses(placed, steps):
                number += 1
                self._batches_used += self.accumulate
                under_way.append((number, loss))
                finish(AHEAD)
                if self.writer is not None and number % self.write_every == 0:
                    finish(0)
                    self.writer.write(number, {"loss": float(loss), **self.measured()})
                if self.stop():
                    break
                if self.saver is not None and number % self.save_every == 0:
                    finish(0)
                    self.save()
        finish(0)
        if self.saver is not None:
            self.saver.wait()
            # A checkpoint that is there is not written again: while it is, there would be none.
            if number > first and number not in steps_of(self.saver.directory):
                self.save()
                self.saver.wait()
        return number - first

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
        """The metrics of the model on other batches, and their mean loss.

        Args:
            batches: Host batches.
            metrics: What to measure; None: what training measures.

        Raises:
            ValueError: There are no batches.
        """
        group = self.metrics if metrics is None else metrics
        graph, model = nnx.split(self.model)

        @jax.jit
        def measure(model: nnx.State, state: Any, total: Array, batch: Any) -> tuple[Any, Array]:
            loss, outputs = self.loss(nnx.merge(graph, model), batch)
            return (None if group is None else group.update(state, outputs)), total + loss

        state, total, count = None if group is None else group.init(), jnp.zeros(()), 0
        with Pipeline(batches, *self.stages, self.place) as placed:
            for batch in placed:
                state, total = measure(model, state, total, batch)
                count += 1
                if count % AHEAD == 0:
                    total.block_until_ready()  # no more batches on the devices than that
        if count == 0:
            raise ValueError("there are no batches to evaluate on")
        values = {} if group is None or state is None else group.compute(state)
        return {"loss": float(total) / count, **values}

    def _losses(self, batches: Iterator[Any], steps: int | None) -> Iterator[Array]:
        """Makes steps; the loss of each, not waited for."""
        losses = self._behind(batches) if self.semi_synchronous else self._in_order(batches)
        return itertools.islice(losses, steps)

    def _in_order(self, batches: Iterator[Any]) -> Iterator[Array]:
        def taken() -> Iterator[tuple[Any, ...]]:
            while len(part := tuple(itertools.islice(batches, self.accumulate))) == self.accumulate:
                yield part

        def forward(model: nnx.Module, part: tuple[Any, ...]) -> None:
            for batch in part:
                self.loss(model, batch)

        steps = RoutedSteps(self._step, forward, self.model, self.optimizer, self._measured)
        return (loss for _, loss in steps(taken()))

    def _step(
        self, model: nnx.Module, optimizer: Optimizer, measured: Held, batches: tuple[Any, ...]
    ) -> Float[Array, ""]:
        losses, parts = [], []
        for batch in batches:
            (loss, outputs), gradients = value_and_grad(self.loss, has_aux=True)(model, batch)
            self._measure(measured, outputs)
            losses.append(loss)
            parts.append(gradients)
        optimizer.update(model, parts[0] if len(parts) == 1 else mean_gradients(parts))
        return sum(losses) / len(losses)

    def _measure(self, measured: Held, outputs: Mapping[str, Array]) -> None:
        if self.metrics is not None:
            measured.set(self.metrics.update(measured.get(), outputs))

    def _behind(self, batches: Iterator[Any]) -> Iterator[Array]:
        batch = next(batches, None)
        if batch is None:
            return
        graph, state = nnx.split(self.model)
        first = jax.jit(lambda state, batch: self._look_up(nnx.merge(graph, state), batch))
        found = Held(first(state, batch))
        step = compile_step(self._step_behind, self.model, self.optimizer, self._measured, found)
        for following in itertools.chain(batches, (None,)):
            # After the last there is nothing to look up; it looks itself up again.
            yield step(batch, batch if following is None else following)
            batch = following

    def _look_up(self, model: nnx.Module, batch: Any) -> dict[str, list[Ahead]]:
        return look_up_ahead(lambda model: self.loss(model, batch), model)

    def _step_behind(
        self,
        model: nnx.Module,
        optimizer: Optimizer,
        measured: Held,
        found: Held,
        batch: Any,
        following: Any,
    ) -> Float[Array, ""]:
        with use_ahead(model, found.get()):
            (loss, outputs), gradients = value_and_grad(self.loss, has_aux=True)(model, batch)
        self._measure(measured, outputs)
        next_found = self._look_up(model, following)
        # The tables may be written when the lookups have read them, and not before.
        looked_up = [call.activations for calls in next_found.values() for call in calls]
        read = sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(looked_up))
        gradients = dataclasses.replace(gradients, tables=after(read, gradients.tables))
        optimizer.update(model, gradients)
        found.set(next_found)
        return loss
