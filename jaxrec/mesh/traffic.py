"""The collectives of a compiled program, read from the text of its HLO."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

import jax
import numpy as np

# Bytes that leave a device for each byte of the result, in a group of n devices, both by rings and
# by direct sends (Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication
# operations in MPICH").
_SENT = {
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "collective-permute": lambda n: 1,
    "collective-broadcast": lambda n: 1,
}

_COMPUTATION = re.compile(r"^(ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?[\w.-]+ = (?P<type>\(.*?\)|\S+) (?P<op>[a-z][\w-]*)\(")
_SHAPE = re.compile(r"\b(?P<type>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<sizes>[\d,]*)\]")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=([^,\s]*))")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a compiled program.

    Attributes:
        kind: XLA's name of the collective, such as "all-to-all".
        shape: Shape and type of the result on each device, as XLA writes them.
        result_bytes: Bytes of the result on each device.
        groups: Groups of devices that communicate with each other.
    """

    kind: str
    shape: str
    result_bytes: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def devices(self) -> int:
        """Number of devices in each group."""
        return len(self.groups[0])

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave each device."""
        return round(self.result_bytes * _SENT[self.kind](self.devices))

    def sent_between_hosts(self, devices_per_host: int) -> int:
        """Return the bytes that a device sends to other hosts, as a mean over devices.

        Devices are numbered host by host.
        """
        # In an all-to-all a device sends as much to each device. Other collectives are taken to run
        # around a ring of the group that enters and leaves each host once.
        leaving = 0.0
        for group in self.groups:
            on_host = np.unique(np.array(group) // devices_per_host, return_counts=True)[1]
            size, hosts = len(group), len(on_host)
            if self.kind.endswith("all-to-all"):
                leaving += self.result_bytes * float(on_host @ (size - on_host)) / size
            elif hosts > 1:
                leaving += self.result_bytes * _SENT[self.kind](size) * hosts
        return round(leaving / sum(map(len, self.groups)))


def collectives(program: jax.stages.Compiled | str) -> list[Collective]:
    """Return the collectives, in order, that a program runs on a batch within the capacities."""
    # Collectives in the bodies of loops are further rounds of an exchange, and are left out. A
    # conditional counts with the branch that sends least, for the same reason.
    text = program if isinstance(program, str) else program.as_text() or ""
    devices = math.prod(
        int(found.group(1)) if (found := re.search(rf"{field}=(\d+)", text)) else 1
        for field in ("num_partitions", "replica_count")
    )
    computations, entry = _computations(text)
    return list(_walk(computations, entry, devices)) if entry else []


def sent_bytes(found: Sequence[Collective]) -> int:
    """Return the bytes that leave each device in all the collectives."""
    return sum(collective.sent_bytes for collective in found)


def _computations(text: str) -> tuple[dict[str, list[str]], str | None]:
    """Return the lines of each computation by name, and the name of the entry computation."""
    computations: dict[str, list[str]] = {}
    entry = None
    lines: list[str] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations.setdefault(header["name"], [])
            entry = header["name"] if header[1] else entry
        else:
            lines.append(line)
    return computations, entry


def _walk(computations: dict[str, list[str]], name: str, devices: int) -> Iterator[Collective]:
    for line in computations[name]:
        instruction = _INSTRUCTION.match(line)
        if instruction is None:
            continue
        operation = instruction["op"].removesuffix("-start")
        if operation in _SENT:
            started = instruction["op"].endswith("-start")
            yield _collective(operation, instruction["type"], started, line, devices)
        elif operation == "conditional":
            names = ",".join(several or one for several, one in _BRANCHES.findall(line)).split(",")
            branches = [
                list(_walk(computations, name.strip().lstrip("%"), devices)) for name in names
            ]
            yield from min(branches, key=sent_bytes)
        elif operation in ("call", "fusion", "async") and (
            called := re.search(r"(?:to_apply|calls)=%?([\w.-]+)", line)
        ):
            yield from _walk(computations, called[1], devices)


def _collective(kind: str, result: str, started: bool, line: str, devices: int) -> Collective:
    shapes = list(_SHAPE.finditer(result))
    if started and kind != "all-reduce":
        # The result of a start is (operand, result, ...).
        shapes = shapes[1:2]
    sizes = [
        math.prod(map(int, filter(None, shape["sizes"].split(",")))) * int(shape["bits"] or 8) // 8
        for shape in shapes
    ]
    names = dict.fromkeys(shape.group() for shape in shapes)
    count = f"{len(shapes)} x " if len(shapes) > 1 and len(names) == 1 else ""
    return Collective(kind, count + ", ".join(names), sum(sizes), _groups(line, devices))


def _groups(line: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices of a collective, whichever way XLA writes them."""
    # A list, {{0,1},{2,3}}; a tiling of the device numbers, [2,2]<=[4]; or axes of a mesh.
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]+\})\}", line):
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return tuple(tuple(map(int, group.split(","))) for group in groups)
    if tiled := re.search(r"replica_groups=(\[[\d,]+\])<=(\[[\d,]+\])(?:T\(([\d,]+)\))?", line):
        shape, sizes = _integers(tiled[1]), _integers(tiled[2])
        axes = _integers(tiled[3]) if tiled[3] else range(len(sizes))
        return _tuples(np.arange(math.prod(sizes)).reshape(sizes).transpose(axes).reshape(shape))
    if named := re.search(r"replica_groups=mesh\[([^]]*)\] \{([^}]*)\}", line):
        return _named_groups(named[1], named[2])
    return (tuple(range(devices)),)


def _named_groups(mesh: str, axes: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices that ``axes`` of ``mesh`` make, both as XLA writes them.

    For the mesh ``'a'=2,'b'=8`` the axes ``'a','b':(2)4`` are all of ``a`` and a part of ``b``: the
    part of size 4 that follows a part of size 2.
    """
    # Each axis becomes three: the part before the named one, the named one, and the part after it.
    parts: list[int] = []
    grouped: list[int] = []
    wanted = {name: size for name, *size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)}
    for name, length in re.findall(r"'([^']+)'=(\d+)", mesh):
        before, size = wanted.get(name, ("", "1"))
        first, own = int(before or 1), int(size or length)
        if name in wanted:
            grouped.append(len(parts) + 1)
        parts += [first, own, int(length) // (first * own)]
    alone = [axis for axis in range(len(parts)) if axis not in grouped]
    numbers = np.arange(math.prod(parts)).reshape(parts).transpose(alone + grouped)
    return _tuples(numbers.reshape(-1, math.prod(parts[axis] for axis in grouped)))


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _tuples(numbers: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, numbers.tolist()))
