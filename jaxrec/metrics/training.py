"""Metrics of training itself: samples per second, and means of the model's outputs and losses."""

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

    Call `update` once a step, on the host. Rates leave out the first steps, which compile. A run
    that is continued from a checkpoint is a new attempt.

    Attributes:
        window_seconds: Length of the window; values above two hours are lowered to two hours.
        warmup_steps: Number of steps at the start of each attempt that rates leave out, 1 or more.
        clock: Function that returns monotonic seconds.

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
            samples: Number of samples of the step on all devices and processes.
        """
        # A step's time is the difference of two calls: the first step of an attempt has none.
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
        """Return the numbers of samples and the rates, with "throughput/" before each name.

        The names are ``total_examples`` and ``attempt_examples``, and after the warm-up
        ``lifetime_throughput``, ``window_throughput`` and ``attempt_throughput`` in samples per
        second.
        """
        values = {
            "total_examples": float(self._total),
            "attempt_examples": float(self._attempt_total),
        }
        if self._attempt_seconds > 0:
            in_window = sum(samples for _, samples in self._window)
            # Summed anew: the running sum of `update` gathers rounding errors.
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
        """Continue from a checkpoint: start a new attempt, with its own warm-up."""
        # The time between the attempts must not count as time of training.
        self.__post_init__()
        self._total, self._warmup = int(state["total"]), int(state["warmup"])
        self._seconds = float(state["seconds"])


def tower_qps(processes: Sequence[Throughput]) -> float:
    """Return the samples per second of several processes together (TorchRec's ``tower_qps``).

    It is the number of samples of all processes, divided by the longest time of any. NaN: all
    processes are in their warm-up.

    Args:
        processes: The `Throughput` of each process, gathered in one.

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
    """The sums of the newest batch.

    Attributes:
        values: ``[tasks]`` float32 by name, summed over the samples of a weight other than 0.
        samples: ``[tasks]`` float32, number of these samples.
        steps: Int32, number of updates so far.
    """

    values: dict[str, Float[Array, " tasks"]]
    samples: Float[Array, " tasks"]
    steps: Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputMetric(Metric[Latest]):
    """The mean over the newest batch of each named output of the model (``output_`` and the name).

    The mean takes the samples whose weight is not 0, and is undefined without such samples. This is
    TorchRec's ``output`` metric, which has the names ``latest_imp`` and ``total_latest_imp``.
    Merging keeps the newer of two states, or adds up two states of the same step.

    Attributes:
        outputs: Names of the arrays among the inputs of `update`, ``[batch]`` or
            ``[tasks, batch]``.
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
    """The mean of a number that is given as the label (``scalar``), such as a loss.

    It is the mean over batches of each batch's mean. Samples of weight 0 are left out; other
    weights do not matter. Under ``compat="torchrec"`` the lifetime value is the newest number.
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
            # A window of one sample has the newest batch alone, whatever its size.
            values["lifetime_scalar"] = self.values(state.window.on_host(1))[self.name]
        return values
