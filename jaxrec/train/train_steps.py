"""The compiled steps of a `Trainer`: synchronous ones, and ones that look up a batch ahead."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrec.embed import Optimizer, mean_gradients, value_and_grad
from jaxrec.embed.batch_checks import bad_id_of_batch
from jaxrec.embed.optimizer import NotFiniteError
from jaxrec.embed.taps import Ahead
from jaxrec.mesh.ahead import lookup_ahead, use_ahead
from jaxrec.metrics import MetricGroup
from jaxrec.train.evaluation import Loss, Outputs, call_loss, sample_count
from jaxrec.train.routing import Pair, PairSteps, RoutedSteps, pairs_of
from jaxrec.train.step import CompiledCall


class DeviceResult(NamedTuple):
    """Result of a step, on the devices; ``skipped_in_a_row`` counts this step if it was skipped.

    ``outputs`` has the loss function's outputs for each batch, and is empty if they are not
    returned.
    """

    loss: Float[Array, ""]
    skipped_in_a_row: Int[Array, ""]
    outputs: tuple[Outputs, ...]


@dataclasses.dataclass(eq=False)
class _TrainSteps:
    """Base of synchronous and semi-synchronous steps.

    The fields are those of `Trainer`, and ``metric_state``, the state of ``metrics``, which each
    step updates.
    """

    model: nnx.Module
    optimizer: Optimizer
    loss: Loss
    metrics: MetricGroup | None
    metric_state: nnx.Variable
    returns_outputs: bool

    def call_loss(self, model: nnx.Module, batch: Any) -> tuple[Float[Array, ""], Outputs]:
        return call_loss(self.loss, model, batch, has_metrics=self.metrics is not None)

    def update_metrics(self, metric_state: nnx.Variable, outputs: Outputs) -> None:
        if self.metrics is not None:
            metric_state.set_value(self.metrics.update(metric_state.get_value(), outputs))

    def result(
        self,
        optimizer: Optimizer,
        metric_state: nnx.Variable,
        before: Any,
        loss: Float[Array, ""],
        outputs: list[Outputs],
    ) -> DeviceResult:
        """Return the step's result; if it was skipped, reset the metrics' state to ``before``."""
        skipped = optimizer.skipped_in_a_row.get_value()
        # Chosen on the devices: whether a step is skipped is known there alone until it has ended.
        state = jax.tree.map(
            lambda new, old: jnp.where(skipped > 0, old, new), metric_state.get_value(), before
        )
        metric_state.set_value(state)
        return DeviceResult(loss, skipped, tuple(outputs) if self.returns_outputs else ())


@dataclasses.dataclass(eq=False)
class SynchronousSteps(_TrainSteps):
    """Steps whose lookups read the tables after all earlier updates."""

    def __post_init__(self) -> None:
        self._steps = RoutedSteps(
            self._step, self._forward, self.model, self.optimizer, self.metric_state
        )

    def __call__(
        self, batches: Iterator[Any], accumulate: int
    ) -> Iterator[tuple[tuple[Any, ...], DeviceResult]]:
        """Dispatch a step for each ``accumulate`` batches; yield these and the step's result.

        The last step may have fewer batches.
        """

        def parts() -> Iterator[tuple[Any, ...]]:
            while part := tuple(itertools.islice(batches, accumulate)):
                yield part

        return self._steps(parts())

    def _forward(self, model: nnx.Module, batches: tuple[Any, ...]) -> None:
        for batch in batches:
            self.call_loss(model, batch)

    def _step(
        self,
        model: nnx.Module,
        optimizer: Optimizer,
        metric_state: nnx.Variable,
        batches: tuple[Any, ...],
    ) -> DeviceResult:
        # `mean_gradients` divides by the number of batches. Scaled by their shares of the samples,
        # the losses make it the mean over samples.
        counts = [sample_count(batch) for batch in batches] if len(batches) > 1 else [1]
        losses, gradients, outputs, before = [], [], [], metric_state.get_value()
        for batch, count in zip(batches, counts, strict=True):
            share = count * len(counts) / sum(counts)

            def loss_fn(
                model: nnx.Module, batch: Any, share: Any = share
            ) -> tuple[Float[Array, ""], Outputs]:
                loss, outputs = self.call_loss(model, batch)
                return loss * share, outputs

            (loss, batch_outputs), batch_gradients = value_and_grad(loss_fn, has_aux=True)(
                model, batch
            )
            self.update_metrics(metric_state, batch_outputs)
            losses.append(loss)
            outputs.append(batch_outputs)
            gradients.append(batch_gradients)
        optimizer.update(model, gradients[0] if len(batches) == 1 else mean_gradients(gradients))
        mean = sum(losses[1:], losses[0]) / len(losses)
        return self.result(optimizer, metric_state, before, mean, outputs)


@dataclasses.dataclass(eq=False)
class SemiSynchronousSteps(_TrainSteps):
    """Steps that look up the embeddings of the next batch before they update the tables.

    Over a mesh a step also routes the batch after the next one, so that no lookup waits for the
    exchange of its ids. Models whose calls change ids are not routed ahead
    (`jaxrec.mesh.ahead.changes_ids`).
    """

    def __post_init__(self) -> None:
        self._embeddings = nnx.Variable(None)
        self._first_lookup = CompiledCall(self._lookup)
        modules = (self.model, self.optimizer, self.metric_state, self._embeddings)
        self._steps = PairSteps(self._step, self._forward, *modules)

    def __call__(
        self, batches: Iterator[Any], accumulate: int = 1
    ) -> Iterator[tuple[tuple[Any, ...], DeviceResult]]:
        """Dispatch a step for each batch; yield the batch and the step's result."""
        first = next(batches, None)
        if first is None:
            return
        self._embeddings.set_value(self._first_lookup(self.model, first))

        for (batch, _), result in self._steps(pairs_of(itertools.chain((first,), batches))):
            yield (batch,), result

    def _forward(self, model: nnx.Module, pair: Pair) -> None:
        self.call_loss(model, pair[1])

    def _lookup(self, model: nnx.Module, batch: Any) -> dict[str, list[Ahead]]:
        return lookup_ahead(lambda model: self.call_loss(model, batch), model)

    def _step(
        self,
        model: nnx.Module,
        optimizer: Optimizer,
        metric_state: nnx.Variable,
        embeddings: nnx.Variable,
        pair: Pair,
    ) -> DeviceResult:
        (batch, following), before = pair, metric_state.get_value()
        with use_ahead(model, embeddings.get_value()):
            (loss, outputs), gradients = value_and_grad(self.call_loss, has_aux=True)(model, batch)
        self.update_metrics(metric_state, outputs)
        next_embeddings = self._lookup(model, following)
        # The update writes the donated tables in place, which must not happen before these lookups
        # have read them. XLA orders by data alone, so the gradients are made to depend on what was
        # read.
        looked_up = [call.activations for calls in next_embeddings.values() for call in calls]
        read = sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(looked_up))
        gradients = gradients.tied_to(jnp.asarray(read, jnp.float32))
        optimizer.update(model, gradients)
        embeddings.set_value(next_embeddings)
        return self.result(optimizer, metric_state, before, loss, [outputs])


def not_finite_error(
    model: nnx.Module, step: int, loss: float, batches: tuple[Any, ...], skipped: int
) -> NotFiniteError:
    """Return the error about a skipped step; it names an id outside its table, if there is one."""
    # A finite loss was skipped for its gradients; only a debugging optimizer knows which.
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
