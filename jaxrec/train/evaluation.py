"""Calls of a loss function, and the evaluation of a model on batches."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrec.data.padding import WeightedBatch, num_samples
from jaxrec.mesh.ahead import GroupPath, capacity_factors, set_capacity_factors
from jaxrec.mesh.store import mesh_stores
from jaxrec.metrics import MetricGroup
from jaxrec.metrics.sums import Total
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train.routed_calls import RoutedCalls
from jaxrec.train.step import MAX_PENDING_STEPS

Outputs = Mapping[str, Array]
Loss = Callable[..., tuple[Float[Array, ""], Outputs]]


def call_loss(
    loss: Loss, model: nnx.Module, batch: Any, *, has_metrics: bool
) -> tuple[Float[Array, ""], Outputs]:
    """Call ``loss(model, batch)``, or ``loss(model, batch, weights)`` for a `WeightedBatch`.

    A TypeError says what is wrong with its arguments or its result.
    """
    is_weighted = isinstance(batch, WeightedBatch)
    arguments = (model, *batch) if is_weighted else (model, batch)
    try:
        # Checked before the call: a TypeError out of the loss itself would look the same.
        inspect.signature(loss).bind(*arguments)
    except TypeError:
        wanted = "loss(model, batch, weights)" if is_weighted else "loss(model, batch)"
        raise TypeError(
            f"batches have {'' if is_weighted else 'no '}weights (see batch_size of Trainer), so "
            f"that the loss is called as {wanted}, but it takes {inspect.signature(loss)}"
        ) from None
    returned = loss(*arguments)
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise TypeError(
            "the loss must return a pair, the loss and the outputs for metrics by name, such as "
            f"(loss, {{}}), got {_shown(returned)}"
        )
    value, outputs = returned
    if jnp.shape(value) != ():
        raise TypeError(f"the loss must be one number, the mean over samples, got {_shown(value)}")
    if has_metrics and not isinstance(outputs, Mapping):
        raise TypeError(
            "the loss must return the outputs for metrics by name, such as (loss, {'p': p, 'y': y})"
            f", got {_shown(outputs)}"
        )
    return jnp.asarray(value), outputs


def sample_count(batch: Any) -> Float[Array, ""] | int:
    """Return the weight of a batch's mean loss: its sum of sample weights, or number of samples."""
    return batch.weights.sum() if isinstance(batch, WeightedBatch) else num_samples(batch)


def _shown(value: Any) -> str:
    if isinstance(value, jax.Array):
        return f"an array {jax.typeof(value)}"
    return f"a {type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else repr(value)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Compiled calls, and what they were compiled for: the model's graph, the loss and the kind.

    ``kind`` is the metric group (None: no metrics), or "outputs" if the calls return outputs.
    """

    graph: Any
    loss: Loss
    kind: Any
    calls: RoutedCalls


class Evaluation:
    """Evaluates models in evaluation mode; compiles once for several calls.

    Over a mesh a batch's program also routes the next batch, as `jaxrec.train.RoutedSteps` does in
    training; results are the same. A model with row stores is not routed ahead.
    """

    def __init__(self) -> None:
        self._programs: list[Program] = []
        # Capacity factors that batches of evaluations needed; the model keeps its own, of training.
        self._factors: dict[GroupPath, float] = {}

    def __call__(
        self, model: nnx.Module, loss: Loss, group: MetricGroup | None, batches: Iterable[Any]
    ) -> dict[str, float]:
        """Return ``loss``, the mean over all samples, and the metrics of the group by name."""

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

        # Sums of float32 lose the small terms after some million samples; a `Total` keeps their
        # remainders.
        zero = Total.zeros(())
        sums = (None if group is None else group.init(), zero, zero)
        number = 0
        calls = self._calls(model, loss, group, add_batch, sums, batches)
        for number, (sums, _) in enumerate(calls, 1):
            # Dispatch runs ahead of the devices; this bounds the number of batches in memory.
            if number % MAX_PENDING_STEPS == 0:
                sums[1].high.block_until_ready()
        if number == 0:
            raise ValueError("there are no batches to evaluate on")
        state, total, samples = sums
        values = {} if group is None or state is None else group.compute(state)
        return {"loss": float(total.on_host() / samples.on_host()), **values}

    def outputs(self, model: nnx.Module, loss: Loss, batches: Iterable[Any]) -> Iterator[Outputs]:
        """Yield the loss function's outputs for each batch, on the devices."""

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
        """Call a function for each batch; yield each call's carry and result."""
        tier = tier_of(model)
        # With row stores, the rows of the next batch may take the slots of a batch that is not
        # evaluated yet.
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
        """Return the calls of an earlier evaluation with the same arguments, or ``make()``."""
        for program in self._programs:
            if program.kind is kind and program.loss == loss and program.graph == graph:
                return program.calls
        self._programs.append(Program(graph, loss, kind, make()))
        return self._programs[-1].calls


def _in_evaluation_mode(model: nnx.Module, factors: Mapping[GroupPath, float] | None) -> nnx.Module:
    """Return a copy of the model in evaluation mode that shares its arrays."""
    # With capacity factors the copy has variables of its own, so that the factors of training stay.
    copy = nnx.merge(*nnx.split(model), copy=factors is not None)
    copy.eval()
    if factors is not None:
        set_capacity_factors(copy, factors)
    return copy
