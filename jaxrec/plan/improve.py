"""Making a plan better, one or two tables at a time."""

from __future__ import annotations

import time

import numpy as np

from jaxrec.plan.options import TIMED
from jaxrec.plan.partitioners import place_parts
from jaxrec.plan.problem import Choice, Loads, Problem, Solution


def improve(problem: Problem, solution: Solution, *, deadline: float) -> Solution:
    """Places tables anew, one by one, and swaps parts of the slowest devices, while that helps.

    Args:
        problem: The tables.
        solution: Where to start.
        deadline: When to stop at the latest, by `time.monotonic`.

    Returns:
        A solution that is no worse.
    """
    choices = list(solution.choices)
    loads = Loads.of(problem, dict(enumerate(choices)))
    random = np.random.default_rng(0)
    helped = True
    while helped and time.monotonic() < deadline:
        helped = False
        for table in random.permutation(len(choices)):
            if time.monotonic() >= deadline:
                break
            helped |= _place_anew(loads, choices, int(table))
        helped |= _swap_parts(loads, choices, deadline)
    found = Solution.of(problem, choices)
    return found if found.better_than(solution) else solution


def _place_anew(loads: Loads, choices: list[Choice], table: int) -> bool:
    """Gives one table its best option and sites, all others left alone."""
    options, before = loads.problem.options[table], choices[table]
    best, best_key = before, _key(loads)
    loads.remove(options[before.option], before.sites)
    for index, option in enumerate(options):
        sites = place_parts(loads, option)
        key = _key(loads)
        loads.remove(option, sites)
        if _is_less(key, best_key):
            best, best_key = Choice(index, sites), key
    loads.add(options[best.option], best.sites)
    choices[table] = best
    return best is not before


def _swap_parts(loads: Loads, choices: list[Choice], deadline: float) -> bool:
    """Swaps a part on a slowest device of each group with one elsewhere, while that helps."""
    problem, helped = loads.problem, False
    members: dict[int, list[int]] = {}
    for table, choice in enumerate(choices):
        option = problem.options[table][choice.option]
        if len(option.sites) > 1 and option.load.shape[1] == 1:
            members.setdefault(problem.groups[option.key], []).append(table)
    for group, tables in members.items():
        again = True
        while again and time.monotonic() < deadline:
            again = _swap_once(loads, choices, group, tables, deadline)
            helped |= again
    return helped


def _swap_once(
    loads: Loads, choices: list[Choice], group: int, tables: list[int], deadline: float
) -> bool:
    problem = loads.problem
    by_quantity = problem.row_seconds[group][:, None] * loads.rows[group, TIMED]
    # The slowest in each thing that is done, and in all.
    slowest = {int(q.argmax()) for q in (*by_quantity, by_quantity.sum(axis=0)) if q.any()}
    parts = [(t, k) for t in tables for k in range(len(choices[t].sites))]
    here = [part for part in parts if _device(problem, choices, *part) in slowest]
    there = [part for part in parts if _device(problem, choices, *part) not in slowest]
    start = _key(loads)
    for table, part in here:
        for other, other_part in there:
            if other == table:
                continue
            if time.monotonic() >= deadline:
                return False
            before = choices[table], choices[other]
            swapped = _swapped(problem, choices, table, part, other, other_part)
            if swapped is None:
                continue
            _set(loads, choices, (table, other), swapped)
            if _is_less(_key(loads), start):
                return True
            _set(loads, choices, (table, other), before)
    return False


def _swapped(
    problem: Problem, choices: list[Choice], table: int, part: int, other: int, other_part: int
) -> tuple[Choice, Choice] | None:
    """The two choices with the sites of two parts exchanged; None where that cannot be."""
    device, elsewhere = (
        _device(problem, choices, table, part),
        _device(problem, choices, other, other_part),
    )
    first = _moved(problem, choices, table, part, elsewhere)
    second = _moved(problem, choices, other, other_part, device)
    return None if first is None or second is None else (first, second)


def _moved(
    problem: Problem, choices: list[Choice], table: int, part: int, device: int
) -> Choice | None:
    choice = choices[table]
    option = problem.options[table][choice.option]
    if (device,) not in option.sites:
        return None
    site = option.sites.index((device,))
    if site in choice.sites:
        return None
    sites = list(choice.sites)
    sites[part] = site
    return Choice(choice.option, tuple(sites))


def _set(
    loads: Loads, choices: list[Choice], tables: tuple[int, int], new: tuple[Choice, Choice]
) -> None:
    for table, choice in zip(tables, new, strict=True):
        options, old = loads.problem.options[table], choices[table]
        loads.remove(options[old.option], old.sites)
        loads.add(options[choice.option], choice.sites)
        choices[table] = choice


def _device(problem: Problem, choices: list[Choice], table: int, part: int) -> int:
    choice = choices[table]
    return problem.options[table][choice.option].sites[choice.sites[part]][0]


def _key(loads: Loads) -> tuple[float, float, float]:
    """What fits better comes first, then what is faster, then what needs less memory."""
    return loads.excess, loads.seconds, loads.bytes


def _is_less(key: tuple[float, float, float], than: tuple[float, float, float]) -> bool:
    """Whether it is less by more than rounding."""
    for a, b in zip(key, than, strict=True):
        if abs(a - b) > 1e-9 * max(abs(a), abs(b)):
            return a < b
    return False
