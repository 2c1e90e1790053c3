"""The calls and training steps that jaxrec supports on TPUs, as programs to compile."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks.gpu import programs
from benchmarks.gpu.batches import Shape
from benchmarks.tpu.chips import Chip
from jaxrec.embed.kernels import reference, use_kernels


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program before XLA compiles it.

    Attributes:
        lowered: What `jax.jit` lowered.
        tables: Shapes of a device's tables and of their state, none of which may be copied.
        table_bytes: Bytes of those that the program must change in place; 0 for calls that read.
    """

    lowered: Any
    tables: frozenset[tuple[int, ...]]
    table_bytes: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile.

    Attributes:
        name: Name in the results.
        lower: Lowers it for a chip.
        is_quick: Whether it belongs to the cut that CI compiles.
    """

    name: str
    lower: Callable[[Chip], Lowered]
    is_quick: bool = False


def on_one_chip(program: programs.Program, *, is_quick: bool = False) -> Program:
    """Return a program of one device, for a chip."""

    def lower(chip: Chip) -> Lowered:
        with use_kernels("reference"):
            lowered = chip.lower(program.function, *program.arguments, donate=program.donate)
        donated = [program.arguments[i] for i in program.donate]
        table_bytes = sum(
            math.prod(x.shape) * x.dtype.itemsize
            for x in jax.tree.leaves(donated)
            if x.shape in program.tables
        )
        return Lowered(lowered, program.tables, table_bytes)

    return Program(program.name.replace("reference ", ""), lower, is_quick)


def every() -> Iterator[Program]:
    """Yield the programs, small ones first."""
    yield from calls()
    yield from steps()


def calls() -> Iterator[Program]:
    """Yield lookups and updates of one device."""
    shape = Shape("D128 float32 L20", 4, 100_000, 128, 512, 20)
    yield on_one_chip(programs.pooled_lookup(reference, shape))


def steps() -> Iterator[Program]:
    """Yield training steps of one device."""
    tables = programs.tables_step("reference", tables=4, rows=100_000, batch=512)
    yield on_one_chip(tables, is_quick=True)
