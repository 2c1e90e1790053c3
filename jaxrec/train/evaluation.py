"""Evaluation of a model on batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrec.metrics import MetricGroup
from jaxrec.metrics.total import Total
from jaxrec.train.loss import Loss, Outputs, call_loss, sample_count
from jaxrec.train.step import MAX_PENDING_STEPS


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled function of a batch, and the arguments that it was compiled for."""

    graph: Any
    loss: Loss
    kind: Any
    run: Callable[..., Any]


class Evaluation:
    """Evaluates models in evaluation mode; compiles once for several calls.

    Example:
        >>> import numpy as np
        >>> model = nnx.Linear(1, 1, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
        >>> evaluate = Evaluation()
        >>> batches = [np.ones((2, 1), np.float32), np.zeros((1, 1), np.float32)]
        >>> round(evaluate(model, lambda model, x: (model(x).mean(), {}), None, batches)["loss"], 6)
        0.666667
    """

    def __init__(self) -> None:
        self._programs: list[Program] = []

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
        graph, variables = _in_evaluation_mode(model)

        def add_batch(
            variables: Any, state: Any, total: Total, samples: Total, batch: Any
        ) -> tuple[Any, Total, Total]:
            model, has_metrics = nnx.merge(graph, variables), group is not None
            value, outputs = call_loss(loss, model, batch, has_metrics=has_metrics)
            count = jnp.asarray(sample_count(batch), jnp.float32)
            state = None if group is None else group.update(state, outputs)
            # A batch of padding alone has no mean.
            term = jnp.where(count > 0, value.astype(jnp.float32) * count, 0)
            return state, total + term, samples + count

        run = self._compiled(graph, loss, group, add_batch)
        state = None if group is None else group.init()
        total = samples = Total.zeros(())
        number = 0
        for number, batch in enumerate(batches, 1):
            state, total, samples = run(variables, state, total, samples, batch)
            if number % MAX_PENDING_STEPS == 0:
                total.high.block_until_ready()
        if number == 0:
            raise ValueError("there are no batches to evaluate on")
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
        graph, variables = _in_evaluation_mode(model)

        def outputs_of(variables: Any, batch: Any) -> Outputs:
            return call_loss(loss, nnx.merge(graph, variables), batch, has_metrics=True)[1]

        run = self._compiled(graph, loss, "outputs", outputs_of)
        for batch in batches:
            yield run(variables, batch)

    def _compiled(self, graph: Any, loss: Loss, kind: Any, function: Callable[..., Any]) -> Any:
        """Return the compiled function, or that of an earlier call with the same arguments."""
        for program in self._programs:
            if program.kind is kind and program.loss == loss and program.graph == graph:
                return program.run
        self._programs.append(Program(graph, loss, kind, jax.jit(function)))
        return self._programs[-1].run


def _in_evaluation_mode(model: nnx.Module) -> tuple[Any, Any]:
    """Split a copy of the model in evaluation mode; the copy shares the model's arrays."""
    copy = nnx.merge(*nnx.split(model))
    copy.eval()
    return nnx.split(copy)
