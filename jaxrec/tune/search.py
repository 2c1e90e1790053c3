"""The implementations and options of a call that are timed, and the choice among them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence

from jaxrec.embed.kernels import dispatch
from jaxrec.embed.kernels.dispatch import Implementation
from jaxrec.embed.kernels.tuning import TunedCall
from jaxrec.tune.calls import Call
from jaxrec.tune.stopwatch import Timing

# Share of its time that another choice must save: less is noise.
MARGIN = 0.03

Time = Callable[[Implementation, Mapping[str, int]], Timing]


def implementations_for(call: Call, platform: str) -> list[Implementation]:
    """Return the implementations that take a call on a platform, in their order."""
    return [
        each
        for each in dispatch.IMPLEMENTATIONS
        if platform in each.platforms
        and each.refuse(call.primitive, call.arguments, is_named=True) is None
    ]


def default_for(call: Call, platform: str) -> str:
    """Return the implementation that runs a call by default."""
    primitive = dispatch.PRIMITIVES[call.primitive]
    return primitive.choose(call.arguments, is_tuned=False).chosen[platform]


def timings_of(call: Call, implementations: Sequence[Implementation], time: Time) -> list[Timing]:
    """Time implementations with their options, one option after the other.

    Each option is tried with the best values of those before it.
    """
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
    """Return the choice for a call; None: nothing could be timed.

    A choice other than the default must save `MARGIN` of the time, and again when both are timed
    once more.
    """
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
    """Return the timing of the least time; the first of equal ones."""

    def milliseconds(timing: Timing) -> float:
        return math.inf if timing.milliseconds is None else timing.milliseconds

    return min(timings, key=milliseconds)


def _saves(usual: Timing, other: Timing) -> bool:
    if usual.milliseconds is None or other.milliseconds is None:
        return False
    return other.milliseconds < (1 - MARGIN) * usual.milliseconds


def _key(timing: Timing) -> tuple[str, tuple[tuple[str, int], ...]]:
    return timing.implementation, tuple(timing.options.items())
