"""Expected time and memory of a plan, by device, table and group.

The sums themselves are `jaxrec.plan.problem.Totals`; here they are taken apart for the report.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxrec.plan.options import ShardingOption
from jaxrec.plan.problem import Problem, Solution, Totals
from jaxrec.plan.quantities import LOADS, Load, Perf
from jaxrec.plan.workload import TableWorkload


@dataclasses.dataclass(frozen=True)
class DeviceEstimate:
    """Memory and time of one device.

    Attributes:
        device: Number of the device.
        bytes: Bytes by kind: "tables" with their optimizer state; "padding", rows of the device's
            arrays that only a fuller device needs; "embeddings" and their gradients; "exchange"
            buffers; "batches" on the device; "dense" parameters, their gradients and optimizer
            state; "reserve".
        seconds: Seconds of the device's own work by phase; see `jaxrec.plan.quantities.PHASES`.
        waits: Seconds in which the device waits for slower ones.
        shards: Number of shards by sharding type.
        stored_bytes: Bytes of row stores that the device's host keeps, by storage.
        memory: Bytes of the device's memory; None: `Estimate.capacity`.
    """

    device: int
    bytes: dict[str, float]
    seconds: dict[str, float]
    waits: float
    shards: dict[str, int]
    stored_bytes: dict[str, float]
    memory: int | None = None


@dataclasses.dataclass(frozen=True)
class TableEstimate:
    """Memory and time of one table.

    Attributes:
        name: Name of the table.
        rows: Number of rows.
        dim: Number of columns.
        dtype: Type of the stored rows.
        sharding_type: Sharding type, such as "row_wise".
        exchange: Exchange, as `jaxrec.mesh.Placement` names it.
        storage: "device", "host" or "store".
        cache_ratio: Fraction of the rows that devices hold.
        devices: Devices that hold the table's shards.
        seconds: Seconds by phase that the table adds to the slowest device of its group.
        bytes: Bytes of rows and optimizer state on all devices together.
        device_bytes: Bytes on each of `devices`.
        device_seconds: Seconds of the table's work on each of `devices`.
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
    """Time of a group of tables that are exchanged together.

    Attributes:
        name: Type and width of the tables, and their exchange.
        tables: Number of tables.
        seconds: Seconds that the group adds to a step: its launches, and its slowest device.
        slowest: Index of the slowest device; None where all take the same time.
    """

    name: str
    tables: int
    seconds: float
    slowest: int | None


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory and time of a plan.

    Attributes:
        seconds: Seconds of a step's work on tables: the sum of each group's slowest device.
        phases: The same seconds by phase.
        bound: Lower bound on the seconds of every plan.
        search: Account of the search, in words.
        search_seconds: Seconds that the search took.
        devices: Estimate of each device.
        tables: Estimate of each table.
        groups: Estimate of each group.
        capacity: Bytes of a device's memory; where devices differ, of the smallest.
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
        """Largest possible distance to the best plan, as a fraction of the bound."""
        return self.seconds / self.bound - 1 if self.bound > 0 else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as a dictionary for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Estimate:
        """Make an estimate from the dictionary of `to_dict`."""

        def each(kind: type, items: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
            lists = ("devices", "device_bytes", "device_seconds")
            return tuple(
                kind(**{k: tuple(v) if k in lists else v for k, v in item.items()})
                for item in items
            )

        kinds = {"devices": DeviceEstimate, "tables": TableEstimate, "groups": GroupEstimate}
        return cls(**{**fields, **{name: each(kind, fields[name]) for name, kind in kinds.items()}})


def imbalance(loads: Sequence[float]) -> dict[str, float]:
    """Return three measures of how uneven loads are, by name.

    ``p`` is each load's share of the sum, and ``k`` the number of loads. "max over mean" is
    ``k max p``, "total variation" is ``sum |p - 1/k| / 2``, and "KL divergence", from even shares,
    is ``sum p log(p k)``. Equal loads give 1, 0 and 0.
    """
    loads_ = np.asarray(loads, float)
    if not loads_.sum():
        return {"max over mean": 1.0, "total variation": 0.0, "KL divergence": 0.0}
    shares = loads_ / loads_.sum()
    positive = shares[shares > 0]
    return {
        "max over mean": float(shares.max() * shares.size),
        "total variation": float(np.abs(shares - 1 / shares.size).sum() / 2),
        "KL divergence": max(0.0, float((positive * np.log(positive * shares.size)).sum())),
    }


def make_estimate(
    problem: Problem,
    workloads: Sequence[TableWorkload],
    solution: Solution,
    *,
    bound: float,
    search: str,
    search_seconds: float,
    fixed_bytes: Mapping[str, float],
) -> Estimate:
    """Return the estimate of a solution: its totals, taken apart by device, table and group.

    ``bound`` is a lower bound on the seconds of every plan. ``fixed_bytes`` are the bytes of each
    device, by kind, that do not depend on the plan.
    """
    totals = Totals.of(problem, solution.choices)
    chosen = _chosen(problem, solution)
    common = _common_perf(problem, totals, chosen)
    most, empty = totals.stacked.max(axis=2), totals.empty_positions
    # The critical path: each collective waits for the slowest device, so each count of each group
    # takes the time of the device that has most of it, which need not be one device for all counts.
    path = common
    for group, costs in enumerate(problem.costs):
        path += costs.perf(Load(*most[:, [group]])) + costs.position().scale(*empty[:, group])
    return Estimate(
        seconds=totals.seconds,
        phases=path.to_dict(),
        bound=bound,
        search=search,
        search_seconds=search_seconds,
        devices=_device_estimates(problem, totals, chosen, common, fixed_bytes),
        tables=tuple(
            _table_estimate(problem, totals, workload, chosen[workload.name])
            for workload in workloads
        ),
        groups=_group_estimates(problem, totals, chosen),
        capacity=problem.topology.memory,
    )


Placed: TypeAlias = list[tuple[ShardingOption, tuple[int, ...]]]


def _chosen(problem: Problem, solution: Solution) -> dict[str, Placed]:
    """Return the options of a solution by table, with their sites.

    A table has several options if its placement cuts columns unevenly.
    """
    chosen: dict[str, Placed] = {}
    for option in problem.decided:
        chosen.setdefault(option.table, []).append((option, (0,)))
    for option, sites in problem.chosen(solution.choices):
        chosen[option.table] = [(option, sites)]
    return chosen


def _common_perf(problem: Problem, totals: Totals, chosen: Mapping[str, Placed]) -> Perf:
    """Return the seconds that are the same on every device: `Option.home`, and launches."""
    homes = (option.home for placed in chosen.values() for option, _ in placed)
    members = zip(problem.costs, totals.members, strict=True)
    launches = (costs.launch() for costs, count in members if count)
    return sum([*homes, *launches], start=Perf())


def _device_estimates(
    problem: Problem,
    totals: Totals,
    chosen: Mapping[str, Placed],
    common: Perf,
    fixed_bytes: Mapping[str, float],
) -> tuple[DeviceEstimate, ...]:
    num_devices = problem.topology.num_devices
    memory = problem.topology.device_memory or (None,) * num_devices
    shards: list[Counter[str]] = [Counter() for _ in range(num_devices)]
    for placed in chosen.values():
        for option, sites in placed:
            for site in sites:
                for device in option.sites[site]:
                    shards[device][option.sharding_type] += max(1, round(option.parts / len(sites)))
    slowest, empty, step = totals.slowest, totals.empty_positions, totals.seconds
    # Seconds of all devices, `[devices]`.
    perf = common + Perf(prefetch=np.zeros(num_devices))
    for group, costs in enumerate(problem.costs):
        load = Load(*totals.stacked[:, group])
        # All devices have the positions of the slowest, and the others have more of them empty.
        unused = empty[:, group, None] + slowest.exchanged[group] - load.exchanged
        alike = {
            name: np.full(num_devices, getattr(slowest, name)[group]) for name in ("ids", "bags")
        }
        perf += costs.perf(dataclasses.replace(load, **alike)) + costs.position().scale(*unused)
    # Held rows are charged as on the fullest device, since a group is one array with equal parts: a
    # device's own rows are "tables", the rest of its part is "padding".
    bytes, total = totals.load_bytes, perf.total * np.ones(num_devices)
    tables = problem.unit_bytes[LOADS.index("held")] @ Load(*totals.stacked).held
    padding, embeddings = bytes.held - tables, totals.kept + (bytes.ids + bytes.bags).item()
    seconds = {phase: s * np.ones(num_devices) for phase, s in perf.by_phase().items()}
    return tuple(
        DeviceEstimate(
            device,
            {
                "tables": float(tables[device]),
                "padding": float(padding[device]),
                "embeddings": embeddings,
                "exchange": float(totals.temporary.max(initial=0)),
                **fixed_bytes,
            },
            {phase: float(of_devices[device]) for phase, of_devices in seconds.items()},
            max(0.0, step - float(total[device])),
            dict(shards[device]),
            dict(totals.stored),
            memory[device],
        )
        for device in range(num_devices)
    )


def _table_estimate(
    problem: Problem, totals: Totals, workload: TableWorkload, placed: Placed
) -> TableEstimate:
    num_devices = problem.topology.num_devices
    perf, bytes, seconds = Perf(), np.zeros(num_devices), np.zeros(num_devices)
    for option, sites in placed:
        group = problem.groups[option.group]
        costs = problem.costs[group]
        counts = np.zeros((len(LOADS), num_devices))
        for site in sites:
            devices = np.array(option.sites[site])
            load = option.load.stacked * problem.weights[:, devices]
            np.add.at(counts.T, devices, load.T)
        # A table counts where its group waits: for each count, on the device that has most of it. A
        # table without a shard there adds only the work on its samples (`Option.home`).
        slowest = totals.stacked[:, group].argmax(axis=1)
        added = Load(*counts[np.arange(len(LOADS)), slowest, None])
        empty = np.maximum(option.round_capacity - added.exchanged, 0)
        perf += option.home + costs.perf(added) + costs.position() * empty
        bytes += Load(*counts).held * costs.group.stored_row_bytes
        seconds += option.home.total + problem.unit_seconds[:, group] @ counts
    devices = np.flatnonzero(bytes)
    option = placed[0][0]
    return TableEstimate(
        name=workload.name,
        rows=workload.rows,
        dim=workload.dim,
        dtype=workload.dtype,
        sharding_type=option.sharding_type,
        exchange=option.exchange,
        storage=option.storage,
        cache_ratio=option.cache_ratio,
        devices=tuple(map(int, devices)),
        seconds=perf.to_dict(),
        bytes=float(bytes.sum()),
        device_bytes=tuple(map(float, bytes[devices])),
        device_seconds=tuple(map(float, seconds[devices])),
        lookups=workload.lookups,
        distinct=workload.distinct(),
    )


def _group_estimates(
    problem: Problem, totals: Totals, chosen: Mapping[str, Placed]
) -> tuple[GroupEstimate, ...]:
    tables: Counter[int] = Counter()
    for placed in chosen.values():
        for group in {problem.groups[option.group] for option, _ in placed}:
            tables[group] += 1
    seconds, estimates = totals.group_seconds, []
    for key, group in problem.groups.items():
        if not tables[group]:
            continue
        by_device = problem.unit_seconds[:, group] @ totals.stacked[:, group]
        # Differences of rounding, or of a row where rows do not divide evenly, name no device
        # slowest.
        is_uneven = by_device.max() > 1.001 * by_device.min()
        slowest = int(by_device.argmax()) if is_uneven else None
        estimates.append(GroupEstimate(str(key), tables[group], float(seconds[group]), slowest))
    return tuple(estimates)
