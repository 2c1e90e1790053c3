"""The problem that the search solves: an option and sites for each table.

A step takes the work that every device does alike and, for each group of tables and each count of
its `Load`, the time of the device that has most of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxrec.plan.costs import ExchangeCosts, Group, make_costs
from jaxrec.plan.options import ShardingOption
from jaxrec.plan.quantities import LOADS, Load
from jaxrec.plan.topology import Topology

# Counts that a faster device does in less time. All other work is in messages, which have one size
# on all devices and wait for the slowest.
_BY_SPEED = ("gathered", "updated")
# One of each count at a time, to ask the costs for its price.
_UNITS = Load(*np.eye(len(LOADS)))


@dataclasses.dataclass(frozen=True)
class Choice:
    """Choice for one table: the index of its option, and the index of each part's site."""

    option: int
    sites: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Tables with their options, and the memory of the devices.

    Attributes:
        topology: The devices.
        tables: Names of the tables.
        options: Options of each table.
        decided: Options of tables with a given placement; every solution has them.
        capacity: Bytes of each device for tables and their lookups.
        host_capacity: Bytes of each host's memory for row stores.
        store_capacity: Bytes of each host's disks for row stores.
    """

    topology: Topology
    tables: tuple[str, ...]
    options: tuple[tuple[ShardingOption, ...], ...]
    decided: tuple[ShardingOption, ...]
    capacity: float
    host_capacity: float
    store_capacity: float

    def chosen(self, choices: Sequence[Choice]) -> list[tuple[ShardingOption, tuple[int, ...]]]:
        """Return the option and the sites of each of the first tables, by their choices."""
        pairs = zip(self.options, choices, strict=False)
        return [(options[choice.option], choice.sites) for options, choice in pairs]

    @functools.cached_property
    def groups(self) -> dict[Group, int]:
        """Index of each group that a solution may have."""
        every = (option for options in (*self.options, self.decided) for option in options)
        groups = dict.fromkeys(option.group for option in every)
        return {group: i for i, group in enumerate(groups)}

    @functools.cached_property
    def costs(self) -> tuple[ExchangeCosts, ...]:
        """Costs of each group."""
        return tuple(make_costs(group, self.topology) for group in self.groups)

    @functools.cached_property
    def weights(self) -> np.ndarray:
        """Seconds of each device for one unit of each count of `Load`, ``[6, devices]``.

        They are relative to the seconds of the slowest device.
        """
        weights = np.ones((len(LOADS), self.topology.num_devices))
        weights[[LOADS.index(name) for name in _BY_SPEED]] /= self.topology.relative_speeds
        return weights

    @functools.cached_property
    def widths(self) -> np.ndarray:
        """Number of slowest devices that together are as fast as all devices, ``[6]``.

        There is one number for each count of `Load`.
        """
        return (1 / self.weights).sum(axis=1)

    @functools.cached_property
    def unit_seconds(self) -> np.ndarray:
        """Seconds of one unit of each count of `Load` on the slowest device, ``[6, groups]``."""
        seconds = np.stack([costs.perf(_UNITS).total for costs in self.costs], axis=1)
        if (self.weights == 1).all():
            # "exchanged" and "gathered" are equal but for the devices' speeds. Where devices are
            # alike, one count stands for both, and the program needs no variables for the other.
            exchanged, gathered = map(LOADS.index, ("exchanged", "gathered"))
            seconds[exchanged] += seconds[gathered]
            seconds[gathered] = 0
        return seconds

    @functools.cached_property
    def unit_bytes(self) -> np.ndarray:
        """Bytes of one unit of each count of `Load`, ``[6, groups]``."""
        return np.stack([costs.bytes(_UNITS) for costs in self.costs], axis=1)

    @functools.cached_property
    def position_seconds(self) -> np.ndarray:
        """Seconds for a position of the exchange, forward and backward, ``[2, groups]``.

        They are part of the seconds for each row exchanged; empty positions take them as well.
        """
        positions = [costs.position() for costs in self.costs]
        return np.array([[p.forward for p in positions], [p.backward for p in positions]])

    @functools.cached_property
    def launch_seconds(self) -> np.ndarray:
        """Seconds that a group takes if it has any table, ``[groups]``."""
        return np.array([costs.launch().total for costs in self.costs])


@dataclasses.dataclass
class Totals:
    """Sums over the tables of a solution, or of a part of one; changed by `add` and `remove`.

    Attributes:
        stacked: Load by group and device, ``[6, groups, devices]``, times `Problem.weights`.
        round_capacity: Positions in a round of the exchange, ``[groups]``.
        members: Number of options, ``[groups]``.
        home: Seconds on every device.
        kept: Bytes on every device.
        temporary: Bytes on every device while the group is exchanged, ``[groups]``.
        stored: Bytes of row stores on each host, for "host" and "store".
    """

    problem: Problem
    stacked: np.ndarray
    round_capacity: np.ndarray
    members: np.ndarray
    home: float
    kept: float
    temporary: np.ndarray
    stored: dict[str, float]

    @classmethod
    def of(cls, problem: Problem, choices: Sequence[Choice] = ()) -> Totals:
        """Return the totals of the decided tables, and of the first tables by their choices."""
        groups, devices = len(problem.groups), problem.topology.num_devices
        totals = cls(
            problem,
            stacked=np.zeros((len(LOADS), groups, devices)),
            round_capacity=np.zeros(groups),
            members=np.zeros(groups, int),
            home=0.0,
            kept=0.0,
            temporary=np.zeros(groups),
            stored={"host": 0.0, "store": 0.0},
        )
        for option in problem.decided:
            totals.add(option, (0,))
        for option, sites in problem.chosen(choices):
            totals.add(option, sites)
        return totals

    def add(self, option: ShardingOption, sites: Sequence[int], sign: int = 1) -> None:
        """Add an option with its parts on the given sites."""
        group = self.problem.groups[option.group]
        self.home += sign * float(option.home.total)
        self.kept += sign * option.kept
        self.temporary[group] += sign * option.temporary
        self.round_capacity[group] += sign * option.round_capacity
        self.members[group] += sign
        if option.cache is not None:
            self.stored[option.storage] += sign * option.stored_bytes
        for site in sites:
            self.add_shards(option, site, sign)

    def remove(self, option: ShardingOption, sites: Sequence[int]) -> None:
        """Undo `add`."""
        self.add(option, sites, -1)

    def add_shards(self, option: ShardingOption, site: int, sign: int = 1) -> None:
        """Add the load of the shards of one part, which go to the devices of a site."""
        group, devices = self.problem.groups[option.group], np.array(option.sites[site])
        load = sign * option.load.stacked * self.problem.weights[:, devices]
        np.add.at(self.stacked[:, group].T, devices, load.T)

    @property
    def slowest(self) -> Load:
        """Largest of each count over all devices, as a `Load` of ``[groups]``."""
        return Load(*self.stacked.max(axis=2))

    @property
    def empty_positions(self) -> np.ndarray:
        """Positions of the exchange without a row, forward and backward, ``[2, groups]``."""
        return self._empty(self.slowest)

    def _empty(self, slowest: Load) -> np.ndarray:
        demand, capacity = slowest.exchanged, self.round_capacity
        # A message has its static size whether rows fill it or not. Where the demand fits one
        # round, the rest of the round is empty; only the few groups that overflow ask their
        # exchange.
        empty = np.maximum(capacity - demand, 0)[None].repeat(2, axis=0)
        for group in np.flatnonzero((self.members > 0) & (demand > capacity)):
            costs = self.problem.costs[group]
            empty[:, group] = costs.empty_positions(demand[group], capacity[group])
        return empty

    @property
    def group_seconds(self) -> np.ndarray:
        """Seconds that each group adds to a step beyond `home`, ``[groups]``."""
        # The maximum is taken for each count apart, since a collective stands between most of them:
        # the device with most rows to gather and the one with most to update may differ, and all
        # wait for both.
        problem, most = self.problem, self.stacked.max(axis=2)
        launch = problem.launch_seconds * (self.members > 0)
        empty = (problem.position_seconds * self._empty(Load(*most))).sum(axis=0)
        return launch + (problem.unit_seconds * most).sum(axis=0) + empty

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return float(self.home + self.group_seconds.sum())

    @property
    def load_bytes(self) -> Load:
        """Bytes of each device for each count, all groups together, ``[1]``."""
        return Load(
            *(self.problem.unit_bytes * self.stacked.max(axis=2)).sum(axis=1, keepdims=True)
        )

    @property
    def bytes(self) -> float:
        """Bytes that each device needs."""
        # A group's arrays have equal parts, so every device pays for the fullest one's rows.
        loaded = (self.problem.unit_bytes * self.stacked.max(axis=2)).sum()
        return float(self.kept + self.temporary.max(initial=0) + loaded)

    @property
    def excess(self) -> float:
        """Bytes that the fullest device, host or disk lacks; 0 if everything fits."""
        return max(0.0, *self.shortages.values())

    @property
    def shortages(self) -> dict[str, float]:
        """Bytes that each kind of memory lacks; negative where some is free."""
        problem = self.problem
        return {
            "device": self.bytes - problem.capacity,
            "host": self.stored["host"] - problem.host_capacity,
            "store": self.stored["store"] - problem.store_capacity,
        }


@dataclasses.dataclass(frozen=True)
class Solution:
    """A choice for every table.

    Attributes:
        choices: Choice of each table of the problem.
        seconds: Seconds of a step.
        excess: Bytes that are missing; 0 if everything fits.
    """

    choices: tuple[Choice, ...]
    seconds: float
    excess: float

    @classmethod
    def of(cls, problem: Problem, choices: Sequence[Choice]) -> Solution:
        totals = Totals.of(problem, choices)
        return cls(tuple(choices), totals.seconds, totals.excess)

    @property
    def fits(self) -> bool:
        return self.excess == 0

    def better_than(self, other: Solution | None) -> bool:
        """Return whether this solution fits better than the other or, if both fit, is faster."""
        if other is None:
            return True
        return (self.excess, self.seconds) < (other.excess, other.seconds)
