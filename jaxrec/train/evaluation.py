"""Evaluation of a model on batches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxrec.mesh.ahead import GroupPath, capacity_factors, set_capacity_factors
from jaxrec.mesh.store import mesh_stores
from jaxrec.metrics import MetricGroup
from jaxrec.metrics.total import Total
from jaxrec.tier.tier import tier_of
from jaxrec.train.loss import Loss, Outputs, call_loss, sample_count
from jaxrec.train.routing import RoutedCalls
from jaxrec.train.step import MAX_PENDING_STEPS


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The compiled calls of a function, and the arguments that they were compiled for."""

    graph: Any
    loss: Loss
    kind: Any
    calls: RoutedCalls


class Evaluation:
    """Evaluates models in evaluation mode; compiles once for several calls.

    Over a mesh the program of a batch also routes the next one, and the measured demand of the
    batches chooses the capacities of the exchanges, as `jaxrec.train.RoutedSteps` does in training.
    Results are the same. A model with row stores is not routed ahead, since the rows of the next
    batch may take the place of those of a batch that is not evaluated yet.
    """

    def __init__(self) -> None:
        self._programs: list[Program] = []
        # Capacity factors that batches of evaluations needed; the model keeps those of training.
        self._factors: dict[GroupPath, float] = {}

    def __call__(
        self, model: nnx.Module, loss: Loss, group: MetricGroup | None, batches: Iterable[Any]
    ) -> dict[str, float]:
        """Compute the mean loss and metrics over batches.

        Args:
            model: The model; it does not change.
            loss: The loss function, as of `jaxrec.train.Trainer`.
            group: The metrics; None: only the loss.
            batches: Batches on the devices.

        Returns:
            ``loss``, the mean over all samples, and the metrics by name.

        Raises:
            TypeError: The loss takes or returns something else.
            ValueError: There are no batches.
        """

        def add_batch(
            model: nnx.Module, sums: tuple[Any, Total, Total], batch: Any
        ) -> tuple[tuple[Any, Total, Total], None]:
            state, total, samples = sums
            value, outputs = call_loss(loss, model, batch, has_metrics=group is not None)
            count = jnp.asarray(sample_count(batch), jnp.float32)
            state = None if group is None else group.update(state, outputs)
            # A batch of padding alone has no mean.
            term = jnp.where(count > 0, value.astype(jnp.float32) * count, 0)
            return (state, total + term, samples + count), None

        zero = Total.zeros(())
        sums = (None if group is None else group.init(), zero, zero)
        number = 0
        calls = self._calls(model, loss, group, add_batch, sums, batches)
        for number, (sums, _) in enumerate(calls, 1):
            if number % MAX_PENDING_STEPS == 0:
                sums[1].high.block_until_ready()
        if number == 0:
            raise ValueError("there are no batches to evaluate on")
        state, total, samples = sums
        values = {} if group is None or state is None else group.compute(state)
        return {"loss": float(total.on_host() / samples.on_host()), **values}

    def outputs(self, model: nnx.Module, loss: Loss, batches: Iterable[Any]) -> Iterator[Outputs]:
        """Yield the outputs of the loss function for each batch.

        Args:
            model: The model; it does not change.
            loss: The loss function, as of `jaxrec.train.Trainer`.
            batches: Batches on the devices.

        Raises:
            TypeError: The loss takes or returns something else.
        """

        def outputs_of(model: nnx.Module, carry: None, batch: Any) -> tuple[None, Outputs]:
            return None, call_loss(loss, model, batch, has_metrics=True)[1]

        for _, outputs in self._calls(model, loss, "outputs", outputs_of, None, batches):
            yield outputs

    def _calls(
        self,
        model: nnx.Module,
        loss: Loss,
        kind: Any,
        function: Callable[..., Any],
        carry: Any,
        batches: Iterable[Any],
    ) -> Iterator[tuple[Any, Any]]:
        """Call a function for each batch; yield its carry and its result."""
        tier = tier_of(model)
        is_ahead = bool(mesh_stores(model)) and (tier is None or not tier.has_stores)
        copy = _in_evaluation_mode(model, self._factors if is_ahead else None)
        graph, _ = nnx.split(copy)

        def forward(model: nnx.Module, batch: Any) -> None:
            call_loss(loss, model, batch, has_metrics=kind is not None)

        make = functools.partial(RoutedCalls, graph, function, forward)
        calls = self._compiled(graph, loss, kind, make)
        try:
            yield from calls(copy, carry, batches, is_ahead=is_ahead)
        finally:
            if is_ahead:
                self._factors = capacity_factors(copy)

    def _compiled(
        self, graph: Any, loss: Loss, kind: Any, make: Callable[[], RoutedCalls]
    ) -> RoutedCalls:
        """Return compiled calls, or those of an earlier evaluation with the same arguments."""
        for program in self._programs:
            if program.kind is kind and program.loss == loss and program.graph == graph:
                return program.calls
        self._programs.append(Program(graph, loss, kind, make()))
        return self._programs[-1].calls


def _in_evaluation_mode(model: nnx.Module, factors: Mapping[GroupPath, float] | None) -> nnx.Module:
    """Return a copy of the model in evaluation mode, which shares the model's arrays.

    Args:
        model: The model.
        factors: Capacity factors for a copy with variables of its own; None: the copy shares the
            model's variables.
    """
    copy = nnx.merge(*nnx.split(model), copy=factors is not None)
    copy.eval()
    if factors is not None:
        set_capacity_factors(copy, factors)
    return copy
