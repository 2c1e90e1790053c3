"""The search for the fastest implementation of a call: timings, and the choice among them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxrec.embed.kernels import reference, registry, trial
from jaxrec.embed.kernels.answers import TunedCall
from jaxrec.embed.kernels.registry import Implementation
from jaxrec.tune.calls import Call

# Share of the default's time that another choice must save: less is noise.
MARGIN = 0.03

# A time is the median over rounds, each the mean of its calls: one call is too short for the clock,
# and a single round may meet another process.
ROUNDS = 7
MAX_CALLS = 1000  # calls of a round


@dataclasses.dataclass(frozen=True)
class Timing:
    """Median time of an implementation with some options, or the reason why it was not timed."""

    implementation: str
    options: Mapping[str, int]  # only those that differ from their defaults
    milliseconds: float | None = None
    failure: str | None = None


Time: TypeAlias = Callable[[Implementation, Mapping[str, int]], Timing]


class Stopwatch:
    """Checks and times implementations on one call, for about ``seconds`` each."""

    def __init__(self, call: Call, seconds: float, clock: Callable[[], float] = time.perf_counter):
        self.call, self.seconds, self.clock = call, seconds, clock

    def time(self, implementation: Implementation, options: Mapping[str, int]) -> Timing:
        """Time an implementation if its results agree with the reference's."""
        timing = Timing(implementation.name, options)
        function = functools.partial(getattr(implementation.module, self.call.primitive), **options)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of deprecations, and of arrays not donated
                failure = self._check(function)
                if failure is not None:
                    return dataclasses.replace(timing, failure=failure)
                return dataclasses.replace(timing, milliseconds=1e3 * self._median(function))
        # An option may need more registers or memory than there are. That is a result of the
        # search, and the search goes on.
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return dataclasses.replace(timing, failure=f"it fails: {reason}")

    def _check(self, function: Callable) -> str | None:
        """Return how a function's results differ from the reference's; None: they agree."""
        # First the small examples of the trial, which cover each branch of a kernel. Then the call
        # itself, whose sizes may reach what the examples do not.
        if (failure := trial.compare(self.call.form, function)) is not None:
            return failure
        expected = self._program(getattr(reference, self.call.primitive))(self.call.make())
        results = self._program(function)(self.call.make())
        pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(results), strict=True)
        if not all(_agree(*pair) for pair in pairs):
            return "its results differ from the reference's on this call"
        return None

    def _median(self, function: Callable) -> float:
        """Return a function's time for the call in seconds: the median of the rounds' means."""
        arrays = self.call.make()
        program = self._program(function)
        in_place = self.call.in_place

        def run(count: int) -> float:
            # Calls are dispatched one after the other and waited for once, as in a training loop.
            # An update takes the tables that the call before returned, as they were donated.
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
        """Compile a function for the call; return it as a function of the arrays by argument.

        Arrays that change in place are donated.
        """
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
    """Return whether a result is equal to the expected one up to rounding."""
    # On the device: results of a call may have a gigabyte.
    precision = max(1e-5, float(jnp.finfo(result.dtype).eps))
    wide, narrow = expected.astype(jnp.float32), result.astype(jnp.float32)
    return jnp.allclose(narrow, wide, rtol=precision, atol=precision, equal_nan=True)


def implementations_for(call: Call, platform: str) -> list[Implementation]:
    """Return the implementations that can run a call on a platform, in order of preference."""
    # As if the user named them: the stopwatch does the trial, and reports its failure.
    return [
        each
        for each in registry.IMPLEMENTATIONS
        if platform in each.platforms
        and each.refuse(call.primitive, call.arguments, is_named=True) is None
    ]


def default_for(call: Call, platform: str) -> str:
    """Return the implementation that runs a call without `jaxrec tune`."""
    primitive = registry.PRIMITIVES[call.primitive]
    return primitive.choose(call.arguments, is_tuned=False).chosen[platform]


def timings_of(call: Call, implementations: Sequence[Implementation], time: Time) -> list[Timing]:
    """Time implementations with their options, one option after the other."""
    # Coordinate descent: each option is tried with the best values of those before it. All
    # combinations of an update's four options would be hundreds of compilations. This way it is 14.
    timings = []
    for implementation in implementations:
        best = time(implementation, {})
        timings.append(best)
        if best.milliseconds is None:
            continue
        function = getattr(implementation.module, call.primitive)
        parameters = inspect.signature(function).parameters
        for option, values in implementation.options(call.primitive).items():
            before = dict(best.options)
            for value in values:
                if value == parameters[option].default:
                    continue
                timing = time(implementation, {**before, option: value})
                timings.append(timing)
                best = fastest([best, timing])
    return timings


def choose(
    call: Call,
    default: str,
    timings: Sequence[Timing],
    implementations: Sequence[Implementation],
    time: Time,
) -> TunedCall | None:
    """Return the fastest implementation and options for a call, or None if nothing was timed.

    ``default`` is the implementation that runs the call without tuning; ``time`` times again.
    """
    # The fastest of many timings is partly luck. A choice other than the default must save `MARGIN`
    # of the time, and do so again when both are timed once more.
    best = fastest(timings)
    if best.milliseconds is None:
        return None
    usual = next((each for each in timings if _key(each) == (default, ())), best)
    if usual.milliseconds is None:
        usual = best
    if _key(usual) != _key(best):
        by_name = {each.name: each for each in implementations}
        again = [time(by_name[each.implementation], each.options) for each in (usual, best)]
        if not (_saves(usual, best) and _saves(*again)):
            best = usual
    assert best.milliseconds is not None
    assert usual.milliseconds is not None
    lookups, bags = call.size
    return TunedCall(
        str(call.form),
        lookups,
        bags,
        best.implementation,
        dict(best.options),
        best.milliseconds,
        default,
        usual.milliseconds,
    )


def fastest(timings: Sequence[Timing]) -> Timing:
    """Return the timing with the least time; the first of equal ones."""

    def milliseconds(timing: Timing) -> float:
        return math.inf if timing.milliseconds is None else timing.milliseconds

    return min(timings, key=milliseconds)


def _saves(usual: Timing, other: Timing) -> bool:
    if usual.milliseconds is None or other.milliseconds is None:
        return False
    return other.milliseconds < (1 - MARGIN) * usual.milliseconds


def _key(timing: Timing) -> tuple[str, tuple[tuple[str, int], ...]]:
    return timing.implementation, tuple(timing.options.items())
