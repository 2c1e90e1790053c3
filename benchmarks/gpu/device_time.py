"""The time that a GPU spends in the kernels of a call, by JAX's profiler."""

from __future__ import annotations

import pathlib
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Marks the start of each call in the profile. No call may compute a sine.
_MARK = jax.jit(jnp.sin)
_MARK_NAME = "sine"


def kernel_times(calls: Sequence[Callable[[], Any]], repeats: int = 10) -> list[dict[str, float]]:
    """Return the milliseconds of each kernel in a call, by name, for each of these calls.

    Copies and fills count as kernels. The time between kernels, in which the GPU may wait for
    the host, does not count.

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
    times: list[dict[str, float]] = []
    for name, nanoseconds in events:
        if _MARK_NAME in name:
            times.append(Counter())
        elif times:
            times[-1][name] += nanoseconds / 1e6 / repeats
    if len(times) != len(calls):
        raise RuntimeError(
            f"the profile shows {len(times)} of {len(calls)} calls: did they run on a GPU?"
        )
    return times


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
