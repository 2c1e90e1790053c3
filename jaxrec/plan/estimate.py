"""What a plan is expected to take, device by device and table by table."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrec.plan.cost import PHASES, GroupCost
from jaxrec.plan.options import EXCHANGED, HELD, PLACED, POOLED, TIMED, Option
from jaxrec.plan.problem import Loads, Problem, Solution
from jaxrec.plan.workload import TableWork

MEMORY_KINDS = ("tables", "padding", "embeddings", "exchange", "batches", "dense", "reserve")


@dataclasses.dataclass(frozen=True)
class DeviceEstimate:
    """What one device is expected to hold and to do.

    Attributes:
        device: Its number.
        bytes: Bytes by kind: "tables" and their optimizer state; "padding", rows of its arrays that
            are there because another device needs them; "embeddings" looked up and their
            gradients; "exchange" buffers; "batches" under way; "dense" parameters, their gradients
            and optimizer state; "reserve".
        seconds: Seconds of its own work by phase; see `jaxrec.plan.cost.PHASES`.
        waits: Seconds that it waits for slower devices.
        shards: How many parts of tables it has, by sharding type.
        stored_bytes: Bytes of rows that it keeps in host memory and on disk.
    """

    device: int
    bytes: dict[str, float]
    seconds: dict[str, float]
    waits: float
    shards: dict[str, int]
    stored_bytes: dict[str, float]


@dataclasses.dataclass(frozen=True)
class TableEstimate:
    """What one table is expected to take.

    Attributes:
        name: Its name.
        rows: Its rows.
        dim: Its columns.
        dtype: Its type.
        sharding_type: How it is placed.
        exchange: How its rows travel: "copies", "rows" or "sums".
        storage: "device", "host" or "disk".
        cache_ratio: Part of the rows that devices hold.
        devices: The devices that hold parts of it.
        seconds: Its part of a step's time, by phase: of what its group's slowest device takes, as
            much as it adds there.
        bytes: Bytes of rows and state on all devices together.
        device_bytes: For each of `devices` the bytes there.
        device_seconds: For each of `devices` the seconds of its own work for the table.
        lookups: Ids that a device looks up in a step.
        distinct: Distinct rows among them.
    """

    name: str
    rows: int
    dim: int
    dtype: str
    sharding_type: str
    exchange: str
    storage: str
    cache_ratio: float
    devices: tuple[int, ...]
    seconds: dict[str, float]
    bytes: float
    device_bytes: tuple[float, ...]
    device_seconds: tuple[float, ...]
    lookups: float
    distinct: float


@dataclasses.dataclass(frozen=True)
class GroupEstimate:
    """What a group of tables that travel together is expected to take.

    Attributes:
        name: Type and width of its tables and how they travel.
        tables: Number of its tables.
        seconds: Seconds on its slowest device, beyond what all devices do alike.
        slowest: That device; None where all take the same.
    """

    name: str
    tables: int
    seconds: float
    slowest: int | None


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a plan is expected to take.

    Attributes:
        seconds: Time of a step's work on tables: for each group that of its slowest device.
        phases: The same by phase: the critical path.
        bound: No plan takes less.
        search: What the search did, in words.
        search_seconds: How long it took.
        devices: Each device.
        tables: Each table.
        groups: Each group of tables that travel together.
        capacity: Bytes of a device.
    """

    seconds: float
    phases: dict[str, float]
    bound: float
    search: str
    search_seconds: float
    devices: tuple[DeviceEstimate, ...]
    tables: tuple[TableEstimate, ...]
    groups: tuple[GroupEstimate, ...]
    capacity: float

    @property
    def gap(self) -> float:
        """How far the plan may be above the best possible one, as a part of the bound."""
        return self.seconds / self.bound - 1 if self.bound > 0 else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """The estimate as JSON has it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Estimate:
        """The reverse of `to_dict`."""

        def each(kind: type, items: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
            lists = ("devices", "device_bytes", "device_seconds")
            return tuple(
                kind(**{k: tuple(v) if k in lists else v for k, v in item.items()})
                for item in items
            )

        kinds = {"devices": DeviceEstimate, "tables": TableEstimate, "groups": GroupEstimate}
        return cls(**{**fields, **{name: each(kind, fields[name]) for name, kind in kinds.items()}})


def imbalance(loads: Sequence[float]) -> dict[str, float]:
    """How uneven loads are: with ``p`` their shares of the sum and ``k`` their number,

    "max over mean", the "total variation" ``sum |p - 1/k| / 2`` and the "KL divergence"
    ``sum p log(p k)`` from even shares; 1, 0 and 0 where all are equal.

    Example:
        >>> imbalance([1.0, 3.0])["max over mean"]
        1.5
    """
    loads_ = np.asarray(loads, float)
    if not loads_.sum():
        return {"max over mean": 1.0, "total variation": 0.0, "KL divergence": 0.0}
    shares = loads_ / loads_.sum()
    some = shares[shares > 0]
    return {
        "max over mean": float(shares.max() * shares.size),
        "total variation": float(np.abs(shares - 1 / shares.size).sum() / 2),
        "KL divergence": max(0.0, float((some * np.log(some * shares.size)).sum())),
    }


def estimate(
    problem: Problem,
    works: Mapping[str, TableWork],
    solution: Solution,
    *,
    bound: float,
    search: str,
    search_seconds: float,
    fixed_bytes: Mapping[str, float],
) -> Estimate:
    """What a solution is expected to take.

    Args:
        problem: The tables and devices.
        works: What a step asks of each table.
        solution: The choices.
        bound: Seconds that no plan falls below.
        search: What the search did.
        search_seconds: How long it took.
        fixed_bytes: Bytes of each device that do not depend on the plan, by kind.
    """
    loads = Loads.of(problem, dict(enumerate(solution.choices)))
    chosen = _chosen(problem, solution)
    devices = _devices(problem, loads, chosen, fixed_bytes)
    slowest, empty = loads.slowest, loads.empty
    phases = loads.home.copy()
    for group, cost in enumerate(problem.group_costs):
        if loads.members[group]:
            phases += cost.launch
        phases += slowest[group] @ cost.rates + _empty(cost, empty[group])
    return Estimate(
        seconds=loads.seconds,
        phases=_named(phases),
        bound=bound,
        search=search,
        search_seconds=search_seconds,
        devices=devices,
        tables=tuple(_table(problem, loads, works[name], chosen[name]) for name in works),
        groups=_groups(problem, loads, chosen),
        capacity=problem.topology.memory,
    )


Placed = list[tuple[Option, tuple[int, ...]]]


def _chosen(problem: Problem, solution: Solution) -> dict[str, Placed]:
    """For each table its options and their sites; several where columns are cut unevenly."""
    chosen: dict[str, Placed] = {}
    for option in problem.decided:
        chosen.setdefault(option.table, []).append((option, (0,)))
    for options, choice in zip(problem.options, solution.choices, strict=True):
        option = options[choice.option]
        chosen[option.table] = [(option, choice.sites)]
    return chosen


def _devices(
    problem: Problem,
    loads: Loads,
    chosen: Mapping[str, Placed],
    fixed_bytes: Mapping[str, float],
) -> tuple[DeviceEstimate, ...]:
    shards: list[Counter[str]] = [Counter() for _ in range(problem.topology.num_devices)]
    for placed in chosen.values():
        for option, sites in placed:
            for site in sites:
                shards_of_part = max(1, round(option.parts / len(sites)))
                for device in option.sites[site]:
                    shards[device][option.sharding_type] += shards_of_part
    used = problem.row_bytes @ loads.rows[:, HELD]
    allocated = float(problem.row_bytes @ loads.rows[:, HELD].max(axis=1))
    launch = sum(
        (cost.launch for cost, n in zip(problem.group_costs, loads.members, strict=True) if n),
        start=np.zeros(len(PHASES)),
    )
    empty, slowest = loads.empty, loads.slowest
    estimates = []
    for device in range(problem.topology.num_devices):
        phases = loads.home + launch
        for group, cost in enumerate(problem.group_costs):
            own = loads.rows[group, TIMED, device].copy()
            # All devices have the places that the slowest has, and more of them are empty.
            unused = empty[group] + slowest[group, EXCHANGED] - own[EXCHANGED]
            own[[PLACED, POOLED]] = slowest[group, [PLACED, POOLED]]
            phases = phases + own @ cost.rates + _empty(cost, unused)
        estimates.append(
            DeviceEstimate(
                device,
                {
                    "tables": float(used[device]),
                    "padding": allocated - float(used[device]),
                    "embeddings": loads.kept + loads.at_owners,
                    "exchange": float(loads.temporary.max(initial=0)),
                    **fixed_bytes,
                },
                _named(phases),
                max(0.0, loads.seconds - float(phases.sum())),
                dict(shards[device]),
                {"host": float(loads.stored[0, device]), "disk": float(loads.stored[1, device])},
            )
        )
    return tuple(estimates)


def _table(problem: Problem, loads: Loads, work: TableWork, placed: Placed) -> TableEstimate:
    topology = problem.topology
    seconds, held = np.zeros(len(PHASES)), np.zeros(topology.num_devices)
    own = np.zeros(topology.num_devices)
    for option, sites in placed:
        group = problem.groups[option.key]
        cost = problem.group_costs[group]
        rows = np.zeros((HELD + 1, topology.num_devices))
        for site in sites:
            np.add.at(rows.T, np.array(option.sites[site]), option.load.T)
        seconds += option.home
        slowest = loads.rows[group, TIMED].argmax(axis=1)
        adds = rows[np.arange(HELD), slowest]
        seconds += adds @ cost.rates
        seconds += max(0.0, option.at_least - adds[EXCHANGED]) * cost.room
        held += rows[HELD] * cost.row_bytes
        own += option.home.sum() + problem.row_seconds[group] @ rows[TIMED]
    devices = np.flatnonzero(held)
    option = placed[0][0]
    return TableEstimate(
        name=work.name,
        rows=work.rows,
        dim=work.dim,
        dtype=work.dtype,
        sharding_type=option.sharding_type,
        exchange=option.exchange,
        storage=option.storage,
        cache_ratio=option.cache_ratio,
        devices=tuple(map(int, devices)),
        seconds=_named(seconds),
        bytes=float(held.sum()),
        device_bytes=tuple(map(float, held[devices])),
        device_seconds=tuple(map(float, own[devices])),
        lookups=work.lookups,
        distinct=work.distinct(),
    )


def _groups(
    problem: Problem, loads: Loads, chosen: Mapping[str, Placed]
) -> tuple[GroupEstimate, ...]:
    tables: Counter[int] = Counter()
    for placed in chosen.values():
        for group in {problem.groups[option.key] for option, _ in placed}:
            tables[group] += 1
    seconds, estimates = loads.group_seconds, []
    for key, group in problem.groups.items():
        if not tables[group]:
            continue
        work = problem.row_seconds[group] @ loads.rows[group, TIMED]
        uneven = work.max() > 1.001 * work.min()
        slowest = int(work.argmax()) if uneven else None
        estimates.append(GroupEstimate(str(key), tables[group], float(seconds[group]), slowest))
    return tuple(estimates)


def _empty(cost: GroupCost, places: np.ndarray) -> np.ndarray:
    """Seconds of places without rows, forward and backward, by phase."""
    is_forward = np.array([phase.startswith("forward") for phase in PHASES])
    return cost.room * np.where(is_forward, places[0], places[1])


def _named(vector: np.ndarray) -> dict[str, float]:
    return {name: float(value) for name, value in zip(PHASES, vector, strict=True)}
