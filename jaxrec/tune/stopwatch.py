"""The time of a call, when it agrees with the reference."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrec.embed.kernels import reference, trial
from jaxrec.embed.kernels.dispatch import Implementation
from jaxrec.tune.calls import Call

ROUNDS = 7
MAX_CALLS = 1000  # of a round


@dataclasses.dataclass(frozen=True)
class Timing:
    """Time of an implementation with some options, or why there is none.

    Attributes:
        implementation: Its name.
        options: Its options by name, without options of default value.
        milliseconds: Median time of a call; None: it was not timed.
        failure: Reason why it was not timed.
    """

    implementation: str
    options: Mapping[str, int]
    milliseconds: float | None = None
    failure: str | None = None


class Stopwatch:
    """Checks and times implementations on one call.

    Args:
        call: The call.
        seconds: Time of all calls of one implementation, without the first.
        clock: Returns the time in seconds.
    """

    def __init__(self, call: Call, seconds: float, clock: Callable[[], float] = time.perf_counter):
        self.call, self.seconds, self.clock = call, seconds, clock

    def time(self, implementation: Implementation, options: Mapping[str, int]) -> Timing:
        """Time an implementation that gives the reference's results; an error is a failure."""
        timing = Timing(implementation.name, options)
        function = functools.partial(getattr(implementation.module, self.call.primitive), **options)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of deprecations, and of arrays not donated
                failure = self._check(function)
                if failure is not None:
                    return dataclasses.replace(timing, failure=failure)
                return dataclasses.replace(timing, milliseconds=1e3 * self._median(function))
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return dataclasses.replace(timing, failure=f"it fails: {reason}")

    def _check(self, function: Callable) -> str | None:
        """Return how results differ from the reference's, on a small example or on the call."""
        call = self.call
        kernels = types.ModuleType("timed")
        setattr(kernels, call.primitive, function)
        failure = trial.compare(call.form, kernels, reference)
        if failure is not None or function is getattr(reference, call.primitive):
            return failure
        expected = self._program(getattr(reference, call.primitive))(call.make())
        results = self._program(function)(call.make())
        pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(results), strict=True)
        if not all(_agree(*pair) for pair in pairs):
            return "its results differ from the reference's on this call"
        return None

    def _median(self, function: Callable) -> float:
        """Return the median time of a call over rounds of calls, in seconds."""
        arrays = self.call.make()
        program = self._program(function)
        in_place = self.call.in_place

        def run(count: int) -> float:
            start = self.clock()
            for _ in range(count):
                results = program(arrays)
                if in_place:
                    arrays.update(zip(in_place, results, strict=True))
            jax.block_until_ready(results)
            return self.clock() - start

        run(1)  # compiles
        once = max(run(1), 1e-7)
        calls = int(min(max(self.seconds / ROUNDS / once, 1), MAX_CALLS))
        return statistics.median(run(calls) for _ in range(ROUNDS)) / calls

    def _program(self, function: Callable) -> Callable[[dict[str, Any]], Any]:
        """Return the call by a function, compiled; arrays that change in place are donated."""
        in_place, static = self.call.in_place, self.call.static

        @functools.partial(jax.jit, donate_argnums=0)
        def program(changed: dict[str, Any], rest: dict[str, Any]) -> Any:
            return function(**changed, **rest, **static)

        def run(arrays: dict[str, Any]) -> Any:
            changed = {name: arrays[name] for name in in_place}
            return program(changed, {name: arrays[name] for name in arrays.keys() - changed})

        return run


@jax.jit
def _agree(expected: jax.Array, result: jax.Array) -> jax.Array:
    """Return whether results are equal up to rounding."""
    precision = max(1e-5, float(jnp.finfo(result.dtype).eps))
    wide, narrow = expected.astype(jnp.float32), result.astype(jnp.float32)
    return jnp.allclose(narrow, wide, rtol=precision, atol=precision, equal_nan=True)
