"""Copies, memory, work and collectives of an optimized TPU program, read from its text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.roofline import Instruction, shape_bytes

_KINDS = "all-to-all|all-gather|reduce-scatter|all-reduce|ragged-all-to-all|collective-permute"


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a program's entry.

    Attributes:
        kind: Kind, such as "all-to-all".
        num_bytes: Bytes of its result on a device.
        under: Fusions and calls that the schedule runs between its start and its end; None: it
            has no start of its own, and nothing runs under it.
    """

    kind: str
    num_bytes: int
    under: int | None

    def __str__(self) -> str:
        under = "" if self.under is None else f" over {self.under}"
        return f"{self.kind} {self.num_bytes / 1e6:.2f}{under}"


@dataclasses.dataclass(frozen=True)
class Findings:
    """Figures of a compiled program, of one device.

    Attributes:
        arguments: Bytes of the arguments.
        in_place: Bytes of the arguments that results take the place of.
        temporaries: Bytes of temporaries.
        gflop: 1e9 floating-point operations, by XLA's cost analysis.
        accessed: Bytes read and written, by XLA's cost analysis.
        copies: Shapes of tables or of their state that the program copies.
        collectives: Collectives of the entry, in order; those of loops and branches are left out.
    """

    arguments: int
    in_place: int
    temporaries: int
    gflop: float
    accessed: float
    copies: tuple[str, ...]
    collectives: tuple[Collective, ...]

    @classmethod
    def of(cls, compiled: Any, tables: frozenset[tuple[int, ...]]) -> Findings:
        """Return a compiled program's figures; ``tables`` are shapes that must not be copied."""
        memory, costs, program = (
            compiled.memory_analysis(),
            compiled.cost_analysis() or {},
            compiled.as_text(),
        )
        return cls(
            memory.argument_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
            costs.get("flops", 0.0) / 1e9,
            costs.get("bytes accessed", 0.0),
            tuple(copies(program, tables)),
            tuple(collectives(program)),
        )

    def cells(self) -> list[str]:
        """Return the cells of a line of the results."""
        return [
            f"{self.arguments / 1e6:.1f}",
            f"{self.in_place / 1e6:.1f}",
            f"{self.temporaries / 1e6:.1f}",
            ", ".join(self.copies) or "none",
            f"{self.gflop:.2f}",
            f"{self.accessed / 1e6:.0f}",
            "; ".join(map(str, self.collectives)),
        ]

    HEADERS = (
        "arguments MB",
        "in place MB",
        "temporaries MB",
        "copies of tables",
        "GFLOP",
        "MB accessed",
        "collectives, MB",
    )


def copies(program: str, tables: frozenset[tuple[int, ...]]) -> Iterator[str]:
    """Yield the shapes of tables that a program copies from one place of HBM to another.

    A small table may be copied into the chip's own memory, which is written as ``S(1)``.
    """
    copied = set()
    for line in program.splitlines():
        found = re.search(r"= (.*?) copy(?:-start)?\(", line)
        if found is None:
            continue
        # One shape, or of a copy that runs beside other work: target, source and a token.
        shapes = re.findall(r"\w+\[([\d,]+)\](\{[^}]*\})?", found[1])[:2]
        if shapes and not any("S(1)" in layout for _, layout in shapes):
            copied.add(shapes[0][0])
    for shape in sorted(tables):
        if (size := ",".join(map(str, shape))) in copied:
            yield f"[{size}]"


def collectives(program: str) -> Iterator[Collective]:
    """Yield the collectives of a scheduled program's entry, in the order of their starts."""
    lines = program[program.index("\nENTRY") :].splitlines()
    for i, line in enumerate(lines):
        found = re.match(rf"\s*(?:ROOT )?%?([\w.-]+) = (.*?) ({_KINDS})(-start)?\(", line)
        if found is None:
            continue
        name, shape, kind, start = found.groups()
        if not start:
            yield Collective(kind, shape_bytes(_without_layouts(shape)), None)
            continue
        end = next(j for j, each in enumerate(lines) if re.search(rf"-done\(.*%{name}\b", each))
        work = sum(bool(re.search(r" (fusion|custom-call|sort|while)\(", x)) for x in lines[i:end])
        result = lines[end].partition(" = ")[2].partition(f" {kind}-done(")[0]
        yield Collective(kind, shape_bytes(_without_layouts(result)), work)


def bytes_moved(each: Instruction, operands: list[str]) -> float:
    """Return the bytes that an instruction reads and writes."""
    numbers = [math.prod(_sizes(shape)) for shape in operands if shape.startswith("s32[")]
    is_by_row = re.search(r"gather|scatter", each.line.partition(" = ")[0])
    if not numbers or not is_by_row:
        return shape_bytes(each.shape) + sum(map(shape_bytes, operands))
    count, result = max(numbers), _sizes(each.shape)

    def reached(shape: str) -> float:
        if not shape.startswith("f32["):
            return shape_bytes(shape)
        # A gather may read a row many times. Each row of a result is written once.
        sizes = _sizes(shape)
        rows = min(count, sizes[0]) if sizes == result else count
        return 4 * rows * math.prod(sizes[1:]) if sizes else 4

    return reached(each.shape) + sum(map(reached, operands))


def _sizes(shape: str) -> tuple[int, ...]:
    found = re.search(r"\[([\d,]*)\]", shape)
    return tuple(int(n) for n in found[1].split(",") if n) if found else ()


def _without_layouts(shape: str) -> str:
    return re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", shape)
