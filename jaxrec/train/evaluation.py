"""A model measured on batches that it is not trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrec.metrics import MetricGroup
from jaxrec.metrics.total import Total
from jaxrec.train.loss import Loss, call_loss, sample_count
from jaxrec.train.pipeline import AHEAD


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The compiled measurement of a batch, and what it was made for."""

    graph: Any
    loss: Loss
    group: MetricGroup | None
    measure: Callable[..., tuple[Any, Total, Total]]


class Evaluation:
    """Measures models; programs are kept from call to call.

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
        """Measure a copy of the model in evaluation mode.

        Args:
            model: The model; it stays as it is.
            loss: Its loss function, as for `jaxrec.train.Trainer`.
            group: The metrics; None: the loss alone.
            batches: Batches on the devices.

        Returns:
            ``loss``, its mean over all samples, and the metrics by name.

        Raises:
            TypeError: The loss takes or returns something else.
            ValueError: There are no batches.
        """
        copy = nnx.merge(*nnx.split(model))
        copy.eval()
        graph, variables = nnx.split(copy)
        measure = self._program(graph, loss, group).measure
        state = None if group is None else group.init()
        total = samples = Total.zeros(())
        number = 0
        for number, batch in enumerate(batches, 1):
            state, total, samples = measure(variables, state, total, samples, batch)
            if number % AHEAD == 0:
                total.high.block_until_ready()
        if number == 0:
            raise ValueError("there are no batches to evaluate on")
        values = {} if group is None or state is None else group.compute(state)
        return {"loss": float(total.on_host() / samples.on_host()), **values}

    def _program(self, graph: Any, loss: Loss, group: MetricGroup | None) -> Program:
        for program in self._programs:
            if program.group is group and program.loss == loss and program.graph == graph:
                return program

        def measure(
            variables: Any, state: Any, total: Total, samples: Total, batch: Any
        ) -> tuple[Any, Total, Total]:
            model, has_metrics = nnx.merge(graph, variables), group is not None
            value, outputs = call_loss(loss, model, batch, has_metrics=has_metrics)
            count = jnp.asarray(sample_count(batch), jnp.float32)
            state = None if group is None else group.update(state, outputs)
            # A batch of padding alone has no mean.
            term = jnp.where(count > 0, value.astype(jnp.float32) * count, 0)
            return state, total + term, samples + count

        self._programs.append(Program(graph, loss, group, jax.jit(measure)))
        return self._programs[-1]
