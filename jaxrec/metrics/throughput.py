"""The throughput of training."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence

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
