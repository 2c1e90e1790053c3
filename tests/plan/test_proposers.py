"""Proposals beside all combinations of options."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

import jaxrec
from jaxrec.plan import ParameterConstraints, Planner, Topology
from jaxrec.plan.proposers import (
    propose_by_dynamic_programming,
    propose_greedily,
    propose_grid,
    propose_smallest,
    propose_uniformly,
    rate_alone,
    rate_spread,
    total_bytes,
)
from tests.plan.models import problem_of


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


def test_uniform_proposals_have_one_type_and_the_fastest_comes_first():
    problem = problem_of([(1000, 64, 2), (100_000, 64, 2)], hosts=2, each=2)

    def seconds(proposal):
        return sum(
            rate_alone(problem, o[i]) for o, i in zip(problem.options, proposal, strict=True)
        )

    proposals = list(propose_uniformly(problem))
    assert seconds(proposals[0]) == min(map(seconds, proposals))
    kinds = [
        {
            (o[i].sharding_type, o[i].exchange)
            for o, i in zip(problem.options, proposal, strict=True)
        }
        for proposal in proposals
    ]
    assert all(len(kind) == 1 for kind in kinds)
    assert {next(iter(kind))[0] for kind in kinds} == {
        *("data_parallel", "table_wise", "row_wise", "column_wise"),
        *("table_row_wise", "table_column_wise", "grid"),
    }


def test_caches_grow_where_they_save_most():
    """Two tables for one device's memory: the one that is looked up more gets more of it."""
    tables = [jaxrec.EmbeddingBagConfig(name, 2_000_000, 64) for name in ("cold", "hot")]
    constraints = {
        "cold": ParameterConstraints(storages=["host"], pooling_factors=1),
        "hot": ParameterConstraints(storages=["host"], pooling_factors=20),
    }
    topology = dataclasses.replace(Topology.named("h100", devices=1), memory=900_000_000)
    plan = Planner(topology, constraints).plan(tables, batch_size=4096)
    cold, hot = plan.estimate.tables
    assert cold.storage == hot.storage == "host"
    assert hot.cache_ratio > cold.cache_ratio
    assert plan.estimate.phases["prefetch"] > 0
    assert sum(d.bytes["tables"] for d in plan.estimate.devices) < topology.memory
    caches = dict(plan.caches)
    assert caches["hot"].rows == round(2_000_000 * hot.cache_ratio)
