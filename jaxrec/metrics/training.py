"""Numbers of training itself: outputs and scalars of the model, and samples per second."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrec.metrics.domain import NUMBER, Domains
from jaxrec.metrics.metric import Batch, Metric, SumMetric, Sums, SumState, Values, ratio

# A longer window would not show the current speed.
MAX_WINDOW_SECONDS = 2 * 60 * 60


@dataclasses.dataclass
class Throughput:
    """Samples per second since the start, in the last seconds, and since the last restart.

    The first steps, which compile, are left out. `update` is called once a step, on the host.

    Attributes:
        window_seconds: Length of the window; two hours at most.
        warmup_steps: Steps at the start of each attempt that count samples but no time, 1 or more.
        clock: Seconds, monotonic.

    Example:
        >>> seconds = iter([0.0, 1.0, 3.0])
        >>> throughput = Throughput(warmup_steps=1, clock=lambda: next(seconds))
        >>> for _ in range(3):
        ...     throughput.update(300)
        >>> throughput.compute()["throughput/lifetime_throughput"]
        200.0
    """

    window_seconds: float = 100.0
    warmup_steps: int = 100
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if self.window_seconds < 1 or self.warmup_steps < 1:
            raise ValueError(
                f"Throughput: window_seconds={self.window_seconds} and "
                f"warmup_steps={self.warmup_steps} must be 1 or more"
            )
        self.window_seconds = min(self.window_seconds, MAX_WINDOW_SECONDS)
        self._steps = 0
        self._previous = 0.0
        self._total = self._warmup = 0
        self._seconds = 0.0
        self._attempt_total = self._attempt_warmup = 0
        self._attempt_seconds = 0.0
        self._window: collections.deque[tuple[float, int]] = collections.deque()
        self._window_seconds = 0.0

    def update(self, samples: int) -> None:
        """Count one step.

        Args:
            samples: Samples of the step, on all devices and processes together.
        """
        now = self.clock()
        self._steps += 1
        self._total += samples
        self._attempt_total += samples
        if self._steps <= self.warmup_steps:
            self._warmup += samples
            self._attempt_warmup += samples
        else:
            seconds = now - self._previous
            self._seconds += seconds
            self._attempt_seconds += seconds
            self._window.append((seconds, samples))
            self._window_seconds += seconds
            while self._window_seconds > self.window_seconds:
                self._window_seconds -= self._window.popleft()[0]
        self._previous = now

    def compute(self) -> dict[str, float]:
        """Return ``throughput/total_examples`` and ``attempt_examples``.

        After the warm-up, also ``lifetime_throughput``, ``window_throughput`` and
        ``attempt_throughput``, in examples per second.
        """
        values = {
            "total_examples": float(self._total),
            "attempt_examples": float(self._attempt_total),
        }
        if self._attempt_seconds > 0:
            in_window = sum(samples for _, samples in self._window)
            seconds = math.fsum(seconds for seconds, _ in self._window)
            values["lifetime_throughput"] = (self._total - self._warmup) / self._seconds
            values["window_throughput"] = in_window / seconds if seconds > 0 else 0.0
            values["attempt_throughput"] = (
                self._attempt_total - self._attempt_warmup
            ) / self._attempt_seconds
        return {f"throughput/{name}": value for name, value in values.items()}

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"total": self._total, "warmup": self._warmup, "seconds": self._seconds}

    def restore(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint: a new attempt, with a warm-up of its own."""
        # The time that the job was away must not count as time of training.
        self.__post_init__()
        self._total, self._warmup = int(state["total"]), int(state["warmup"])
        self._seconds = float(state["seconds"])


def tower_qps(processes: Sequence[Throughput]) -> float:
    """Return the samples per second of several processes together (TorchRec's ``tower_qps``).

    All samples over the longest time; NaN while none is past its warm-up.

    Args:
        processes: The counters, gathered.

    Example:
        >>> tower_qps([])
        nan
    """
    states = [process.state() for process in processes]
    seconds = max((state["seconds"] for state in states), default=0.0)
    if seconds == 0:
        return math.nan
    return sum(state["total"] - state["warmup"] for state in states) / seconds


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
