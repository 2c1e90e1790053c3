"""The search beside every solution there is, counted one by one."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time

import numpy as np
import pytest

import jaxrec
from jaxrec import optim
from jaxrec.plan import ParameterConstraints, PlanError, Planner, Topology, exact
from jaxrec.plan.exact import is_small, solve, solve_averaged
from jaxrec.plan.improve import improve
from jaxrec.plan.options import HELD
from jaxrec.plan.partitioners import balance_memory, place_fastest
from jaxrec.plan.problem import Loads, Solution
from jaxrec.plan.proposers import (
    PROPOSERS,
    propose_by_dynamic_programming,
    propose_greedily,
    propose_grid,
    propose_smallest,
    propose_uniformly,
    rate_spread,
    total_bytes,
)
from tests.plan.models import every_solution, problem_of

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


@pytest.fixture(scope="module", params=list(SMALL))
def counted(request):
    """A small problem and its best solution, of all."""
    problem = problem_of(**SMALL[request.param])
    best = None
    for solution in every_solution(problem):
        if solution.better_than(best):
            best = solution
    return problem, best


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


def test_improving_never_makes_worse_and_from_somewhere_ends_near_the_best(counted):
    problem, best = counted
    ends = []
    for proposal in itertools.islice(propose_uniformly(problem), 10):
        start = place_fastest(problem, proposal)
        found = improve(problem, start, deadline=time.monotonic() + 60)
        assert not start.better_than(found)
        ends.append(found)
    assert min(end.seconds for end in ends if end.fits) <= 1.1 * best.seconds


def test_a_grid_is_every_combination_or_none():
    problem = problem_of([(1000, 32, 2), (1000, 32, 2)], types=["table_wise", "row_wise"])
    assert len(set(propose_grid(problem))) == math.prod(len(o) for o in problem.options)
    large = problem_of([(1000, 64, 2)] * 12)
    assert list(propose_grid(large)) == []


def test_greedy_begins_with_the_fastest_and_goes_on_to_less_memory():
    problem = problem_of([(1_000_000, 64, 2), (100, 64, 2)])
    proposals = list(propose_greedily(problem))
    fastest = tuple(
        min(range(len(options)), key=lambda i: rate_spread(problem, options[i]))
        for options in problem.options
    )
    assert proposals[0] == fastest

    def memory(proposal):
        return sum(
            total_bytes(problem, o[i]) for o, i in zip(problem.options, proposal, strict=True)
        )

    totals = [memory(proposal) for proposal in proposals]
    assert totals == sorted(totals, reverse=True)
    assert memory(next(propose_smallest(problem))) <= totals[-1]


@pytest.mark.parametrize("seed", range(5))
def test_dynamic_programming_fills_memory_as_well_as_any(seed):
    """Beside all combinations: the least time of those that fit the same bins."""
    random = np.random.default_rng(seed)
    shapes = [
        (int(10 ** random.uniform(3, 6)), 64, float(10 ** random.uniform(0, 1.5))) for _ in range(4)
    ]
    rows = sum(rows for rows, _, _ in shapes)
    problem = problem_of(shapes, memory=0.7 * rows * 256)
    devices = problem.topology.num_devices
    unit = problem.capacity * devices / (100 * devices)

    def bins(option):
        return math.ceil(total_bytes(problem, option) / unit)

    def seconds(proposal):
        return sum(
            rate_spread(problem, o[i]) for o, i in zip(problem.options, proposal, strict=True)
        )

    fitting = [
        seconds(proposal)
        for proposal in itertools.product(*(range(len(o)) for o in problem.options))
        if sum(bins(o[i]) for o, i in zip(problem.options, proposal, strict=True)) <= 100 * devices
    ]
    first = next(propose_by_dynamic_programming(problem))
    assert seconds(first) == pytest.approx(min(fitting))


def test_uniform_proposals_have_one_type():
    problem = problem_of([(1000, 64, 2), (100_000, 64, 2)], hosts=2, each=2)
    kinds = [
        {
            (o[i].sharding_type, o[i].exchange)
            for o, i in zip(problem.options, proposal, strict=True)
        }
        for proposal in propose_uniformly(problem)
    ]
    assert all(len(kind) == 1 for kind in kinds)
    assert {next(iter(kind))[0] for kind in kinds} == {
        *("data_parallel", "table_wise", "row_wise", "column_wise"),
        *("table_row_wise", "table_column_wise", "grid"),
    }


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
        return Loads.of(problem, dict(enumerate(solution.choices))).bytes

    assert bytes(balanced) < bytes(fastest)
    assert balanced.seconds <= 1.02 * fastest.seconds


def test_loads_added_and_removed_are_as_before():
    problem = problem_of([(1000, 64, 2), (100_000, 64, 2)], storages=("device", "host"))
    solutions = list(itertools.islice(every_solution(problem), 0, None, 50))
    for solution in solutions:
        loads = Loads.of(problem, {0: solution.choices[0]})
        before = loads.seconds, loads.bytes, loads.excess
        option = problem.options[1][solution.choices[1].option]
        loads.add(option, solution.choices[1].sites)
        assert loads.seconds == pytest.approx(solution.seconds)
        loads.remove(option, solution.choices[1].sites)
        assert (loads.seconds, loads.bytes, loads.excess) == pytest.approx(before)


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "proposers alone"])
def test_the_planner_is_at_the_best(counted, is_exact):
    """The planner's own problem is another: its capacity is that of devices."""
    problem, _ = counted
    tables = [
        jaxrec.EmbeddingBagConfig(f"t{i}", 1000 * (i + 1), 32, optimizer=optim.sgd(0.1))
        for i in range(3)
    ]
    planner = Planner(problem.topology, is_exact=is_exact, gap=1e-4)
    plan = planner.plan(tables, batch_size=problem.topology.num_devices * 64)
    assert plan.estimate.seconds >= plan.estimate.bound
    if is_exact:
        assert plan.estimate.gap <= 1e-3
    else:
        assert plan.estimate.bound == 0
        assert "gap" not in str(plan)


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
    monkeypatch.setattr(exact, limit, 10)
    assert not is_small(problem)
    plan = Planner(problem.topology, gap=1e-12).plan(
        [jaxrec.EmbeddingBagConfig("a", 1000, 64)], batch_size=64
    )
    assert "whole program" not in plan.estimate.search


def test_caches_grow_where_they_save_most():
    """Two tables for one device's memory: the one that is looked up more gets more of it."""
    tables = [jaxrec.EmbeddingBagConfig(name, 2_000_000, 64) for name in ("cold", "hot")]
    said = {
        "cold": ParameterConstraints(storages=["host"], pooling_factors=1),
        "hot": ParameterConstraints(storages=["host"], pooling_factors=20),
    }
    topology = dataclasses.replace(Topology.named("h100", devices=1), memory=900_000_000)
    plan = Planner(topology, said).plan(tables, batch_size=4096)
    cold, hot = plan.estimate.tables
    assert cold.storage == hot.storage == "host"
    assert hot.cache_ratio > cold.cache_ratio
    assert plan.estimate.phases["prefetch"] > 0
    assert sum(d.bytes["tables"] for d in plan.estimate.devices) < topology.memory
    with pytest.raises(
        ValueError, match=r"planned in storage 'host', which jaxrec\.shard does not"
    ):
        plan.to_dict()


def test_disk_is_slower_than_host_memory():
    tables = [jaxrec.EmbeddingBagConfig("a", 2_000_000, 64)]
    topology = Topology.named("h100", devices=1)
    seconds = {}
    for storage in ("device", "host", "disk"):
        said = {"a": ParameterConstraints(storages=[storage], cache_ratio=None)}
        plan = Planner(topology, said).plan(tables, batch_size=4096)
        seconds[storage] = plan.estimate.seconds
    assert seconds["device"] < seconds["host"] < seconds["disk"]


def test_held_rows_of_a_cache_are_its_part_of_the_rows():
    problem = problem_of([(1001, 64, 2)], types=["table_wise"], storages=("host",))
    for option in problem.options[0]:
        assert option.load[HELD, 0] == math.ceil(1001 * option.cache_ratio)
        assert option.stored_bytes[0] == 1001 * 64 * 4


def test_no_proposer_with_a_proposal_is_an_error():
    planner = Planner(Topology.named("h100", devices=2), proposers=[lambda problem: iter(())])
    with pytest.raises(ValueError, match="none of the proposers"):
        planner.plan([jaxrec.EmbeddingBagConfig("a", 100, 8)], batch_size=4)


def test_own_proposers_and_partitioners_are_used():
    called = []

    def propose(problem):
        called.append("propose")
        yield (0,) * len(problem.tables)

    def partition(problem, proposal):
        called.append("partition")
        return place_fastest(problem, proposal)

    planner = Planner(
        Topology.named("h100", devices=2),
        proposers=[propose],
        partitioners=[partition],
        is_exact=False,
    )
    plan = planner.plan([jaxrec.EmbeddingBagConfig("a", 100, 8)], batch_size=4)
    assert called == ["propose", "partition"]
    assert plan.estimate.search.startswith("1 proposals")


def test_a_plan_error_is_a_value_error():
    assert issubclass(PlanError, ValueError)
