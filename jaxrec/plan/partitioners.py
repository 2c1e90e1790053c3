"""Partitioners: from an option for every table to sites for its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from jaxrec.plan.load import Load
from jaxrec.plan.options import ShardingOption
from jaxrec.plan.problem import Choice, Problem, Solution, Totals

Partitioner: TypeAlias = Callable[[Problem, Sequence[int]], Solution]

# Weights of memory that `balance_memory` tries, and the slowdown that it accepts.
_MAX_TRIALS, _TOLERANCE = 8, 0.02


def place_fastest(problem: Problem, proposal: Sequence[int]) -> Solution:
    """Place the largest parts first, each on the site where it slows the step down least.

    Parts with a single possible site go first, then parts that go to hosts, then parts that go to
    devices. Longest processing time first is Graham 1969, "Bounds on multiprocessing timing
    anomalies".

    Args:
        problem: The tables.
        proposal: Index of each table's option.
    """
    return _place(problem, proposal, memory_weight=0.0)


def balance_memory(problem: Problem, proposal: Sequence[int]) -> Solution:
    """Place parts with the least memory that makes a step at most 2 % slower than `place_fastest`.

    Bisects between weighing time alone and memory alone.

    Args:
        problem: The tables.
        proposal: Index of each table's option.
    """
    best = place_fastest(problem, proposal)
    limit = best.seconds * (1 + _TOLERANCE) if best.fits else float("inf")
    low, high = 0.0, 1.0
    least = Totals.of(problem, dict(enumerate(best.choices))).bytes
    for _ in range(_MAX_TRIALS):
        middle = (low + high) / 2 if low else 1.0
        solution = _place(problem, proposal, memory_weight=middle)
        bytes = Totals.of(problem, dict(enumerate(solution.choices))).bytes
        if solution.seconds > limit:
            high = middle
            low = low or 1e-3
            continue
        if bytes < least or solution.excess < best.excess:
            best, least = solution, bytes
        if middle == 1.0:
            break
        low = middle
    return best


def _place(problem: Problem, proposal: Sequence[int], *, memory_weight: float) -> Solution:
    options = [options[index] for options, index in zip(problem.options, proposal, strict=True)]
    totals = Totals.of(problem, {})
    weight = _byte_seconds(problem, options) * memory_weight
    choices = {
        table: Choice(proposal[table], place_parts(totals, options[table], weight))
        for table in sorted(range(len(options)), key=lambda t: _order(problem, options[t]))
    }
    return Solution.of(problem, [choices[table] for table in range(len(options))])


def place_parts(
    totals: Totals, option: ShardingOption, byte_seconds: float = 0.0
) -> tuple[int, ...]:
    """Add an option to the totals, its parts where they slow the step down least.

    Args:
        totals: The tables placed before; changed in place.
        option: The option.
        byte_seconds: Seconds that a byte of memory is worth.

    Returns:
        The site of each part.
    """
    totals.add(option, ())
    if len(option.sites) == 1:
        totals.add_part(option, 0)
        return (0,)
    problem = totals.problem
    group = problem.groups[option.group]
    unit_seconds, unit_bytes = problem.unit_seconds[:, group], problem.unit_bytes[:, group]
    sites = np.array(option.sites)
    chosen: list[int] = []
    for _ in range(option.parts):
        # The group's load with the part on each of the sites, [6, sites, devices of one].
        part = option.load.stacked[:, None] * problem.weights[:, sites]
        loads = totals.stacked[:, group][:, sites] + part
        after, before = loads.max(axis=2), totals.stacked[:, group].max(axis=1)
        growth = np.maximum(after - before[:, None], 0)
        # Rows that fill positions of a round that is moved anyway take less.
        free = max(0.0, float(totals.round_capacity[group] - Load(*before).exchanged))
        filled = np.minimum(Load(*growth).exchanged, free)
        seconds = unit_seconds @ growth - problem.position_seconds[:, group].sum() * filled
        bytes = unit_bytes @ growth
        excess = np.maximum(totals.bytes + bytes - problem.capacity, 0)
        excess[chosen] = np.inf
        # Among sites that cost alike, the one that has least so far.
        order = np.lexsort(
            (
                unit_bytes @ after,
                np.round(unit_seconds @ after, 12),
                np.round(seconds + byte_seconds * bytes, 12),
                excess,
            )
        )
        site = int(order[0])
        chosen.append(site)
        totals.add_part(option, site)
    return tuple(chosen)


def _order(problem: Problem, option: ShardingOption) -> tuple[int, float]:
    """Return a key that sorts fewest sites first, and then largest parts."""
    seconds = problem.unit_seconds[:, problem.groups[option.group]]
    return len(option.sites), -float(seconds @ option.load.stacked.max(axis=1))


def _byte_seconds(problem: Problem, options: Sequence[ShardingOption]) -> float:
    """Return the largest worth of a byte: as if all memory were worth ten steps."""
    seconds = bytes = 0.0
    for option in options:
        group, load = problem.groups[option.group], option.load.stacked.sum(axis=1)
        seconds += problem.unit_seconds[:, group] @ load
        bytes += problem.unit_bytes[:, group] @ load
    return float(seconds / bytes) * 10 if bytes else 0.0
