"""From an option for every table to devices for its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from jaxrec.plan.options import EXCHANGED, HELD, TIMED, Option
from jaxrec.plan.problem import Choice, Loads, Problem, Solution

Partitioner: TypeAlias = Callable[[Problem, Sequence[int]], Solution]

# How many memory limits `balance_memory` tries, and what slowing down it accepts.
_SEARCHES, _TOLERANCE = 8, 0.02


def place_fastest(problem: Problem, proposal: Sequence[int]) -> Solution:
    """Largest parts first, each to the site where it slows the step down least.

    What has only one place goes first, then what goes to hosts, then what goes to devices; longest
    processing time first, after Graham 1969, "Bounds on multiprocessing timing anomalies".

    Args:
        problem: The tables.
        proposal: For each table the index of its option.
    """
    return _place(problem, proposal, {}, by_memory=False)


def balance_memory(problem: Problem, proposal: Sequence[int]) -> Solution:
    """The solution of least memory among those at most 2 % slower than `place_fastest`'s.

    Bisects between weighing time alone and memory alone.

    Args:
        problem: The tables.
        proposal: For each table the index of its option.
    """
    best = place_fastest(problem, proposal)
    limit = best.seconds * (1 + _TOLERANCE) if best.fits else float("inf")
    low, high = 0.0, 1.0
    least = Loads.of(problem, dict(enumerate(best.choices))).bytes
    for _ in range(_SEARCHES):
        middle = (low + high) / 2 if low else 1.0
        found = _place(problem, proposal, {}, by_memory=True, memory_weight=middle)
        needed = Loads.of(problem, dict(enumerate(found.choices))).bytes
        if found.seconds > limit:
            high = middle
            low = low or 1e-3
            continue
        if needed < least or found.excess < best.excess:
            best, least = found, needed
        if middle == 1.0:
            break
        low = middle
    return best


def _place(
    problem: Problem,
    proposal: Sequence[int],
    kept: Mapping[int, Choice],
    *,
    by_memory: bool,
    memory_weight: float = 0.0,
) -> Solution:
    options = [options[index] for options, index in zip(problem.options, proposal, strict=True)]
    loads = Loads.of(problem, kept)
    choices = dict(kept)
    weight = _bytes_weight(problem, options) * memory_weight if by_memory else 0.0
    for table in sorted(
        set(range(len(options))) - set(kept), key=lambda t: _order(problem, options[t])
    ):
        option = options[table]
        choices[table] = Choice(proposal[table], place_parts(loads, option, weight))
    return Solution.of(problem, [choices[table] for table in range(len(options))])


def place_parts(loads: Loads, option: Option, bytes_weight: float = 0.0) -> tuple[int, ...]:
    """Adds an option to the loads, its parts where they slow the step down least.

    Args:
        loads: What was placed before; changed in place.
        option: The option.
        bytes_weight: Seconds that a byte of memory is worth.

    Returns:
        The site of each part.
    """
    loads.add(option, ())
    if len(option.sites) == 1:
        loads.add_part(option, 0)
        return (0,)
    problem = loads.problem
    group = problem.groups[option.key]
    sites = np.array(option.sites)
    chosen: list[int] = []
    for _ in range(option.parts):
        rows = loads.rows[group][:, sites] + option.load[:, None]  # [6, sites, devices of one]
        after = rows.max(axis=2)
        before = loads.rows[group].max(axis=1)
        grown = np.maximum(after - before[:, None], 0)
        # What fills places that there are anyway takes less.
        free = max(0.0, float(loads.at_least[group] - before[EXCHANGED]))
        seconds = problem.row_seconds[group] @ grown[TIMED]
        seconds -= problem.place_seconds[group].sum() * np.minimum(grown[EXCHANGED], free)
        bytes = problem.row_bytes[group] * grown[HELD]
        # Among sites that cost alike, the one that has least so far.
        even = problem.row_seconds[group] @ after[TIMED]
        fill = problem.row_bytes[group] * after[HELD]
        excess = np.maximum(loads.bytes + bytes - problem.capacity, 0)
        if option.storage != "device":
            excess = excess + _stored_excess(loads, option, sites)
        excess[chosen] = np.inf
        key = np.lexsort(
            (fill, np.round(even, 12), np.round(seconds + bytes_weight * bytes, 12), excess)
        )
        site = int(key[0])
        chosen.append(site)
        loads.add_part(option, site)
    return tuple(chosen)


def _stored_excess(loads: Loads, option: Option, sites: np.ndarray) -> np.ndarray:
    """Bytes that host memory or disk lacks with a part on each of the sites."""
    problem = loads.problem
    kind = 0 if option.storage == "host" else 1
    capacity = problem.host_capacity if kind == 0 else problem.disk_capacity
    used = loads.stored[kind].reshape(problem.topology.hosts, -1).sum(axis=1)
    host = sites[:, 0] // problem.topology.devices_per_host
    return np.maximum(used[host] + option.stored_bytes.sum() - capacity, 0)


def _order(problem: Problem, option: Option) -> tuple[int, float]:
    """Fewest sites first, and then largest parts."""
    group = problem.groups[option.key]
    seconds = problem.row_seconds[group] @ option.load[TIMED].max(axis=1)
    return len(option.sites), -float(seconds)


def _bytes_weight(problem: Problem, options: Sequence[Option]) -> float:
    """What a byte is worth at most: as if all memory were worth a whole step."""
    total = sum(problem.row_bytes[problem.groups[o.key]] * o.load[HELD].sum() for o in options)
    seconds = sum(
        problem.row_seconds[problem.groups[o.key]] @ o.load[TIMED].sum(axis=1) for o in options
    )
    return float(seconds / total) * 10 if total else 0.0
