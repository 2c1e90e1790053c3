"""The least time of a sharded step's work on tables, from the bytes that its program moves."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from jaxrec.plan import Topology
from jaxrec.plan.costs.base import all_gather, all_to_all, reduce_scatter
from jaxrec.plan.quantities import Links, Rate

# Bytes a second of an H200's memory and of its links, by data sheet; see `jaxrec.plan.machines`.
MEMORY, WITHIN, BETWEEN = 4.8e12, 450e9, 50e9
# A radix sort of 32-bit keys reads and writes its arrays once for each 8 bits.
SORT_PASSES = 4
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_SIZES |= {"f32": 4, "s32": 4, "u32": 4, "s64": 8, "u64": 8, "token": 0}
NO_WORK = re.compile(
    r"parameter|constant|get-tuple-element|bitcast|tuple|partition-id|iota|after-all|.*-done"
)


@dataclasses.dataclass(frozen=True)
class Work:
    """Work on tables in one step of a device.

    Attributes:
        kernels: Number of kernels, turns of loops included.
        memory: Bytes read and written in the device's memory.
        link_seconds: Seconds of its collectives at the links' rates.
    """

    kernels: float = 0
    memory: float = 0.0
    link_seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Work(*(a + b for a, b in pairs))

    def __mul__(self, count: float) -> Work:
        return Work(*(count * each for each in dataclasses.astuple(self)))

    @property
    def seconds(self) -> float:
        """Seconds of the bytes, one after the other; starting kernels takes none."""
        return self.memory / MEMORY + self.link_seconds


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of an optimized program.

    Attributes:
        kind: Its operation, such as "fusion".
        shape: Shape of its result.
        operands: Names of its operands.
        line: Its text.
    """

    kind: str
    shape: str
    operands: tuple[str, ...]
    line: str


def data_sheet(topology: Topology) -> Topology:
    """Return H200s whose kernels and links start at once and reach the rates of data sheets."""
    byte = Rate(byte=2 / MEMORY)
    return dataclasses.replace(
        topology,
        gather=byte,
        update=byte,
        copy=byte,
        sort=dataclasses.replace(topology.sort, call=0.0),
        within=Links.of(0.0, WITHIN),
        between=Links.of(0.0, BETWEEN),
    )


def work_on_tables(program: str, topology: Topology) -> Work:
    """Return the work on tables of a scheduled program: exchanges, lookups and updates.

    The ids of a batch fit the first round of an exchange here. So of a conditional's branches the
    cheapest runs, and no loop whose number of turns is unknown. Where rows are updated in such
    loops alone, which stand for branches, the cheapest runs once.

    Args:
        program: The optimized program of a device.
        topology: The devices, of `data_sheet`.
    """
    computations = computations_of(program)
    instructions = instructions_of_entry(program)
    # The dense part of the step is outside of every `shard_map`.
    total = _work(instructions, computations, topology, within="shard_map")
    if any("/update/pallas_call" in each.line for each in instructions.values()):
        return total
    bodies = (called_by(each, "body") for each in instructions.values() if each.kind == "while")
    updates = [
        computations[name]
        for name in bodies
        if name and any("/update/pallas_call" in x.line for x in computations[name].values())
    ]
    return total + _cheapest([_work(each, computations, topology) for each in updates])


def _work(
    instructions: dict[str, Instruction],
    computations: dict[str, dict[str, Instruction]],
    topology: Topology,
    within: str = "",
) -> Work:
    """Return the work of instructions whose text has ``within``."""
    total = Work()
    for each in instructions.values():
        # A ragged all-to-all does not say where it comes from.
        is_within = within in each.line or each.kind.startswith("ragged")
        if NO_WORK.fullmatch(each.kind) or not is_within:
            continue
        operands = [instructions[name].shape for name in each.operands if name in instructions]
        if each.kind == "while":
            turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', each.line)
            if turns and (body := called_by(each, "body")):
                total += _work(computations[body], computations, topology) * int(turns[1])
        elif each.kind == "conditional":
            branches = re.findall(r"%([\w.-]+)", each.line.partition("branch_computations=")[2])
            branches += re.findall(r"(?:true|false)_computation=%([\w.-]+)", each.line)
            known = [computations[name] for name in branches if name in computations]
            total += _cheapest([_work(branch, computations, topology) for branch in known])
        elif each.kind.removesuffix("-start") in COLLECTIVES:
            total += collective_work(each, operands, topology)
        else:
            called = called_by(each, "calls")
            is_sort = called and any(x.kind == "sort" for x in computations[called].values())
            total += Work(1, bytes_moved(each, operands, bool(is_sort)))
    return total


def _cheapest(works: list[Work]) -> Work:
    return min((each for each in works if each.kernels), key=lambda x: x.seconds, default=Work())


def called_by(each: Instruction, role: str) -> str | None:
    """Return the name of the computation that an instruction calls in a role, such as "body"."""
    found = re.search(rf"{role}=%([\w.-]+)", each.line)
    return None if found is None else found[1]


COLLECTIVES = ("all-to-all", "ragged-all-to-all", "all-gather", "reduce-scatter", "all-reduce")


def collective_work(each: Instruction, operands: list[str], topology: Topology) -> Work:
    """Return the work of a collective; its bytes are read and written in memory, too."""
    kind = each.kind.removesuffix("-start")
    # A ragged one sends part of its first operand; the others are its result and the sizes.
    is_ragged = kind == "ragged-all-to-all"
    sent = sum(map(shape_bytes, operands[:1] if is_ragged else operands))
    received: float = sent
    if kind == "all-gather":
        received = sent * topology.num_devices
        seconds = all_gather(received, topology)
    elif kind == "reduce-scatter":
        received = sent / topology.num_devices
        seconds = reduce_scatter(sent, topology)
    elif kind.endswith("all-to-all"):
        seconds = all_to_all(sent, topology)
    else:
        seconds = reduce_scatter(sent, topology) + all_gather(sent, topology)
    return Work(1, sent + received, seconds)


def bytes_moved(each: Instruction, operands: list[str], is_sort: bool) -> float:
    """Return the bytes that a kernel reads and writes."""
    result = shape_bytes(each.shape)
    if is_sort:
        return 2 * SORT_PASSES * result
    kernel = re.search(r"/(\w+)/pallas_call", each.line)
    if kernel is None:
        return result + sum(map(shape_bytes, operands))
    # Arrays of rows, which the kernels read and write at some places, and those of integers.
    rows = [shape for shape in operands if re.match(r"(f32|bf16|f16|u8)\[\d+,", shape)]
    integers = [shape for shape in operands if shape.startswith("s32[")]
    lookups = max((_length(shape) for shape in integers), default=0)
    others = sum(map(shape_bytes, integers))
    row = max(map(_row_bytes, rows), default=0)
    match kernel[1]:
        case "pool" | "copy_rows":
            return others + lookups * row + result
        case "write_sums":
            return others + 2 * lookups * row
        case "update":  # A row, its state and its gradients; rows occur once at most.
            table = re.findall(r"\w+\[[\d,]*\]", each.shape)
            changed = min(lookups, _length(table[0]))
            return others + lookups * row + 2 * changed * sum(map(_row_bytes, table))
    return others  # Sums of hot rows, of which these batches have none.


def instructions_of_entry(program: str) -> dict[str, Instruction]:
    """Return the instructions of an optimized program's entry, by name."""
    entry = re.search(r"^ENTRY %([\w.-]+)", program, re.M)
    assert entry is not None
    return computations_of(program)[entry[1]]


def computations_of(program: str) -> dict[str, dict[str, Instruction]]:
    """Return the instructions of each computation of an optimized program, by their names."""
    return {
        name: dict(_instructions(text))
        for name, text in re.findall(
            r"^(?:ENTRY )?%([\w.-]+) \([^\n]*\{\n(.*?)^\}", program, re.S | re.M
        )
    }


def _instructions(text: str) -> Iterator[tuple[str, Instruction]]:
    pattern = r"^\s*(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([a-z-]+)\((.*?)\)"
    for line in text.splitlines():
        if found := re.match(pattern, re.sub(r"/\*.*?\*/", "", line)):
            name, shape, kind, operands = found.groups()
            names = tuple(re.findall(r"%([\w.-]+)", operands))
            yield name, Instruction(kind, shape, names, line)


def shape_bytes(shape: str) -> int:
    """Return the bytes of the arrays of a shape, such as "(f32[8,128]{1,0}, s32[4])"."""
    return sum(
        _SIZES[kind] * math.prod(int(n) for n in dims.split(",") if n)
        for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape)
    )


def _length(shape: str) -> int:
    return int((re.findall(r"\[(\d+)", shape) or [1])[0])


def _row_bytes(shape: str) -> int:
    return shape_bytes(shape) // max(_length(shape), 1)
