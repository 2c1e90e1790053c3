"""The best plan, and how good a plan can be at all, from mixed-integer programs.

`solve_averaged` leaves out where parts go: a device's load is the average of all, which is no more
than the slowest's, and no less than any one part. Its optimum is a bound on every plan, is quickly
found for thousands of tables, and names options that `jaxrec.plan.partitioners` then places.
`solve` is the whole program, for models that are small enough; its optimum is the best plan. Both
are those of `jaxrec.plan.program`, and give a bound also when they are cut short.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrec.plan.problem import Problem, Solution
from jaxrec.plan.program import Program

# Larger programs than this are not begun: their relaxations alone take too long.
MAX_VARIABLES, MAX_NONZEROS = 40_000, 400_000


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a search found.

    Attributes:
        proposal: For each table the index of an option; None if nothing was found.
        solution: The same with sites, of a whole program.
        bound: No plan takes less than these seconds; infinite if no plan fits.
        is_finished: Whether the search ran to its end.
    """

    proposal: tuple[int, ...] | None
    solution: Solution | None
    bound: float
    is_finished: bool


def solve_averaged(problem: Problem, *, time_limit: float, gap: float) -> Answer:
    """The best options if loads were the average of all devices', and the bound that follows.

    Args:
        problem: The tables.
        time_limit: Seconds to take at most.
        gap: Part of the time of a step that the result may be above the bound.
    """
    program = Program(problem, with_sites=False)
    values, bound, is_finished = program.solve(time_limit, gap)
    return Answer(program.proposal(values), None, bound, is_finished)


def solve(problem: Problem, incumbent: Solution | None, *, time_limit: float, gap: float) -> Answer:
    """The best plan.

    Args:
        problem: The tables.
        incumbent: A plan that is to be improved; the search starts from it if it fits.
        time_limit: Seconds to take at most.
        gap: Part of the time of a step that the result may be above the bound.
    """
    program = Program(problem, with_sites=True)
    start = incumbent if incumbent is not None and incumbent.fits else None
    values, bound, is_finished = program.solve(time_limit, gap, start)
    solution = program.solution(values)
    if incumbent is not None and (solution is None or not solution.better_than(incumbent)):
        solution = incumbent
    return Answer(program.proposal(values), solution, bound, is_finished)


def is_small(problem: Problem) -> bool:
    """Whether `solve` can be begun."""
    variables = nonzeros = 0
    for options in problem.options:
        for option in options:
            sites = len(option.sites)
            variables += 1 + (sites if sites > 1 else 0)
            nonzeros += int(np.count_nonzero(option.load)) * sites
    return variables <= MAX_VARIABLES and nonzeros <= MAX_NONZEROS
