"""Numbers that are passed through to the report rather than computed from predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jaxrec.metrics.metric import AnyArray, Batch, Metric, SumMetric, SumState, Values, ratio


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Latest:
    """The newest values.

    Attributes:
        values: By name ``[tasks]`` float32, summed over the parts of a batch.
        parts: Float32, of how many states they are: devices or processes.
        steps: Int32, updates so far.
    """

    values: dict[str, Float[Array, " tasks"]]
    parts: Float[Array, ""]
    steps: Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output(Metric[Latest]):
    """The newest batch means of arrays that the model puts out, one value a name.

    TorchRec's ``output`` metric, with ``latest_imp`` and ``total_latest_imp`` for names. Merged,
    the newer of the two states counts, and their mean where they are of the same step.

    Attributes:
        outputs: Names under which `update` gets the arrays, ``[batch]`` or ``[tasks, batch]``.
    """

    outputs: tuple[str, ...]

    name: ClassVar[str] = "output"

    @property
    def required(self) -> tuple[str, ...]:
        return self.outputs

    def init(self) -> Latest:
        values = {name: jnp.zeros(self.tasks, jnp.float32) for name in self.outputs}
        return Latest(values, jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))

    def update(
        self,
        state: Latest,
        predictions: Shaped[AnyArray, "..."],
        labels: Shaped[AnyArray, "..."],
        weights: Shaped[AnyArray, "..."] | None = None,
        **inputs: Shaped[AnyArray, "..."],
    ) -> Latest:
        batch = self.batch(predictions, labels, weights, inputs)
        values = {name: x.astype(jnp.float32).mean(axis=1) for name, x in batch.inputs.items()}
        return Latest(values, jnp.ones((), jnp.float32), state.steps + 1)

    def merge(self, state: Latest, other: Latest) -> Latest:
        def of_newest(a: Array, b: Array) -> Array:
            newer = jnp.where(state.steps > other.steps, a, b)
            return jnp.where(state.steps == other.steps, a + b, newer)

        return Latest(
            {name: of_newest(state.values[name], other.values[name]) for name in self.outputs},
            of_newest(state.parts, other.parts),
            jnp.maximum(state.steps, other.steps),
        )

    def compute(self, state: Latest) -> Values:
        latest = jax.device_get(state)
        parts = latest.parts.astype(np.float64)
        return {f"output_{name}": ratio(x, parts[None]) for name, x in latest.values.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scalar(SumMetric):
    """The mean of a number that is given as the label (``scalar``): a loss, a learning rate.

    Over the batches of the lifetime and of the window, each counting once; weights are not used.
    ``compat="torchrec"`` gives the newest number for the lifetime's.
    """

    name: ClassVar[str] = "scalar"

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        means = batch.labels.mean(axis=1)
        return {"labels": means, "batches": jnp.ones_like(means)}

    def values(self, sums: Mapping[str, Float[np.ndarray, "tasks ..."]]) -> Values:
        return {self.name: ratio(sums["labels"], sums["batches"])}

    def compute(self, state: SumState) -> Values:
        values = super().compute(state)
        if self.compat is not None:
            if state.window is None:
                raise ValueError("Scalar: compat='torchrec' reports the newest; give it a window")
            values["lifetime_scalar"] = self.values(state.window.on_host(1))[self.name]
        return values
