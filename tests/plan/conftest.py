"""Problems and plans that several tests share."""

from __future__ import annotations

import pytest

from jaxrec.plan import (
    Planner,
    Topology,
)
from tests.plan.models import CONSTRAINTS, MODEL, TABLES, every_solution, problem_of

SMALL = {
    "two devices": {"shapes": [(1000, 64, 3), (50_000, 32, 1), (7, 64, 9)], "each": 2},
    "four devices": {"shapes": [(1000, 32, 20), (2_000_000, 32, 1)], "each": 4},
    "two hosts": {"shapes": [(1000, 32, 20), (900_000, 32, 4)], "hosts": 2, "each": 2},
    "memory": {
        "shapes": [(200_000, 64, 3), (200_000, 64, 3), (100_000, 64, 8)],
        "each": 2,
        "memory": 72_000_000,
        "types": ["table_wise", "column_wise"],
    },
    "more columns": {"shapes": [(90_000, 64, 10), (90_000, 32, 10)], "each": 2},
}


@pytest.fixture(scope="session", params=list(SMALL))
def counted(request):
    """A small problem and its best solution, of all."""
    problem = problem_of(**SMALL[request.param])
    best = None
    for solution in every_solution(problem):
        if solution.better_than(best):
            best = solution
    return problem, best


@pytest.fixture(scope="session")
def planner():
    return Planner(Topology.named("h100", devices=16), CONSTRAINTS)


@pytest.fixture(scope="session")
def plan(planner):
    return planner.plan(TABLES, batch_size=16 * 1024)


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(MODEL)
    return path
