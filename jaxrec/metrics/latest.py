"""Metrics that pass numbers of the model through to the report."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrec.metrics.domain import NUMBER, Domains
from jaxrec.metrics.metric import Batch, Metric, SumMetric, Sums, SumState, Values, ratio


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Latest:
    """The newest values.

    Attributes:
        values: By name ``[tasks]`` float32, summed over the samples that have a weight.
        samples: ``[tasks]`` float32, number of these samples.
        steps: Int32, updates so far.
    """

    values: dict[str, Float[Array, " tasks"]]
    samples: Float[Array, " tasks"]
    steps: Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputMetric(Metric[Latest]):
    """The newest batch means of arrays that the model outputs, one value per name.

    The mean takes the samples with a weight other than 0; without such samples it is undefined.

    TorchRec's ``output`` metric, with ``latest_imp`` and ``total_latest_imp`` for names. Merging
    keeps the newer of two states, or adds the two if they are of the same step.

    Attributes:
        outputs: Names under which `update` gets the arrays, ``[batch]`` or ``[tasks, batch]``.
    """

    outputs: tuple[str, ...]

    name: ClassVar[str] = "output"
    domains: ClassVar[Domains] = (None, None)

    @property
    def required(self) -> tuple[str, ...]:
        return self.outputs

    @property
    def whole(self) -> tuple[str, ...]:
        return ()

    def init(self) -> Latest:
        values = {name: jnp.zeros(self.tasks, jnp.float32) for name in self.outputs}
        samples = jnp.zeros(self.tasks, jnp.float32)
        return Latest(values, samples, jnp.zeros((), jnp.int32))

    def add(self, state: Latest, batch: Batch) -> Latest:
        values = {
            name: jnp.where(batch.real, x.astype(jnp.float32), 0).sum(axis=1)
            for name, x in batch.inputs.items()
        }
        return Latest(values, batch.real.sum(axis=1).astype(jnp.float32), state.steps + 1)

    def merge(self, state: Latest, other: Latest) -> Latest:
        def of_newest(a: Array, b: Array) -> Array:
            newer = jnp.where(state.steps > other.steps, a, b)
            return jnp.where(state.steps == other.steps, a + b, newer)

        return Latest(
            {name: of_newest(state.values[name], other.values[name]) for name in self.outputs},
            of_newest(state.samples, other.samples),
            jnp.maximum(state.steps, other.steps),
        )

    def compute(self, state: Latest) -> Values:
        latest = jax.device_get(state)
        samples = latest.samples.astype(np.float64)
        return {f"output_{name}": ratio(x, samples) for name, x in latest.values.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalarMetric(SumMetric):
    """The mean of a number that is given as the label (``scalar``): a loss, a learning rate.

    Over the batches of the lifetime and of the window, each counting once. Samples of weight 0 are
    left out; other weights do not matter. ``compat="torchrec"`` gives the newest number for the
    lifetime's.
    """

    name: ClassVar[str] = "scalar"
    domains: ClassVar[Domains] = (None, NUMBER)

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        count = batch.real.sum(axis=1)
        means = jnp.where(batch.real, batch.labels, 0).sum(axis=1) / jnp.maximum(count, 1)
        return {"labels": means, "batches": (count > 0).astype(jnp.float32)}

    def values(self, sums: Sums) -> Values:
        return {self.name: ratio(sums["labels"], sums["batches"])}

    def compute(self, state: SumState) -> Values:
        values = super().compute(state)
        if self.compat is not None:
            if state.window is None:
                raise ValueError(
                    "ScalarMetric: compat='torchrec' reports the newest; give it a window"
                )
            values["lifetime_scalar"] = self.values(state.window.on_host(1))[self.name]
        return values
