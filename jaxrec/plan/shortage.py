"""The error of a model that does not fit: bytes that are missing, and changes that would help."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxrec.plan.constraints import ParameterConstraints
from jaxrec.plan.report import format_bytes
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWorkload

# Number of tables that a message names; with more, it gives only their number.
_MAX_NAMED = 3
_MAX_HOSTS = 64
# Fields of constraints that can make a plan impossible, in the order in which they are dropped.
_RELAXED = (
    "placement",
    "sharding_types",
    "exchanges",
    "devices",
    "storages",
    "cache_ratio",
    "min_column_width",
)
_LACKING = {"device": "each device", "host": "the memory of a host", "store": "the disk of a host"}


class PlanError(ValueError):
    """No plan fits the devices; the message gives the missing bytes and changes that would help."""


@runtime_checkable
class Fits(Protocol):
    """A test of whether a plan fits with some changes; an argument left out changes nothing."""

    def __call__(
        self,
        *,
        topology: Topology | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        bfloat16: Sequence[str] = (),
    ) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Shortage:
    """Memory that the best plan lacks: ``missing`` bytes of "device", "host" or "store".

    ``is_proven`` if no plan fits at all. ``capacity`` bytes of a device are for tables and their
    lookups; ``fixed`` has the bytes of a device that do not depend on the plan, by kind.
    """

    missing: float
    where: str
    is_proven: bool
    capacity: float
    fixed: Mapping[str, float]
    workloads: Sequence[TableWorkload]
    topology: Topology
    constraints: Mapping[str, ParameterConstraints]

    @property
    def by_size(self) -> list[TableWorkload]:
        """The tables, the largest first."""
        return sorted(self.workloads, key=lambda workload: -workload.table_bytes)


def explain(shortage: Shortage, fits: Fits, *, deadline: float) -> str:
    """Return the message of a `PlanError`: what is missing, and changes with which a plan ``fits``.

    Changes are tried until ``deadline`` (`time.monotonic`).
    """
    largest = shortage.by_size[:_MAX_NAMED]
    total = sum(workload.table_bytes for workload in shortage.workloads)
    topology = shortage.topology
    lines = [
        f"no plan fits {_devices(topology)}"
        + (": " if shortage.is_proven else ", or none was found: ")
        + f"{_LACKING[shortage.where]} lacks {format_bytes(shortage.missing)} in the best one.",
        f"Tables and optimizer state take {format_bytes(total)} in all. A device has "
        f"{format_bytes(topology.memory)}, of which "
        + ", ".join(f"{format_bytes(b)} are {kind}" for kind, b in shortage.fixed.items() if b)
        + f", and {format_bytes(max(0, shortage.capacity))} are left for tables and their lookups.",
        "Largest tables: "
        + ", ".join(f"{w.name!r} {format_bytes(w.table_bytes)}" for w in largest)
        + ".",
    ]
    if binding := list(_binding(shortage, fits, deadline)):
        lines.append(f"What binds: it would fit without {'; or without '.join(binding)}.")
    changes = list(_changes(shortage, fits, deadline))
    if changes:
        lines.append(f"Smallest changes that would fit: {'; or '.join(changes)}.")
    elif time.monotonic() >= deadline:
        lines.append("Time was up before a change was found that would fit; raise time_limit.")
    elif not binding:
        lines.append(
            "No change that was tried would fit: more devices, 16-bit rows, host memory. Fewer "
            "rows or columns are needed, or a smaller batch."
        )
    return "\n".join(lines)


def _binding(shortage: Shortage, fits: Fits, deadline: float) -> Iterator[str]:
    """Name each constraint without which a plan fits, and the fewest tables to free from it."""
    default, constraints = ParameterConstraints(), shortage.constraints
    for field in _RELAXED:
        value = getattr(default, field)
        bound = [
            workload.name
            for workload in shortage.by_size
            if getattr(constraints.get(workload.name, default), field) != value
        ]
        if not bound or time.monotonic() >= deadline:
            continue
        # For each bound table its constraints without this one.
        relaxed = {name: dataclasses.replace(constraints[name], **{field: value}) for name in bound}

        # The default binds now: a closure would see the tables of the loop's last turn.
        def enough(count: int, items: Sequence[Any] = tuple(relaxed.items())) -> bool:
            return fits(constraints={**constraints, **dict(items[:count])})

        count = smallest_number(enough, 1, len(bound), deadline)
        if count is not None:
            yield f"the constraint {field} of {_tables(bound[:count])}"


def _changes(shortage: Shortage, fits: Fits, deadline: float) -> Iterator[str]:
    """Name the smallest changes with which a plan fits."""
    # As if all devices were the smallest: changes of memory and number are then single numbers.
    topology = shortage.topology.slowest
    if (more := _more_devices(topology, fits, deadline)) is not None:
        yield f"{_devices(more)}"
    if time.monotonic() >= deadline:
        return
    fields = {"device": "memory", "host": "host_memory"}
    if field := fields.get(shortage.where):
        # The reserve takes a fraction of the added memory, too.
        used = 1 - shortage.fixed.get("reserve", 0.0) / topology.memory
        # A thousandth more than is missing, for the rounding of bytes, and then whole GB.
        larger = math.ceil((getattr(topology, field) + 1.001 * shortage.missing / used) / 1e9)
        if fits(topology=dataclasses.replace(topology, **{field: larger * 10**9})):
            yield f"{shortage.where}s of {larger} GB"
    wide = [workload.name for workload in shortage.by_size if workload.dtype == "float32"]
    count = (
        smallest_number(lambda k: fits(bfloat16=wide[:k]), 1, len(wide), deadline) if wide else None
    )
    if count is not None:
        yield f"dtype bfloat16 for {_tables(wide[:count])}"
    names = [workload.name for workload in shortage.by_size]
    if topology.host_memory:

        def in_host_memory(count: int) -> bool:
            constraints = dict(shortage.constraints)
            for name in names[:count]:
                constraints[name] = dataclasses.replace(
                    constraints.get(name, ParameterConstraints()),
                    storages=("device", "host"),
                    # A fixed placement takes one storage, and data_parallel has no caches; drop
                    # both for the trial.
                    placement=None,
                    sharding_types=None,
                )
            return fits(constraints=constraints)

        count = smallest_number(in_host_memory, 1, len(names), deadline)
        if count is not None:
            yield f"storage host for {_tables(names[:count])} (with caches on the devices)"


def _more_devices(topology: Topology, fits: Fits, deadline: float) -> Topology | None:
    """Return the topology with the fewest devices that are enough; None: none was found.

    One host gets up to 8 devices, then hosts are added.
    """

    def of(hosts: int, each: int) -> Topology:
        return dataclasses.replace(topology.slowest, hosts=hosts, devices_per_host=each)

    each = topology.devices_per_host
    if topology.hosts == 1:
        for more in (count for count in (2, 4, 8) if count > each):
            if time.monotonic() < deadline and fits(topology=of(1, more)):
                return of(1, more)
        each = max(each, 8)
    hosts = smallest_number(
        lambda count: fits(topology=of(count, each)), topology.hosts + 1, _MAX_HOSTS, deadline
    )
    return None if hosts is None else of(hosts, each)


def _devices(topology: Topology) -> str:
    if topology.hosts == 1:
        return f"{topology.num_devices} device{'s' * (topology.num_devices > 1)}"
    return f"{topology.num_devices} devices on {topology.hosts} hosts"


def _tables(names: Sequence[str]) -> str:
    if len(names) <= _MAX_NAMED:
        *first, last = map(repr, names)
        return f"{', '.join(first)} and {last}" if first else last
    return f"the {len(names)} largest tables"


def smallest_number(
    enough: Callable[[int], bool], start: int, most: int, deadline: float = math.inf
) -> int | None:
    """Return the smallest number from ``start`` to ``most`` that is enough.

    Any larger number must be enough, too. None: no number is enough, or the deadline passes first.
    """
    # Doubles, then bisects, since each test plans the whole model and small changes are the likely
    # ones.
    low, high = start - 1, start
    while time.monotonic() < deadline and not enough(high):
        if high >= most:
            return None
        low, high = high, min(max(2 * high, high + 1), most)
    if time.monotonic() >= deadline:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
