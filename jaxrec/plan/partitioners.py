"""Partitioners place an option of every table on sites; `improve` is a local search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from jaxrec.plan.options import ShardingOption
from jaxrec.plan.problem import Choice, Problem, Solution, Totals
from jaxrec.plan.quantities import Load

Partitioner: TypeAlias = Callable[[Problem, Sequence[int]], Solution]
"""Function from a problem and one option of each table to the devices of the tables' shards."""

# Number of weights of memory that `balance_memory` tries, and the slowdown that it accepts.
_MAX_TRIALS, _TOLERANCE = 8, 0.02


def place_fastest(problem: Problem, proposal: Sequence[int]) -> Solution:
    """Place the largest shards first, each on the site where it slows the step down least.

    The rule "longest processing time first" is by Graham 1969, "Bounds on multiprocessing timing
    anomalies".
    """
    return _place(problem, proposal, memory_weight=0.0)


def balance_memory(problem: Problem, proposal: Sequence[int]) -> Solution:
    """Place shards in the least memory with a step at most 2 % slower than `place_fastest`."""
    best = place_fastest(problem, proposal)
    limit = best.seconds * (1 + _TOLERANCE) if best.fits else float("inf")
    # Bisects between weighing time alone (0) and memory alone (1). The first trial is 1: if that is
    # fast enough, no other weight takes less memory.
    low, high = 0.0, 1.0
    least = Totals.of(problem, best.choices).bytes
    for _ in range(_MAX_TRIALS):
        middle = (low + high) / 2 if low else 1.0
        solution = _place(problem, proposal, memory_weight=middle)
        bytes = Totals.of(problem, solution.choices).bytes
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
    totals = Totals.of(problem)
    weight = _byte_seconds(problem, options) * memory_weight
    choices = {
        table: Choice(proposal[table], place_shards(totals, options[table], weight))
        for table in sorted(range(len(options)), key=lambda t: _order(problem, options[t]))
    }
    return Solution.of(problem, [choices[table] for table in range(len(options))])


def place_shards(
    totals: Totals, option: ShardingOption, byte_seconds: float = 0.0
) -> tuple[int, ...]:
    """Choose the sites where an option's shards slow the step least; return the sites.

    The option is added to the totals. The shards of one part go to one site. A byte of memory costs
    ``byte_seconds``.
    """
    totals.add(option, ())
    if len(option.sites) == 1:
        totals.add_shards(option, 0)
        return (0,)
    problem = totals.problem
    group = problem.groups[option.group]
    unit_seconds, unit_bytes = problem.unit_seconds[:, group], problem.unit_bytes[:, group]
    sites = np.array(option.sites)
    chosen: list[int] = []
    for _ in range(option.parts):
        # The group's load with the shards on each of the sites, [6, sites, devices of one].
        shards = option.load.stacked[:, None] * problem.weights[:, sites]
        loads = totals.stacked[:, group][:, sites] + shards
        after, before = loads.max(axis=2), totals.stacked[:, group].max(axis=1)
        growth = np.maximum(after - before[:, None], 0)
        # Rows that fill positions of a round that is moved anyway take less: their share of the
        # round is already paid for.
        free = max(0.0, float(totals.round_capacity[group] - Load(*before).exchanged))
        filled = np.minimum(Load(*growth).exchanged, free)
        seconds = unit_seconds @ growth - problem.position_seconds[:, group].sum() * filled
        bytes = unit_bytes @ growth
        # Memory comes first: a shard that does not fit must not be hidden by seconds that it saves.
        # Parts of one table need different sites.
        excess = np.maximum(totals.bytes + bytes - problem.capacity, 0)
        excess[chosen] = np.inf
        # Among sites that cost alike, the one that has least so far.
        order = np.lexsort(
            (
                unit_bytes @ after,
                # Rounded to a picosecond, so that sites that cost alike compare equal and the next
                # key decides.
                np.round(unit_seconds @ after, 12),
                np.round(seconds + byte_seconds * bytes, 12),
                excess,
            )
        )
        site = int(order[0])
        chosen.append(site)
        totals.add_shards(option, site)
    return tuple(chosen)


def _order(problem: Problem, option: ShardingOption) -> tuple[int, float]:
    """Return a key that sorts options by their number of sites, then the largest shards first."""
    # Shards with one possible site go anyway there, so the others must know of them; shards of
    # whole hosts are harder to place than those of single devices.
    seconds = problem.unit_seconds[:, problem.groups[option.group]]
    return len(option.sites), -float(seconds @ option.load.stacked.max(axis=1))


def _byte_seconds(problem: Problem, options: Sequence[ShardingOption]) -> float:
    """Return the largest price of a byte of memory in seconds, to trade memory for step time.

    At this price the bytes of all options cost ten times the seconds of their steps.
    """
    seconds = bytes = 0.0
    for option in options:
        group, load = problem.groups[option.group], option.load.stacked.sum(axis=1)
        seconds += problem.unit_seconds[:, group] @ load
        bytes += problem.unit_bytes[:, group] @ load
    return float(seconds / bytes) * 10 if bytes else 0.0


def improve(problem: Problem, solution: Solution, *, deadline: float) -> Solution:
    """Improve a solution until ``deadline``: place tables anew one by one, and swap shards."""
    choices = list(solution.choices)
    totals = Totals.of(problem, choices)
    # In a random order, so that early tables do not always win; with a fixed seed, so that equal
    # problems get equal plans.
    random = np.random.default_rng(0)
    helped = True
    while helped and time.monotonic() < deadline:
        helped = False
        for table in random.permutation(len(choices)):
            if time.monotonic() >= deadline:
                break
            helped |= _place_anew(totals, choices, int(table))
        helped |= _swap_shards(totals, choices, deadline)
    # Summed up anew: the running totals carry the rounding of many additions and subtractions.
    improved = Solution.of(problem, choices)
    return improved if improved.better_than(solution) else solution


def _place_anew(totals: Totals, choices: list[Choice], table: int) -> bool:
    """Give one table its best option and sites; return whether they changed."""
    options, before = totals.problem.options[table], choices[table]
    best, best_key = before, _key(totals)
    totals.remove(options[before.option], before.sites)
    for index, option in enumerate(options):
        sites = place_shards(totals, option)
        key = _key(totals)
        totals.remove(option, sites)
        if _is_less(key, best_key):
            best, best_key = Choice(index, sites), key
    totals.add(options[best.option], best.sites)
    choices[table] = best
    return best is not before


def _swap_shards(totals: Totals, choices: list[Choice], deadline: float) -> bool:
    """Swap shards of each group's slowest devices with those of others, while that helps."""
    problem, helped = totals.problem, False
    members: dict[int, list[int]] = {}
    for table, choice in enumerate(choices):
        option = problem.options[table][choice.option]
        # Shards of single devices alone: those of hosts and of the whole mesh are few or have no
        # other site.
        if len(option.sites) > 1 and len(option.sites[0]) == 1:
            members.setdefault(problem.groups[option.group], []).append(table)
    for group, tables in members.items():
        again = True
        while again and time.monotonic() < deadline:
            again = _swap_once(totals, choices, group, tables, deadline)
            helped |= again
    return helped


def _swap_once(
    totals: Totals, choices: list[Choice], group: int, tables: list[int], deadline: float
) -> bool:
    """Make the first swap of two shards that helps; return whether there was one."""
    problem = totals.problem
    # Only a shard that leaves a slowest device can shorten the step, so no other pairs are tried.
    by_count = problem.unit_seconds[:, group, None] * totals.stacked[:, group]
    # The devices that take longest for one count of the load, and for all.
    slowest = {int(s.argmax()) for s in (*by_count, by_count.sum(axis=0)) if s.any()}
    shards = [(t, k) for t in tables for k in range(len(choices[t].sites))]
    here = [shard for shard in shards if _device(problem, choices, *shard) in slowest]
    there = [shard for shard in shards if _device(problem, choices, *shard) not in slowest]
    start = _key(totals)
    for table, shard in here:
        for other, other_shard in there:
            if other == table:
                continue
            if time.monotonic() >= deadline:
                return False
            before = choices[table], choices[other]
            swapped = _swapped(problem, choices, table, shard, other, other_shard)
            if swapped is None:
                continue
            _set(totals, choices, (table, other), swapped)
            if _is_less(_key(totals), start):
                return True
            _set(totals, choices, (table, other), before)
    return False


def _swapped(
    problem: Problem, choices: list[Choice], table: int, shard: int, other: int, other_shard: int
) -> tuple[Choice, Choice] | None:
    """Return the choices of two tables after two of their shards have changed places, or None.

    None: a shard may not go to the other's device, or its table has a shard there already.
    """
    device = _device(problem, choices, table, shard)
    elsewhere = _device(problem, choices, other, other_shard)
    first = _moved(problem, choices, table, shard, elsewhere)
    second = _moved(problem, choices, other, other_shard, device)
    return None if first is None or second is None else (first, second)


def _moved(
    problem: Problem, choices: list[Choice], table: int, shard: int, device: int
) -> Choice | None:
    """Return a table's choice with one shard on another device; None if that is impossible."""
    choice = choices[table]
    option = problem.options[table][choice.option]
    if (device,) not in option.sites:
        return None
    site = option.sites.index((device,))
    if site in choice.sites:
        return None
    sites = list(choice.sites)
    sites[shard] = site
    return Choice(choice.option, tuple(sites))


def _set(
    totals: Totals, choices: list[Choice], tables: tuple[int, int], new: tuple[Choice, Choice]
) -> None:
    for table, choice in zip(tables, new, strict=True):
        options, old = totals.problem.options[table], choices[table]
        totals.remove(options[old.option], old.sites)
        totals.add(options[choice.option], choice.sites)
        choices[table] = choice


def _device(problem: Problem, choices: list[Choice], table: int, shard: int) -> int:
    """Return the device of a table's shard, given by its number."""
    choice = choices[table]
    return problem.options[table][choice.option].sites[choice.sites[shard]][0]


def _key(totals: Totals) -> tuple[float, float, float]:
    """Return a key by which the best totals sort first: missing bytes, then seconds, then bytes."""
    return totals.excess, totals.seconds, totals.bytes


def _is_less(key: tuple[float, float, float], than: tuple[float, float, float]) -> bool:
    """Return whether ``key`` is less than ``than`` by more than rounding."""
    # Without the tolerance, rounding could make two solutions better than each other by turns, and
    # the search would never end.
    for a, b in zip(key, than, strict=True):
        if abs(a - b) > 1e-9 * max(abs(a), abs(b)):
            return a < b
    return False
