"""Compiles the kernels for NVIDIA GPUs without one, and holds their machine code to limits.

    python -m benchmarks.gpu.compile [--card h200] [--quick] [--no-steps] [--only REGEX]

Prints a line for each kernel and each training step, then a sentence for each failure; the exit
status is 1 if there is one. A run with steps and without ``--only`` writes
``benchmarks/results/compiled.<card>.md``.
docs/gpu.md says how to set this up and what the figures mean.

A failure is: a program that does not compile; a spill; a copy of a table, or temporaries as large
as the tables; an addition of floats by atomics; more round trips to memory or fewer bytes under way
than `LIMITS` allows.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import math
import os
import pathlib
import re
import shutil
import sys
import warnings
from typing import Any, Literal

# GEMMs are not tuned without a card, and no CPU computes anything here.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}"

import jax
import tyro

from benchmarks.gpu import programs
from benchmarks.gpu.cards import CARDS, Card
from benchmarks.gpu.machine_code import Kernel, kernels
from benchmarks.gpu.programs import Program

# XLA's sorting kernels are many, and only move integers.
EXCEPT_SORTS = r"(?!.*sort)"
RESULTS = pathlib.Path(__file__).parents[1] / "results"


@dataclasses.dataclass(frozen=True)
class Limit:
    """Limits on kernels whose program matches.

    Attributes:
        kernel: Name of the kernel.
        programs: Regular expression found in the program's name.
        round_trips: Most loads of a loop's turn that wait for one another.
        before_store: Most round trips before the first store; None: any number.
        bytes_under_way: Fewest bytes under way on a multiprocessor, in each loop.
        load_bytes: Fewest bytes of the widest load of each loop, or of the kernel.
    """

    kernel: str
    programs: str
    round_trips: float
    before_store: int | None = None
    bytes_under_way: int = 0
    load_bytes: int = 0


# The first that matches holds.
LIMITS = (
    # The codes of rows of 64 columns begin at multiples of 4 bytes where a row has 4 more bytes, of
    # 8 where a scale and an offset of 8 bytes follow, and of 16 where codes are all.
    Limit("pool", "D(64|128|256) trained int8 ", round_trips=3, before_store=5, load_bytes=8),
    Limit("pool", "D(64|128|256) float8 ", round_trips=3, before_store=5, load_bytes=16),
    Limit("pool", "D(64|128|256) (int|float8_e)", round_trips=3, before_store=5, load_bytes=4),
    Limit("copy_rows", "D(64|128) trained int8 ", round_trips=2, before_store=2, load_bytes=8),
    Limit("copy_rows", "D(64|128) float8 ", round_trips=2, before_store=2, load_bytes=16),
    Limit("copy_rows", "D(64|128) (int|float8_e)", round_trips=2, before_store=2, load_bytes=4),
    # Fewer bytes under way than several rows of a bag at a time have, and faster; see docs/gpu.md.
    Limit("pool", "(D64|D128|D256) .* L(1|3|20)$", round_trips=3, bytes_under_way=24_000),
    Limit("pool", "", round_trips=9),
    Limit("copy_rows", "", round_trips=2),
    Limit("sum_part", "", round_trips=6),
    Limit("sum_block", "", round_trips=6),
    Limit("square_runs", "", round_trips=6),
    # A run of one lookup takes two before its first store. This counts both loops, once each.
    Limit("update", "adagrad (D16|D64|D128) .* L20$", round_trips=2, before_store=5),
    Limit("update", "", round_trips=9),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the compilation.

    Attributes:
        card: Card to compile for.
        quick: Compile two widths and one optimizer only.
        steps: Whether to compile training steps.
        only: Regular expression found in the names of the programs to compile; None: all.
    """

    card: Literal[tuple(CARDS)] = "h200"  # type: ignore[valid-type]
    quick: bool = False
    steps: bool = True
    only: str | None = None


@dataclasses.dataclass
class Report:
    """Lines of the results, and sentences about failures."""

    card: Card
    kernels: list[str] = dataclasses.field(default_factory=list)
    steps: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    def page(self, options: str) -> str:
        """Return the results, made with options of the command line, in Markdown."""
        failures = [f"- {failure}" for failure in self.failures] or ["None."]
        return "\n".join(
            [
                f"# Kernels compiled for {self.card.name}\n",
                f"Made by `python -m benchmarks.gpu.compile{options}` without a GPU, by JAX "
                f"{jax.__version__}. Nothing was timed; docs/gpu.md says what the figures mean.\n",
                *KERNEL_HEADER,
                *self.kernels,
                "",
                *STEP_HEADER,
                *self.steps,
                "\nFailures:\n",
                *failures,
                "",
            ]
        )


KERNEL_HEADER = (
    "| program | kernel | registers | warps resident | round trips a turn (KB under way) "
    "| round trips before first store | of a tile without its loop | blocks "
    "| share of the bound, % | by its loop alone |",
    "|---|---|---|---|---|---|---|---|---|---|",
)
STEP_HEADER = (
    "| step | arguments GB | temporaries GB | fusions | kernel calls | while loops "
    "| kernels with float atomics |",
    "|---|---|---|---|---|---|---|",
)


def main(options: Options) -> None:
    warnings.filterwarnings("ignore", message=".*Triton.*", category=DeprecationWarning)
    card, tools = CARDS[options.card], find_tools()
    report = Report(card)
    print(*KERNEL_HEADER, sep="\n")
    for program in (*programs.calls(options.quick), *programs.packed_calls(options.quick)):
        if options.only and not re.search(options.only, program.name):
            continue
        compiled = compile_program(program, report)
        if compiled is None:
            continue
        check_memory(program, compiled, report)
        shapes = launches(compiled.as_text())
        for kernel in kernels(compiled, tools, EXCEPT_SORTS):
            if kernel.name in shapes:
                check_kernel(program, kernel, shapes[kernel.name], report)
                print(report.kernels[-1], flush=True)
            check_atomics(program, kernel, report)
    if options.steps:
        print(*STEP_HEADER, sep="\n")
        for program in programs.steps():
            if options.only and not re.search(options.only, program.name):
                continue
            if (compiled := compile_program(program, report)) is not None:
                check_step(program, compiled, tools, report)
                print(report.steps[-1], flush=True)
    print(*report.failures or ["No failure."], sep="\n")
    if options.only is None and options.steps:
        path = RESULTS / f"compiled.{options.card}.md"
        path.write_text(report.page(" --quick" if options.quick else ""))
        print(path)
    sys.exit(bool(report.failures))


def compile_program(program: Program, report: Report) -> Any:
    """Return the compiled program; None, and a failure, where it does not compile."""
    try:
        return report.card.compile(program.function, *program.arguments, donate=program.donate)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        report.failures.append(f"{program.name} does not compile: {type(error).__name__}: {reason}")
        return None


def check_memory(program: Program, compiled: Any, report: Report) -> None:
    """Note copies of tables and temporaries as large as the tables."""
    for shape in program.tables:
        size = ",".join(map(str, shape))
        if re.search(rf"\[{size}\]\S* copy(-start)?\(", compiled.as_text()):
            report.failures.append(f"{program.name} copies an array of a table's shape [{size}].")
    tables = sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in jax.tree.leaves(program.arguments)
        if x.shape in program.tables
    )
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    if tables and temporaries >= tables:
        report.failures.append(
            f"{program.name} takes {temporaries / 1e9:.2f} GB of temporaries for tables of "
            f"{tables / 1e9:.2f} GB."
        )
    if program.temporaries is not None and temporaries > program.temporaries:
        report.failures.append(
            f"{program.name} takes {temporaries:,} bytes of temporaries, over "
            f"{program.temporaries:,}."
        )


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched: warps of a block, and blocks where they are known."""

    warps: int
    blocks: int | None = None


def launches(text: str) -> dict[str, Launch]:
    """Return how each Triton kernel of an optimized program is launched, by its name."""
    result = {}
    for line in text.splitlines():
        if "num_warps" in line and (name := re.search(r'name = "(\w+)"', line)):
            warps = re.search(r"num_warps = (\d+)", line)
            blocks = re.search(r"grid_x = (\d+)", line)
            assert warps is not None
            result[name[1]] = Launch(int(warps[1]), int(blocks[1]) if blocks else None)
    return result


def check_kernel(program: Program, kernel: Kernel, launch: Launch, report: Report) -> None:
    """Add a kernel's line, and hold it to its limit."""
    resident = report.card.resident_warps(kernel.registers, launch.warps, kernel.shared_memory)
    before = kernel.before_first_store
    turns = [(each.round_trips, each.bytes_under_way(resident)) for each in kernel.turns]
    cells = [
        program.name,
        kernel.name,
        kernel.registers,
        resident,
        ", ".join(f"{trips:g} ({size / 1e3:.0f})" for trips, size in turns),
        f"{before.round_trips:g}",
        f"{kernel.tile.round_trips:g}",
        launch.blocks or "",
        *shares_of_bound(program, kernel, resident, report.card),
    ]
    report.kernels.append(f"| {' | '.join(map(str, cells))} |")

    where = f"{kernel.name} of {program.name}"
    if kernel.spilled:
        report.failures.append(f"{where} spills {kernel.spilled} bytes a thread.")
    limit = next(
        (
            each
            for each in LIMITS
            if each.kernel == kernel.name and re.search(each.programs, program.name)
        ),
        None,
    )
    if limit is None:
        return
    for trips, size in turns:
        if trips > limit.round_trips:
            report.failures.append(
                f"{where} has {trips:g} round trips in a turn of a loop, over {limit.round_trips}."
            )
        if size < limit.bytes_under_way:
            report.failures.append(
                f"{where} has {size / 1e3:.0f} KB under way, below {limit.bytes_under_way / 1e3:g}."
            )
    widest = min((max(each.loads) for each in [*kernel.turns, before]), default=0)
    if widest < limit.load_bytes:
        report.failures.append(
            f"{where} loads at most {widest} bytes at once, below {limit.load_bytes}."
        )
    if limit.before_store is not None and before.round_trips > limit.before_store:
        report.failures.append(
            f"{where} has {before.round_trips:g} round trips before its first store, over "
            f"{limit.before_store}."
        )


def shares_of_bound(program: Program, kernel: Kernel, resident: int, card: Card) -> list[str]:
    """Return the estimated shares of the card's memory in percent; "" where there are none."""
    work = program.work
    if work is None or work.kernel != kernel.name:
        return ["", ""]
    every = (estimate(card, kernel, resident) for estimate in (work.shares, work.simple_shares))
    return [" to ".join(dict.fromkeys(f"{100 * share:.0f}" for share in each)) for each in every]


def check_atomics(program: Program, kernel: Kernel, report: Report) -> None:
    """Note a kernel that adds floats by atomics."""
    if kernel.float_atomics:
        report.failures.append(
            f"{kernel.name} of {program.name} adds floats by {', '.join(kernel.float_atomics)}."
        )


def check_step(program: Program, compiled: Any, tools: pathlib.Path, report: Report) -> None:
    """Add a training step's line, and hold it to the rules."""
    check_memory(program, compiled, report)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    entry = collections.Counter(re.findall(r" ([a-z-]+)\(", text[text.index("\nENTRY") :]))
    every = kernels(compiled, tools, EXCEPT_SORTS)
    atomic = [kernel for kernel in every if kernel.float_atomics]
    cells = [
        program.name,
        f"{memory.argument_size_in_bytes / 1e9:.2f}",
        f"{memory.temp_size_in_bytes / 1e9:.2f}",
        entry["fusion"],
        entry["custom-call"],
        len(re.findall(r" while\(", text)),
        len(atomic),
    ]
    report.steps.append(f"| {' | '.join(map(str, cells))} |")
    for kernel in atomic:
        check_atomics(program, kernel, report)


def find_tools() -> pathlib.Path:
    """Return the folder of cuobjdump and nvdisasm: that of the package triton, or of a CUDA."""
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        return pathlib.Path(spec.origin).parent / "backends/nvidia/bin"
    if (found := shutil.which("nvdisasm")) is not None:
        return pathlib.Path(found).parent
    sys.exit("neither the package triton nor a CUDA toolkit is here; docs/gpu.md names the set-up")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
