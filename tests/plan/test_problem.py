"""Totals of solutions, added up and taken apart."""

from __future__ import annotations

import itertools

import pytest

from jaxrec.plan.problem import Totals
from tests.plan.models import every_solution, problem_of


def test_loads_added_and_removed_are_as_before():
    problem = problem_of([(1000, 64, 2), (100_000, 64, 2)], storages=("device", "host"))
    solutions = list(itertools.islice(every_solution(problem), 0, None, 50))
    for solution in solutions:
        totals = Totals.of(problem, {0: solution.choices[0]})
        before = totals.seconds, totals.bytes, totals.excess
        option = problem.options[1][solution.choices[1].option]
        totals.add(option, solution.choices[1].sites)
        assert totals.seconds == pytest.approx(solution.seconds)
        totals.remove(option, solution.choices[1].sites)
        assert (totals.seconds, totals.bytes, totals.excess) == pytest.approx(before)
