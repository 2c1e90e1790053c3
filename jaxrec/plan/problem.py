"""Which option for which table, and where: the problem that the search solves.

A solution costs what every device does alike, and for each group of tables, each of the things that
are done to its rows by the slowest device (see `jaxrec.plan.cost`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrec.plan.cost import (
    PHASES,
    PLACE_BYTES,
    GroupCost,
    GroupKey,
    group_cost,
    overflow_rooms,
)
from jaxrec.plan.options import EXCHANGED, HELD, PLACED, POOLED, TIMED, Option
from jaxrec.plan.topology import Topology


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is done with one table.

    Attributes:
        option: Index of the option among the table's.
        sites: For each of its parts the index of its site.
    """

    option: int
    sites: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Tables with their options, and what devices have room for.

    Attributes:
        topology: The devices.
        tables: Names of the tables.
        options: For each table its options.
        decided: Options that every solution has, of tables whose placement is given.
        capacity: Bytes of each device for tables and what their lookups need.
        host_capacity: Bytes of each host for rows kept there.
        disk_capacity: Bytes of each host's disks for rows kept there.
    """

    topology: Topology
    tables: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    decided: tuple[Option, ...]
    capacity: float
    host_capacity: float
    disk_capacity: float

    @functools.cached_property
    def groups(self) -> dict[GroupKey, int]:
        """All groups that a solution may have, numbered."""
        every = (option for options in (*self.options, self.decided) for option in options)
        keys = dict.fromkeys(option.key for option in every)
        return {key: i for i, key in enumerate(keys)}

    @functools.cached_property
    def group_costs(self) -> tuple[GroupCost, ...]:
        return tuple(group_cost(key, self.topology) for key in self.groups)

    @functools.cached_property
    def row_seconds(self) -> np.ndarray:
        """Seconds for one of each that `Option.load` counts but rows held, ``[groups, 5]``."""
        return np.array([cost.rates.sum(axis=1) for cost in self.group_costs])

    @functools.cached_property
    def group_keys(self) -> tuple[GroupKey, ...]:
        return tuple(self.groups)

    @functools.cached_property
    def place_seconds(self) -> np.ndarray:
        """Seconds for each place of the exchange, forward and backward, ``[groups, 2]``.

        They are part of those for each row exchanged; empty places take them as well.
        """
        forward = np.array([phase.startswith("forward") for phase in PHASES])
        return np.array([[c.room[forward].sum(), c.room[~forward].sum()] for c in self.group_costs])

    @functools.cached_property
    def row_bytes(self) -> np.ndarray:
        """Bytes of each row held, ``[groups]``."""
        return np.array([cost.row_bytes for cost in self.group_costs], float)

    @functools.cached_property
    def owner_bytes(self) -> np.ndarray:
        """Bytes of each place for an id and for a bag at its owner, ``[groups, 2]``."""
        return np.array([[PLACE_BYTES, cost.bag_bytes] for cost in self.group_costs], float)

    @functools.cached_property
    def launch_seconds(self) -> np.ndarray:
        """Seconds that a group takes if there is anything in it, ``[groups]``."""
        return np.array([cost.launch.sum() for cost in self.group_costs])


@dataclasses.dataclass
class Loads:
    """What a solution, or a part of one, asks of devices. Changed in place by `add` and `remove`.

    Attributes:
        rows: ``[groups, 6, devices]``: what `Option.load` counts.
        at_least: ``[groups]``: rows through the exchange wherever they are.
        members: ``[groups]``: options in each.
        home: ``[phases]``: seconds on every device.
        kept: Bytes on every device.
        temporary: ``[groups]``: bytes on every device while the group is exchanged.
        stored: ``[2, devices]``: bytes in host memory and on disk, by the device they are of.
    """

    problem: Problem
    rows: np.ndarray
    at_least: np.ndarray
    members: np.ndarray
    home: np.ndarray
    kept: float
    temporary: np.ndarray
    stored: np.ndarray

    @classmethod
    def of(cls, problem: Problem, choices: Mapping[int, Choice]) -> Loads:
        """The loads of the tables with the given indices, and of those that are decided."""
        groups, devices = len(problem.groups), problem.topology.num_devices
        loads = cls(
            problem,
            rows=np.zeros((groups, HELD + 1, devices)),
            at_least=np.zeros(groups),
            members=np.zeros(groups, int),
            home=np.zeros(5),
            kept=0.0,
            temporary=np.zeros(groups),
            stored=np.zeros((2, devices)),
        )
        for option in problem.decided:
            loads.add(option, (0,))
        for table, choice in choices.items():
            loads.add(problem.options[table][choice.option], choice.sites)
        return loads

    def add(self, option: Option, sites: Sequence[int], sign: int = 1) -> None:
        """Adds an option with its parts on the given sites."""
        group = self.problem.groups[option.key]
        self.home += sign * option.home
        self.kept += sign * option.kept
        self.temporary[group] += sign * option.temporary
        self.at_least[group] += sign * option.at_least
        self.members[group] += sign
        for site in sites:
            self.add_part(option, site, sign)

    def remove(self, option: Option, sites: Sequence[int]) -> None:
        """The reverse of `add`."""
        self.add(option, sites, -1)

    def add_part(self, option: Option, site: int, sign: int = 1) -> None:
        """Adds one part's rows."""
        group, devices = self.problem.groups[option.key], np.array(option.sites[site])
        np.add.at(self.rows[group].T, devices, sign * option.load.T)
        if option.storage != "device":
            kind = 0 if option.storage == "host" else 1
            np.add.at(self.stored[kind], devices, sign * option.stored_bytes)

    @property
    def slowest(self) -> np.ndarray:
        """What the slowest device has of each but rows held, ``[groups, 5]``."""
        return self.rows[:, TIMED].max(axis=2)

    @property
    def empty(self) -> np.ndarray:
        """Places that the exchange has forward and backward without a row, ``[groups, 2]``."""
        needed = self.slowest[:, EXCHANGED]
        empty = np.maximum(self.at_least - needed, 0)[:, None].repeat(2, axis=1)
        devices = self.problem.topology.num_devices
        for group in np.flatnonzero((self.members > 0) & (needed > self.at_least)):
            key = self.problem.group_keys[group]
            empty[group] = overflow_rooms(key, needed[group], self.at_least[group], devices)
        return empty

    @property
    def group_seconds(self) -> np.ndarray:
        """What each group adds to a step beyond `home`."""
        problem = self.problem
        launch = problem.launch_seconds * (self.members > 0)
        rows = (problem.row_seconds * self.slowest).sum(axis=1)
        return launch + rows + (problem.place_seconds * self.empty).sum(axis=1)

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return float(self.home.sum() + self.group_seconds.sum())

    @property
    def bytes(self) -> float:
        """Bytes that each device needs."""
        held = self.problem.row_bytes @ self.rows[:, HELD].max(axis=1)
        return float(self.kept + self.at_owners + self.temporary.max(initial=0) + held)

    @property
    def at_owners(self) -> float:
        """Bytes of each device for ids and bags of other devices, from one pass to the other."""
        most = self.rows[:, [PLACED, POOLED]].max(axis=2)
        return float((self.problem.owner_bytes * most).sum())

    @property
    def excess(self) -> float:
        """Bytes by which the fullest device, host or disk has too little; 0 if all fits."""
        return max(0.0, *self.shortages.values())

    @property
    def shortages(self) -> dict[str, float]:
        """Bytes that are missing in each kind of memory; below 0 where some are free."""
        problem, hosts = self.problem, self.problem.topology.hosts
        host, disk = self.stored.reshape(2, hosts, -1).sum(axis=2).max(axis=1)
        return {
            "device": self.bytes - problem.capacity,
            "host": float(host) - problem.host_capacity,
            "disk": float(disk) - problem.disk_capacity,
        }


@dataclasses.dataclass(frozen=True)
class Solution:
    """A choice for every table.

    Attributes:
        choices: For each table of the problem its choice.
        seconds: The time of a step.
        excess: Bytes that are missing; 0 if everything fits.
    """

    choices: tuple[Choice, ...]
    seconds: float
    excess: float

    @classmethod
    def of(cls, problem: Problem, choices: Sequence[Choice]) -> Solution:
        loads = Loads.of(problem, dict(enumerate(choices)))
        return cls(tuple(choices), loads.seconds, loads.excess)

    @property
    def fits(self) -> bool:
        return self.excess == 0

    def better_than(self, other: Solution | None) -> bool:
        """Whether it fits better or, if both fit, is faster."""
        if other is None:
            return True
        return (self.excess, self.seconds) < (other.excess, other.seconds)
