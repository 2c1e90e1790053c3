"""Both programs beside all solutions."""

from __future__ import annotations

import ctypes
import dataclasses
import math

import numpy as np
import pytest

import jaxrec
from jaxrec.plan import Planner, program, solver
from jaxrec.plan.partitioners import place_fastest
from jaxrec.plan.problem import Solution, Totals
from jaxrec.plan.proposers import (
    propose_uniformly,
)
from jaxrec.plan.solver import is_small, solve, solve_averaged
from tests.plan.models import every_solution, problem_of

# What one device or host has of a table is more than a round's share of it.
OVERFLOWING = {
    "rows of whole tables": {"each": 4, "types": ["table_wise"], "exchanges": ["rows"]},
    "rows in columns": {"each": 4, "types": ["column_wise", "row_wise"], "exchanges": ["rows"]},
    "rows by host": {"hosts": 2, "each": 2, "types": ["table_row_wise"], "exchanges": ["rows"]},
    "sums by host": {"hosts": 3, "each": 2, "types": ["table_row_wise"], "exchanges": ["pooled"]},
    "rows and sums": {"hosts": 2, "each": 2, "types": ["table_row_wise", "grid"]},
    "all": {"hosts": 2, "each": 2, "types": None},
}
TABLES = {"rows in columns": 2, "rows and sums": 2, "all": 2, "sums by host": 5}


def overflowing_problem(kind, seed, *, decided=0):
    """Tables as random as their number allows all their solutions to be counted."""
    random = np.random.default_rng(seed)
    shapes = [
        (int(10 ** random.uniform(2, 5)), 32, float(np.round(10 ** random.uniform(0, 1.5), 1)))
        for _ in range(TABLES.get(kind, 4) + decided)
    ]
    return problem_of(shapes, decided=range(decided), **OVERFLOWING[kind])


def overflows(problem, solution):
    """Whether some group has more rows on a device than there are places in a round."""
    totals = Totals.of(problem, solution.choices)
    has_rounds = totals.round_capacity > 0
    return bool((totals.slowest.exchanged > totals.round_capacity)[has_rounds].any())


def best_of_all(problem):
    return min(
        (solution for solution in every_solution(problem) if solution.fits),
        key=lambda solution: solution.seconds,
    )


@pytest.mark.parametrize("decided", [0, 1], ids=["free", "one decided"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", list(OVERFLOWING))
def test_the_whole_program_counts_overflow_as_it_is(kind, seed, decided):
    problem = overflowing_problem(kind, seed, decided=decided)
    best = best_of_all(problem)
    answer = solve(problem, None, time_limit=60, gap=1e-7)
    assert answer.is_finished
    assert answer.solution.seconds == pytest.approx(best.seconds, rel=1e-5)
    assert answer.bound <= best.seconds * (1 + 1e-9)
    assert answer.bound == pytest.approx(best.seconds, rel=1e-5)
    averaged = solve_averaged(problem, time_limit=60, gap=1e-7)
    assert averaged.is_finished
    assert averaged.bound <= best.seconds * (1 + 1e-9)


UNLIKE = {
    "pooled": {"each": 3, "speeds": (1, 3, 2), "exchanges": ["pooled"]},
    "rows": {"each": 3, "speeds": (1, 4, 1), "exchanges": ["rows"]},
    "two hosts": {"hosts": 2, "each": 2, "speeds": (1, 0.25)},
    "whole tables": {"each": 3, "speeds": (0.5, 1, 2), "types": ["table_wise"], "count": 4},
    "parts by speed": {"each": 4, "speeds": (1, 2, 3, 4), "types": ["row_wise"], "count": 3},
}


@pytest.mark.parametrize("decided", [0, 1], ids=["free", "one decided"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", list(UNLIKE))
def test_devices_of_different_speed(kind, seed, decided):
    """Both programs and a partitioner beside all solutions; of long bags, so that gathers count."""
    arguments = {"count": 2} | UNLIKE[kind]
    random = np.random.default_rng(seed)
    shapes = [
        (int(10 ** random.uniform(3, 5)), 64, float(np.round(10 ** random.uniform(1, 2.5), 1)))
        for _ in range(arguments.pop("count") + decided)
    ]
    problem = problem_of(shapes, decided=range(decided), **arguments)
    best = best_of_all(problem)
    answer = solve(problem, None, time_limit=60, gap=1e-7)
    assert answer.is_finished
    assert answer.solution.seconds == pytest.approx(best.seconds, rel=1e-5)
    assert answer.bound <= best.seconds * (1 + 1e-9)
    assert answer.bound == pytest.approx(best.seconds, rel=1e-5)
    averaged = solve_averaged(problem, time_limit=60, gap=1e-7)
    assert 0.5 * best.seconds < averaged.bound <= best.seconds * (1 + 1e-9)
    placed = place_fastest(problem, [choice.option for choice in best.choices])
    assert best.seconds * (1 - 1e-9) <= placed.seconds < 1.3 * best.seconds


# Sums within hosts are taken to need one round.
@pytest.mark.parametrize(
    "kind", [kind for kind in OVERFLOWING if kind not in ("all", "sums by host")]
)
def test_among_these_problems_are_solutions_that_overflow(kind):
    problem = overflowing_problem(kind, 0)
    assert any(overflows(problem, solution) for solution in every_solution(problem))


def test_a_best_solution_that_overflows_is_found_and_proven():
    """One table on one of two hosts: there is no other way."""
    problem = problem_of(
        [(10_000, 32, 4)], hosts=2, each=2, types=["table_row_wise"], exchanges=["rows"]
    )
    best = best_of_all(problem)
    assert overflows(problem, best)
    for answer in (
        solve(problem, None, time_limit=10, gap=1e-7),
        solve_averaged(problem, time_limit=10, gap=1e-7),
    ):
        assert answer.bound == pytest.approx(best.seconds, rel=1e-6)


def test_memory_that_forces_an_overflow():
    """Tables that fit only whole and apart from one another; each then overflows its round."""
    shapes = [(40_000, 32, 3.0), (30_000, 32, 9.0), (20_000, 32, 1.0)]
    kind = {"each": 3, "types": ["table_wise"], "exchanges": ["rows"]}
    roomy = problem_of(shapes, **kind)
    least = min(Totals.of(roomy, solution.choices).bytes for solution in every_solution(roomy))
    problem = dataclasses.replace(roomy, capacity=1.001 * least)
    best = best_of_all(problem)
    answer = solve(problem, None, time_limit=10, gap=1e-7)
    assert answer.solution.fits
    assert answer.solution.seconds == pytest.approx(best.seconds, rel=1e-6)
    assert answer.bound == pytest.approx(best.seconds, rel=1e-5)


@pytest.mark.parametrize("kind", ["rows of whole tables", "all"])
def test_the_search_starts_from_a_plan_and_is_never_worse(kind):
    problem = overflowing_problem(kind, 1)
    best = best_of_all(problem)
    worst = max(every_solution(problem), key=lambda solution: solution.seconds)
    for start in (best, worst):
        answer = solve(problem, start, time_limit=60, gap=1e-6)
        assert answer.solution.seconds <= start.seconds
        assert answer.solution.seconds == pytest.approx(best.seconds, rel=1e-5)
    # Without the time to look at anything there is still the plan itself, and a bound that holds.
    answer = solve(problem, worst, time_limit=1e-9, gap=1e-6)
    assert answer.solution.seconds <= worst.seconds
    assert answer.bound <= best.seconds * (1 + 1e-9)


def test_a_start_that_does_not_fit_is_not_kept():
    problem = problem_of([(10_000, 32, 2.0)] * 2, types=["table_wise"])
    together = next(s for s in every_solution(problem) if len({c.sites for c in s.choices}) == 1)
    needed = Totals.of(problem, together.choices).bytes
    problem = dataclasses.replace(problem, capacity=needed - 1)
    together = Solution.of(problem, together.choices)
    assert not together.fits
    answer = solve(problem, together, time_limit=10, gap=1e-6)
    assert answer.solution.fits


def test_the_solver_prints_nothing(capfd):
    solve(problem_of([(10_000, 32, 2.0)] * 2), None, time_limit=10, gap=1e-6)
    ctypes.CDLL(None).fflush(None)  # the solver prints by C's buffers
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_search_that_is_cut_short_has_a_bound():
    random = np.random.default_rng(0)
    shapes = [
        (int(10 ** random.uniform(4, 7)), 128, float(10 ** random.uniform(0, 2))) for _ in range(24)
    ]
    # A bound is there in the first second, and the search does not end within minutes.
    problem = problem_of(shapes, each=16, memory=10**11)
    found = [place_fastest(problem, proposal) for proposal in propose_uniformly(problem)]
    best = min((s for s in found if s.fits), key=lambda solution: solution.seconds)
    answer = solve(problem, best, time_limit=5, gap=1e-9)
    assert not answer.is_finished
    assert answer.solution.seconds <= best.seconds
    assert 0.5 * answer.solution.seconds < answer.bound <= answer.solution.seconds


@pytest.fixture(scope="module")
def many_tables():
    random = np.random.default_rng(0)
    shapes = [
        (int(10 ** random.uniform(1, 6)), int(2 ** random.integers(5, 8)), random.integers(1, 50))
        for _ in range(100)
    ]
    return problem_of(shapes, hosts=2, each=8, memory=10**11)


def test_the_averaged_program_starts_from_a_plan(many_tables):
    best = solve_averaged(many_tables, time_limit=10, gap=0.01).proposal
    start = place_fastest(many_tables, best)
    # Too short for the first relaxation: the search finds nothing better than what it starts from.
    assert solve_averaged(many_tables, start, time_limit=0, gap=0.01).proposal == best


def test_a_bound_of_many_tables_takes_little_time(many_tables):
    answer = solve_averaged(many_tables, time_limit=10, gap=0.01)
    placed = place_fastest(many_tables, answer.proposal)
    assert placed.fits
    assert 0.9 * placed.seconds < answer.bound <= placed.seconds


def test_the_whole_program_finds_the_best_solution(counted):
    problem, best = counted
    answer = solve(problem, None, time_limit=60, gap=1e-6)
    assert answer.is_finished
    assert answer.solution.fits
    assert answer.solution == Solution.of(problem, answer.solution.choices)
    assert answer.solution.seconds == pytest.approx(best.seconds, rel=1e-5)
    assert answer.bound <= best.seconds * (1 + 1e-9)
    assert answer.bound == pytest.approx(best.seconds, rel=1e-4)


def test_the_averaged_program_is_a_bound(counted):
    problem, best = counted
    answer = solve_averaged(problem, time_limit=60, gap=1e-6)
    assert answer.is_finished
    assert answer.bound <= best.seconds * (1 + 1e-9)


def test_a_large_averaged_program_has_the_same_bound(monkeypatch, capfd):
    problem = overflowing_problem("all", 0)
    small = solve_averaged(problem, time_limit=60, gap=1e-7)
    monkeypatch.setattr(program, "_MAX_SIMPLEX", 0)
    large = solve_averaged(problem, time_limit=60, gap=1e-7)
    assert large.is_finished
    assert large.bound == pytest.approx(small.bound, rel=1e-5)
    ctypes.CDLL(None).fflush(None)  # the solver prints by C's buffers
    assert capfd.readouterr() == ("", "")


def test_a_program_that_cannot_fit_is_proven_so():
    problem = problem_of([(1_000_000, 64, 2)], memory=1_000_000)
    assert solve_averaged(problem, time_limit=10, gap=0.01).bound == math.inf
    answer = solve(problem, None, time_limit=10, gap=0.01)
    assert answer.solution is None
    assert answer.bound == math.inf


@pytest.mark.parametrize("limit", ["MAX_VARIABLES", "MAX_NONZEROS"])
def test_large_programs_are_not_begun(monkeypatch, limit):
    problem = problem_of([(1000, 64, 2)] * 3)
    assert is_small(problem)
    monkeypatch.setattr(solver, limit, 10)
    assert not is_small(problem)
    plan = Planner(problem.topology, gap=1e-12).plan(
        [jaxrec.EmbeddingBagConfig("a", 1000, 64)], batch_size=64
    )
    assert "whole program" not in plan.estimate.search
