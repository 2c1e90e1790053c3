"""The best plan and a bound on all plans, from the programs of `jaxrec.plan.program`.

`solve_averaged` leaves sites out: each device has the average load, which is no more than the
slowest device's. Its optimum bounds every plan. It takes seconds for thousands of tables, and
proposes options that `jaxrec.plan.partitioners` then places. `solve` solves the whole program, for
models that are small enough; its optimum is the best plan. Either gives a bound even if it is cut
short.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrec.plan.problem import Problem, Solution
from jaxrec.plan.program import Program

# Larger programs are not begun: their relaxations alone take too long.
MAX_VARIABLES, MAX_NONZEROS = 40_000, 400_000


@dataclasses.dataclass(frozen=True)
class Answer:
    """Result of a program: the index of each table's option, a solution, and a bound on all plans.

    ``proposal`` is None if no option was found. ``solution`` is None from the averaged program.
    ``bound`` is infinite if no plan fits.
    """

    proposal: tuple[int, ...] | None
    solution: Solution | None
    bound: float
    is_finished: bool


def solve_averaged(
    problem: Problem, incumbent: Solution | None = None, *, time_limit: float, gap: float
) -> Answer:
    """Find the best options for the average load of all devices, and so a bound on every plan.

    The search starts from the options of the plan ``incumbent`` if that plan fits.
    """
    program = Program(problem, with_sites=False)
    values, bound, is_finished = program.solve(time_limit, gap, incumbent)
    return Answer(program.proposal(values), None, bound, is_finished)


def solve(problem: Problem, incumbent: Solution | None, *, time_limit: float, gap: float) -> Answer:
    """Find the best plan, to within ``gap`` of the bound as a fraction."""
    program = Program(problem, with_sites=True)
    values, bound, is_finished = program.solve(time_limit, gap, incumbent)
    solution = program.solution(values)
    # A search that is cut short may return a plan that is worse than the one it began with.
    if incumbent is not None and (solution is None or not solution.better_than(incumbent)):
        solution = incumbent
    return Answer(program.proposal(values), solution, bound, is_finished)


def is_small(problem: Problem) -> bool:
    """Return whether the whole program is small enough for `solve`."""
    variables = nonzeros = 0
    # As `Program` would count them, without making it.
    is_counted = (problem.unit_seconds + problem.unit_bytes).any(axis=1)
    for options in problem.options:
        for option in options:
            sites = len(option.sites)
            variables += 1 + (sites if sites > 1 else 0)
            nonzeros += int(np.count_nonzero(option.load.stacked[is_counted])) * sites
    return variables <= MAX_VARIABLES and nonzeros <= MAX_NONZEROS
