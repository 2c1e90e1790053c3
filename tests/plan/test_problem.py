"""Totals of solutions, added up and taken apart."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from jaxrec.plan.costs import make_costs
from jaxrec.plan.problem import Solution, Totals
from jaxrec.plan.quantities import LOADS, Load
from tests.plan.models import every_solution, problem_of


def test_loads_added_and_removed_are_as_before():
    problem = problem_of([(1000, 64, 2), (100_000, 64, 2)], storages=("device", "host"))
    solutions = list(itertools.islice(every_solution(problem), 0, None, 50))
    for solution in solutions:
        totals = Totals.of(problem, solution.choices[:1])
        before = totals.seconds, totals.bytes, totals.excess
        option = problem.options[1][solution.choices[1].option]
        totals.add(option, solution.choices[1].sites)
        assert totals.seconds == pytest.approx(solution.seconds)
        totals.remove(option, solution.choices[1].sites)
        assert (totals.seconds, totals.bytes, totals.excess) == pytest.approx(before)


SPEEDS = (1.5, 6.0, 3.0)


def seconds_of_devices(problem, solution):
    """The seconds of a solution, from the costs of each device's own rates."""
    slowest = problem.topology.slowest
    total, counts, rounds = 0.0, {}, {}
    for options, choice in zip(problem.options, solution.choices, strict=True):
        option = options[choice.option]
        total += option.home.total
        rounds[option.group] = rounds.get(option.group, 0) + option.round_capacity
        held = counts.setdefault(option.group, np.zeros((len(LOADS), len(SPEEDS))))
        for site in choice.sites:
            for index, device in enumerate(option.sites[site]):
                held[:, device] += option.load.stacked[:, index]
    for group, held in counts.items():
        costs, load = make_costs(group, slowest), Load(*held)
        total += costs.launch().total
        empty = costs.empty_positions(load.exchanged.max(), rounds[group])
        if load.exchanged.max() <= rounds[group]:
            empty = (rounds[group] - load.exchanged.max(),) * 2
        total += costs.position().scale(*empty).total
        for name in LOADS:
            times = []
            for device, speed in enumerate(SPEEDS):
                rates = {
                    rate: dataclasses.replace(
                        getattr(problem.topology, rate),
                        item=getattr(problem.topology, rate).item / speed,
                        byte=getattr(problem.topology, rate).byte / speed,
                    )
                    for rate in ("gather", "update", "sort", "copy")
                }
                # Positions in messages are moved by all devices together.
                alike = name in ("exchanged", "ids", "bags")
                topology = slowest if alike else dataclasses.replace(slowest, **rates)
                one = dataclasses.replace(Load.zeros(1), **{name: getattr(load, name)[[device]]})
                times.append(float(np.sum(make_costs(group, topology).perf(one).total)))
            total += max(times)
    return total


def test_devices_take_the_time_of_their_own_speed():
    shapes = [(1000, 64, 40.0), (50_000, 64, 20.0)]
    problem = problem_of(shapes, each=3, speeds=SPEEDS)
    solutions = list(itertools.islice(every_solution(problem), 0, None, 7))
    kinds = {problem.options[0][s.choices[0].option].shares for s in solutions}
    assert (1.0, 4.0, 2.0) in kinds
    for solution in solutions:
        expected = seconds_of_devices(problem, solution)
        assert solution.seconds == pytest.approx(expected, rel=1e-9)


def test_equal_speeds_are_other_rates():
    shapes, twice = (
        [(1000, 64, 40.0), (50_000, 32, 3.0)],
        problem_of([(10, 64, 1.0)], speeds=(2, 2)),
    )
    alike = problem_of(shapes, speeds=(2, 2))
    rates = {
        name: dataclasses.replace(rate, item=rate.item / 2, byte=rate.byte / 2)
        for name in ("gather", "update", "sort", "copy")
        for rate in (getattr(twice.topology, name),)
    }
    plain = dataclasses.replace(alike.topology, device_speed=(), **rates)
    assert alike.topology.slowest == plain
    for solution in itertools.islice(every_solution(alike), 0, None, 5):
        same = Solution.of(dataclasses.replace(alike, topology=plain), solution.choices)
        assert solution.seconds == pytest.approx(same.seconds, rel=1e-12)
