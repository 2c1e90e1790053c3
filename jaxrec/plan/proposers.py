"""Proposers: candidates for the option of every table, for the partitioners to place.

A proposer is a function from a problem to proposals, each the index of an option for every table.
They are TorchRec's, for our options, and `propose_larger_caches`. The averaged program
(`jaxrec.plan.solver`) proposes as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from jaxrec.plan.options import ShardingOption
from jaxrec.plan.problem import Problem
from jaxrec.plan.quantities import Load

Proposal: TypeAlias = tuple[int, ...]
Proposer: TypeAlias = Callable[[Problem], Iterator[Proposal]]
"""Function from a problem to the proposals to try: the index of one option for each table."""

# Combinations that `propose_grid` tries, and bins of memory for dynamic programming: a bin is 1 %
# of a device, until the arrays of thousands of tables become large.
_MAX_GRID, _BINS_PER_DEVICE, _MAX_BINS = 1000, 100, 4000


def rate_alone(problem: Problem, option: ShardingOption) -> float:
    """Return the seconds of an option if its table were the only one."""
    return _rate(problem, option, option.load.stacked.max(axis=1))


def rate_spread(problem: Problem, option: ShardingOption) -> float:
    """Return the seconds of an option if other tables balanced it over all devices."""
    load = option.parts * option.load.stacked.sum(axis=1) / problem.widths
    return _rate(problem, option, load)


def _rate(problem: Problem, option: ShardingOption, load: np.ndarray) -> float:
    group = problem.groups[option.group]
    empty = max(0.0, option.round_capacity - float(Load(*load).exchanged))
    seconds = problem.unit_seconds[:, group] @ load
    return float(option.home.total + seconds + problem.position_seconds[:, group].sum() * empty)


def total_bytes(problem: Problem, option: ShardingOption) -> float:
    """Return the bytes of an option on all devices together: rows held and bytes kept."""
    held = float(option.load.held.sum()) * option.group.stored_row_bytes
    return option.parts * held + option.kept * problem.topology.num_devices


def propose_greedily(
    problem: Problem,
    rate: Callable[[Problem, ShardingOption], float] = rate_spread,
    most: int = 100,
) -> Iterator[Proposal]:
    """Propose each table's fastest option by ``rate``, then smaller ones: ``most`` proposals."""
    ordered = [_by_rate(problem, options, rate) for options in problem.options]
    sizes = [[total_bytes(problem, o) for o in options] for options in problem.options]
    at = [0] * len(ordered)
    for _ in range(most):
        proposal = tuple(order[i] for order, i in zip(ordered, at, strict=True))
        yield proposal
        # Each step gives the table that takes most memory its next fastest option that takes less.
        smaller = {}
        for table, order in enumerate(ordered):
            now = sizes[table][order[at[table]]]
            later = (i for i in range(at[table] + 1, len(order)) if sizes[table][order[i]] < now)
            if (index := next(later, None)) is not None:
                smaller[table] = (now, index)
        if not smaller:
            return
        table = max(smaller, key=lambda t: smaller[t][0])
        at[table] = smaller[table][1]


def propose_greedily_alone(problem: Problem) -> Iterator[Proposal]:
    return propose_greedily(problem, rate_alone)


def propose_uniformly(problem: Problem) -> Iterator[Proposal]:
    """Propose one sharding type and exchange for all tables that can have it.

    The type that is fastest by `rate_alone` comes first.
    """
    kinds = dict.fromkeys(
        (o.sharding_type, o.exchange) for options in problem.options for o in options
    )
    ordered = [_by_rate(problem, options, rate_spread) for options in problem.options]
    proposals: list[Proposal] = []
    for kind in kinds:
        indices = []
        for options, order in zip(problem.options, ordered, strict=True):
            same = (i for i in order if (options[i].sharding_type, options[i].exchange) == kind)
            # Tables that cannot have it get their fastest option.
            indices.append(next(same, order[0]))
        proposals.append(tuple(indices))

    def seconds(proposal: Proposal) -> float:
        chosen = zip(problem.options, proposal, strict=True)
        return sum(rate_alone(problem, options[i]) for options, i in chosen)

    # A search that is cut short has tried the first proposal of each proposer: on many hosts one
    # type for all tables is hard to beat, and must not be the one that was not tried.
    yield from sorted(proposals, key=seconds)


def propose_grid(problem: Problem) -> Iterator[Proposal]:
    """Propose every combination of options, if there are at most a thousand."""
    if math.prod(len(options) for options in problem.options) <= _MAX_GRID:
        yield from itertools.product(*(range(len(options)) for options in problem.options))


def propose_by_dynamic_programming(problem: Problem) -> Iterator[Proposal]:
    """Propose the fastest options that together fit in an amount of memory, for several amounts.

    The knapsack problem by dynamic programming over memory in bins (as in Bellman 1957, "Dynamic
    programming", chapter I): ``best[t][b]`` is the least time of the first ``t`` tables in ``b``
    bins. Time is `rate_spread`, memory that of all devices together.
    """
    devices = problem.topology.num_devices
    bins = min(_BINS_PER_DEVICE * devices, _MAX_BINS)
    unit = max(problem.capacity, 1.0) * devices / bins
    best = np.zeros(bins + 1)
    choices: list[np.ndarray] = []
    for options in problem.options:
        after, which = np.full(bins + 1, np.inf), np.full(bins + 1, -1, np.int32)
        for index, option in enumerate(options):
            size = math.ceil(total_bytes(problem, option) / unit)
            if size > bins:
                continue
            seconds = np.full(bins + 1, np.inf)
            seconds[size:] = best[: bins + 1 - size] + rate_spread(problem, option)
            faster = seconds < after
            after[faster], which[faster] = seconds[faster], index
        best = after
        choices.append(which)
    # Memory of all devices together can be filled better than devices one by one, and padding is
    # not counted. So proposals for less memory come too, and the partitioners find which fit.
    for amount in np.unique(np.linspace(bins // 10, bins, 10).astype(int))[::-1]:
        if not np.isfinite(best[amount]):
            continue
        proposal, left = [], int(amount)
        for table in reversed(range(len(choices))):
            index = int(choices[table][left])
            proposal.append(index)
            left -= math.ceil(total_bytes(problem, problem.options[table][index]) / unit)
        yield tuple(reversed(proposal))


def propose_larger_caches(problem: Problem) -> Iterator[Proposal]:
    """Propose the smallest caches, then larger ones where a byte saves most time."""
    # Without caches the other proposers cover everything.
    if not any(o.cache is not None for options in problem.options for o in options):
        return
    budget = problem.capacity * problem.topology.num_devices
    proposal = []
    for options in problem.options:
        least = min(total_bytes(problem, o) for o in options)
        smallest = [i for i, o in enumerate(options) if total_bytes(problem, o) <= 1.01 * least]
        proposal.append(min(smallest, key=lambda i: rate_spread(problem, options[i])))
    used = sum(
        total_bytes(problem, options[i])
        for options, i in zip(problem.options, proposal, strict=True)
    )
    steps = 0
    while True:
        # Placing a proposal costs more than a step here, so one in as many steps as tables is
        # proposed.
        if steps % max(1, len(proposal)) == 0:
            yield tuple(proposal)
        best = None
        for table, options in enumerate(problem.options):
            now = options[proposal[table]]
            for index, option in enumerate(options):
                more = total_bytes(problem, option) - total_bytes(problem, now)
                saved = rate_spread(problem, now) - rate_spread(problem, option)
                if saved <= 0 or used + more > budget:
                    continue
                worth = saved / more if more > 0 else math.inf
                if best is None or worth > best[0]:
                    best = (worth, table, index, more)
        if best is None:
            break
        _, table, index, more = best
        proposal[table] = index
        used += more
        steps += 1
    yield tuple(proposal)


def propose_smallest(problem: Problem) -> Iterator[Proposal]:
    """Propose the option of each table that takes least memory, the fastest of several."""
    proposal = []
    for options in problem.options:
        order = _by_rate(problem, options, rate_spread)
        proposal.append(min(order, key=lambda i: total_bytes(problem, options[i])))
    yield tuple(proposal)


# The smallest come first, so that a search that runs out of time has a plan that fits.
PROPOSERS: tuple[Proposer, ...] = (
    propose_smallest,
    propose_greedily,
    propose_greedily_alone,
    propose_uniformly,
    propose_grid,
    propose_by_dynamic_programming,
    propose_larger_caches,
)


def _by_rate(
    problem: Problem,
    options: Sequence[ShardingOption],
    rate: Callable[[Problem, ShardingOption], float],
) -> list[int]:
    """Return the indices of options, the fastest first."""
    return sorted(range(len(options)), key=lambda i: rate(problem, options[i]))
