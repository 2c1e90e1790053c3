"""What is missing when no plan fits, and the smallest changes that would help."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from jaxrec.plan.constraints import ParameterConstraints
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWork

# Changes of one kind that are tried for more tables than this are put as a number of tables.
_MOST_NAMED = 3
_MOST_HOSTS = 64
_RELAXED = (
    "placement",
    "sharding_types",
    "exchanges",
    "devices",
    "storages",
    "cache_ratio",
    "min_column_width",
)
_LACKING = {
    "device": "each device",
    "host": "the memory of the fullest host",
    "disk": "the disk of the fullest host",
}


class PlanError(ValueError):
    """No plan fits the devices; the message says what is missing and what would help."""


@runtime_checkable
class Fits(Protocol):
    """Whether a plan fits under changed circumstances; what is not given stays as it is."""

    def __call__(
        self,
        *,
        topology: Topology | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        bfloat16: Sequence[str] = (),
    ) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Shortage:
    """What does not fit.

    Attributes:
        missing: Bytes that are lacking in the best plan found.
        where: Where: "device", "host" or "disk".
        is_proven: Whether no plan fits, rather than none that was found.
        room: Bytes of a device for tables and their lookups.
        fixed: Bytes of a device that do not depend on the plan, by kind.
        works: The tables.
        topology: The devices.
        constraints: What is said of tables.
    """

    missing: float
    where: str
    is_proven: bool
    room: float
    fixed: Mapping[str, float]
    works: Sequence[TableWork]
    topology: Topology
    constraints: Mapping[str, ParameterConstraints]


def explain(shortage: Shortage, fits: Fits, *, deadline: float) -> str:
    """The message of a `PlanError`.

    Args:
        shortage: What does not fit.
        fits: Tells whether a change helps; called a few dozen times at most.
        deadline: When to stop trying changes, by `time.monotonic`.
    """
    largest = sorted(shortage.works, key=lambda work: -work.table_bytes)[:_MOST_NAMED]
    total = sum(work.table_bytes for work in shortage.works)
    topology = shortage.topology
    lines = [
        f"no plan fits {_devices(topology)}"
        + (": " if shortage.is_proven else ", or none was found: ")
        + f"{_LACKING[shortage.where]} lacks {size(shortage.missing)} in the best one.",
        f"Tables and optimizer state take {size(total)} in all. A device has "
        f"{size(topology.memory)}, of which "
        + ", ".join(f"{size(bytes)} are {kind}" for kind, bytes in shortage.fixed.items() if bytes)
        + f", and {size(max(0, shortage.room))} are left for tables and their lookups.",
        "Largest tables: "
        + ", ".join(f"{work.name!r} {size(work.table_bytes)}" for work in largest)
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
    """The constraints without which a plan fits: of single tables, or else of all of them."""
    default = ParameterConstraints()
    for field in _RELAXED:
        bound = [
            work.name
            for work in sorted(shortage.works, key=lambda work: -work.table_bytes)
            if work.name in shortage.constraints
            and getattr(shortage.constraints[work.name], field) != getattr(default, field)
        ]
        if not bound or time.monotonic() >= deadline:
            continue

        def without(names: Sequence[str], field: str = field) -> dict[str, ParameterConstraints]:
            value = getattr(default, field)
            relaxed = dict(shortage.constraints)
            for name in names:
                relaxed[name] = dataclasses.replace(relaxed[name], **{field: value})
            return relaxed

        def enough(count: int, bound: Sequence[str] = bound, without: Callable = without) -> bool:
            return fits(constraints=without(bound[:count]))

        count = smallest(enough, 1, len(bound), deadline)
        if count is not None:
            yield f"the constraint {field} of {_tables(bound[:count])}"


def _changes(shortage: Shortage, fits: Fits, deadline: float) -> Iterator[str]:
    topology = shortage.topology
    if (more := _more_devices(topology, fits, deadline)) is not None:
        yield f"{_devices(more)}"
    if time.monotonic() >= deadline:
        return
    if shortage.where == "device":
        # Of what is added, a part is reserved as well.
        used = 1 - shortage.fixed.get("reserve", 0.0) / topology.memory
        larger = math.ceil((topology.memory + 1.001 * shortage.missing / used) / 1e9)
        if fits(topology=dataclasses.replace(topology, memory=larger * 10**9)):
            yield f"devices of {larger} GB"
    if shortage.where == "host":
        used = 1 - shortage.fixed.get("reserve", 0.0) / topology.memory
        larger = math.ceil((topology.host_memory + 1.001 * shortage.missing / used) / 1e9)
        if fits(topology=dataclasses.replace(topology, host_memory=larger * 10**9)):
            yield f"hosts of {larger} GB"
    by_size = sorted(shortage.works, key=lambda work: -work.table_bytes)
    wide = [work.name for work in by_size if work.dtype == "float32"]
    count = smallest(lambda k: fits(bfloat16=wide[:k]), 1, len(wide), deadline) if wide else None
    if count is not None:
        yield f"dtype bfloat16 for {_tables(wide[:count])}"
    names = [work.name for work in by_size]
    if topology.host_memory:

        def in_host_memory(count: int) -> bool:
            said = dict(shortage.constraints)
            for name in names[:count]:
                old = said.get(name, ParameterConstraints())
                said[name] = dataclasses.replace(
                    old, storages=("device", "host"), placement=None, sharding_types=None
                )
            return fits(constraints=said)

        count = smallest(in_host_memory, 1, len(names), deadline)
        if count is not None:
            yield f"storage host for {_tables(names[:count])} (to plan ahead)"


def _more_devices(topology: Topology, fits: Fits, deadline: float) -> Topology | None:
    """The fewest devices that are enough: first more on the one host, then more hosts."""

    def of(hosts: int, each: int) -> Topology:
        return dataclasses.replace(topology, hosts=hosts, devices_per_host=each)

    each = topology.devices_per_host
    if topology.hosts == 1:
        for more in (count for count in (2, 4, 8) if count > each):
            if time.monotonic() < deadline and fits(topology=of(1, more)):
                return of(1, more)
        each = max(each, 8)
    hosts = smallest(
        lambda count: fits(topology=of(count, each)), topology.hosts + 1, _MOST_HOSTS, deadline
    )
    return None if hosts is None else of(hosts, each)


def _devices(topology: Topology) -> str:
    if topology.hosts == 1:
        return f"{topology.num_devices} device{'s' * (topology.num_devices > 1)}"
    return f"{topology.num_devices} devices on {topology.hosts} hosts"


def _tables(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMED:
        *first, last = map(repr, names)
        return f"{', '.join(first)} and {last}" if first else last
    return f"the {len(names)} largest tables"


def size(bytes: float) -> str:
    """Bytes for people.

    Example:
        >>> size(1.5e9)
        '1.50 GB'
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes >= scale:
            digits = ".3g" if bytes >= 100 * scale else ".2f"
            return f"{bytes / scale:{digits}} {unit}"
    return f"{bytes:.0f} bytes"


def smallest(
    enough: Callable[[int], bool], start: int, most: int, deadline: float = math.inf
) -> int | None:
    """The smallest number from ``start`` to ``most`` that is enough, if larger ones are as well.

    Doubles, then bisects: few calls. None if there is none, or it was not found in time.

    Example:
        >>> smallest(lambda n: n >= 5, 1, 100)
        5
    """
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
