"""Local search: better plans by changes of one or two tables."""

from __future__ import annotations

import time

import numpy as np

from jaxrec.plan.partitioners import place_parts
from jaxrec.plan.problem import Choice, Problem, Solution, Totals


def improve(problem: Problem, solution: Solution, *, deadline: float) -> Solution:
    """Improve a solution: place tables anew one by one, and swap parts of the slowest devices.

    Args:
        problem: The tables.
        solution: The start.
        deadline: Time to stop, by `time.monotonic`.

    Returns:
        A solution that is no worse.
    """
    choices = list(solution.choices)
    totals = Totals.of(problem, dict(enumerate(choices)))
    random = np.random.default_rng(0)
    helped = True
    while helped and time.monotonic() < deadline:
        helped = False
        for table in random.permutation(len(choices)):
            if time.monotonic() >= deadline:
                break
            helped |= _place_anew(totals, choices, int(table))
        helped |= _swap_parts(totals, choices, deadline)
    improved = Solution.of(problem, choices)
    return improved if improved.better_than(solution) else solution


def _place_anew(totals: Totals, choices: list[Choice], table: int) -> bool:
    """Give one table its best option and sites; return whether they changed."""
    options, before = totals.problem.options[table], choices[table]
    best, best_key = before, _key(totals)
    totals.remove(options[before.option], before.sites)
    for index, option in enumerate(options):
        sites = place_parts(totals, option)
        key = _key(totals)
        totals.remove(option, sites)
        if _is_less(key, best_key):
            best, best_key = Choice(index, sites), key
    totals.add(options[best.option], best.sites)
    choices[table] = best
    return best is not before


def _swap_parts(totals: Totals, choices: list[Choice], deadline: float) -> bool:
    """Swap parts of each group's slowest devices with others, while that helps."""
    problem, helped = totals.problem, False
    members: dict[int, list[int]] = {}
    for table, choice in enumerate(choices):
        option = problem.options[table][choice.option]
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
    """Make the first swap that helps; return whether there was one."""
    problem = totals.problem
    by_count = problem.unit_seconds[:, group, None] * totals.stacked[:, group]
    # The devices that take longest for one count of the load, and for all.
    slowest = {int(s.argmax()) for s in (*by_count, by_count.sum(axis=0)) if s.any()}
    parts = [(t, k) for t in tables for k in range(len(choices[t].sites))]
    here = [part for part in parts if _device(problem, choices, *part) in slowest]
    there = [part for part in parts if _device(problem, choices, *part) not in slowest]
    start = _key(totals)
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
            _set(totals, choices, (table, other), swapped)
            if _is_less(_key(totals), start):
                return True
            _set(totals, choices, (table, other), before)
    return False


def _swapped(
    problem: Problem, choices: list[Choice], table: int, part: int, other: int, other_part: int
) -> tuple[Choice, Choice] | None:
    """Return the choices with the sites of two parts exchanged; None if that is impossible."""
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
    """Return a choice with one part on another device; None if that is impossible."""
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
    totals: Totals, choices: list[Choice], tables: tuple[int, int], new: tuple[Choice, Choice]
) -> None:
    for table, choice in zip(tables, new, strict=True):
        options, old = totals.problem.options[table], choices[table]
        totals.remove(options[old.option], old.sites)
        totals.add(options[choice.option], choice.sites)
        choices[table] = choice


def _device(problem: Problem, choices: list[Choice], table: int, part: int) -> int:
    """Return the first device of a part's site."""
    choice = choices[table]
    return problem.options[table][choice.option].sites[choice.sites[part]][0]


def _key(totals: Totals) -> tuple[float, float, float]:
    """Return a key that sorts by missing bytes, then by seconds, then by bytes."""
    return totals.excess, totals.seconds, totals.bytes


def _is_less(key: tuple[float, float, float], than: tuple[float, float, float]) -> bool:
    """Return whether a key is less by more than rounding."""
    for a, b in zip(key, than, strict=True):
        if abs(a - b) > 1e-9 * max(abs(a), abs(b)):
            return a < b
    return False
