"""Times of calls: by the clock, of the host alone, and of the GPU's kernels by JAX's profiler."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Marks the start of each call in the profile. No call may compute a sine.
_MARK = jax.jit(jnp.sin)
_MARK_NAME = "sine"
# JAX lets the host run ahead of a GPU by some dozens of calls, and then makes it wait.
_CALLS_AHEAD = 8
ROUNDS = 10


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Kernels of one call, copies and fills included.

    Attributes:
        ms: Milliseconds by name.
        launches: Number of kernels that ran.
    """

    ms: dict[str, float]
    launches: float

    @property
    def total_ms(self) -> float:
        """Milliseconds of all kernels, without the time between them."""
        return sum(self.ms.values())


def timed(
    call: Callable[[], Any], wait: Callable[[Any], Any] = jax.block_until_ready
) -> dict[str, list[float]]:
    """Return the minimum and the median over rounds of a call's milliseconds.

    The calls of a round follow one another, so that the host prepares a call while the GPU works.
    On CPUs, where kernels may be interpreted, there is one round.
    """
    wait(call())
    start = time.perf_counter()
    wait(call())
    calls = int(min(max(0.05 / (time.perf_counter() - start), 1), 200))
    times = []
    for _ in range(ROUNDS if jax.default_backend() == "gpu" else 1):
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return {"ms": [min(times), float(np.median(times))]}


def host_ms(
    call: Callable[[], Any], wait: Callable[[Any], Any] = jax.block_until_ready, rounds: int = 5
) -> float:
    """Return the milliseconds after which the host has launched a call: the fastest of rounds.

    On CPUs, where only a dry run asks, one call is made.
    """
    is_gpu = jax.default_backend() == "gpu"
    rounds, calls = (rounds, _CALLS_AHEAD) if is_gpu else (1, 1)
    times = []
    for _ in range(rounds):
        wait(call())
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        times.append((time.perf_counter() - start) / calls * 1e3)
        wait(result)
    return min(times)


def profile(calls: Sequence[Callable[[], Any]], repeats: int = 10) -> list[Kernels]:
    """Return the kernels of each of these calls.

    The time between kernels, in which the GPU may wait for the host, does not count.

    Args:
        calls: The calls, compiled already.
        repeats: Times to run each.
    """
    mark = jnp.zeros(1)
    for call in (lambda: _MARK(mark), *calls):
        jax.block_until_ready(call())  # One after the other: a call may donate another's result.
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for call in calls:
                jax.block_until_ready(_MARK(mark))
                for _ in range(repeats):
                    result = call()
                jax.block_until_ready(result)
        (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
        events = _device_events(path)
    kernels: list[Kernels] = []
    for name, nanoseconds in events:
        if _MARK_NAME in name:
            kernels.append(Kernels(Counter(), 0))
        elif kernels:
            last = kernels[-1]
            last.ms[name] += nanoseconds / 1e6 / repeats
            kernels[-1] = dataclasses.replace(last, launches=last.launches + 1 / repeats)
    if len(kernels) != len(calls):
        raise RuntimeError(
            f"the profile shows {len(kernels)} of {len(calls)} calls: did they run on a GPU?"
        )
    return kernels


def _device_events(path: pathlib.Path) -> list[tuple[str, float]]:
    """Return name and nanoseconds of each event on a stream of a GPU, in the order of starts."""
    data = jax.profiler.ProfileData.from_file(str(path))
    lines = (line for plane in data.planes if "GPU" in plane.name for line in plane.lines)
    events = [
        (event.start_ns, event.name, event.duration_ns)
        for line in lines
        if "Stream" in line.name
        for event in line.events
    ]
    return [(name, duration) for _, name, duration in sorted(events)]
