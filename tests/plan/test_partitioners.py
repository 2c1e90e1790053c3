"""Partitioners and the local search."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from jaxrec.plan.partitioners import balance_memory, improve, place_fastest
from jaxrec.plan.problem import Solution, Totals
from jaxrec.plan.proposers import (
    PROPOSERS,
    propose_uniformly,
)
from tests.plan.models import problem_of


@pytest.mark.parametrize("partition", [place_fastest, balance_memory])
@pytest.mark.parametrize("propose", PROPOSERS, ids=lambda f: f.__name__)
def test_proposals_are_solutions_and_none_is_better_than_the_best(counted, propose, partition):
    problem, best = counted
    for proposal in itertools.islice(propose(problem), 30):
        solution = partition(problem, proposal)
        assert [choice.option for choice in solution.choices] == list(proposal)
        for options, choice in zip(problem.options, solution.choices, strict=True):
            option = options[choice.option]
            assert len(set(choice.sites)) == option.parts
            assert set(choice.sites) <= set(range(len(option.sites)))
        assert solution == Solution.of(problem, solution.choices)
        assert not solution.fits or solution.seconds >= best.seconds * (1 - 1e-9)


def test_balanced_memory_is_no_more_and_costs_at_most_two_percent():
    random = np.random.default_rng(0)
    shapes = [
        (int(10 ** random.uniform(3, 6)), 64, float(10 ** random.uniform(0, 1.5)))
        for _ in range(20)
    ]
    problem = problem_of(shapes, each=4, types=["table_wise"])
    fastest = place_fastest(problem, (0,) * 20)
    balanced = balance_memory(problem, (0,) * 20)

    def bytes(solution):
        return Totals.of(problem, solution.choices).bytes

    assert bytes(balanced) < bytes(fastest)
    assert balanced.seconds <= 1.02 * fastest.seconds


def test_parts_of_a_table_go_to_different_devices_even_if_one_is_busy():
    types = ["table_wise", "column_wise"]
    problem = problem_of([(1_000_000, 32, 50), (1000, 64, 1)], each=2, types=types)
    busy, cut = (
        next(i for i, option in enumerate(options) if option.sharding_type == kind)
        for options, kind in zip(problem.options, types, strict=True)
    )
    assert sorted(place_fastest(problem, (busy, cut)).choices[1].sites) == [0, 1]


def test_improving_never_makes_worse_and_from_somewhere_ends_near_the_best(counted):
    problem, best = counted
    ends = []
    for proposal in itertools.islice(propose_uniformly(problem), 10):
        start = place_fastest(problem, proposal)
        found = improve(problem, start, deadline=time.monotonic() + 60)
        assert not start.better_than(found)
        ends.append(found)
    assert min(end.seconds for end in ends if end.fits) <= 1.1 * best.seconds
