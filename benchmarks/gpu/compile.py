"""Compiles the kernels for NVIDIA GPUs without one, and holds their machine code to limits.

    python -m benchmarks.gpu.compile [--card h200] [--quick] [--no-steps] [--only REGEX]
    python -m benchmarks.gpu.compile --backends mosaic
    python -m benchmarks.gpu.compile --attention alone

Prints a line for each kernel and each training step, then a sentence for each failure; the exit
status is 1 if there is one. A run of all backends without ``--only`` writes
``benchmarks/results/compiled.<card>.jax-<version>.md``, unless told ``--no-write``; HSTU attention,
which has kernels for Hopper cards alone, has a page ``compiled_attention.*`` of its own.
docs/internals/gpu.md says how to set this up and what the figures mean.

A failure is: a program that does not compile; a spill; a copy of a table, or temporaries as large
as the tables; an addition of floats by atomics; more round trips to memory, fewer bytes under way
or more launches than `benchmarks.gpu.limits` allows; or a kernel of attention that breaks a rule of
`benchmarks.gpu.matrix_code`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import pathlib
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

# GEMMs are not tuned without a card, and no CPU computes anything here.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}"
# What `jaxrec tune` chose on this machine does not count here.
os.environ["JAXREC_CACHE_DIR"] = str(pathlib.Path(__file__).with_name("no answers"))

import jax
import tyro

from benchmarks.gpu import attention_programs, matrix_code, programs
from benchmarks.gpu.backends import BACKENDS, module, reason_missing
from benchmarks.gpu.cards import CARDS, Card
from benchmarks.gpu.launches import Launches
from benchmarks.gpu.limits import PRIMITIVES, failures, limit_of, most_launches
from benchmarks.gpu.machine_code import Kernel, kernels
from benchmarks.gpu.programs import Program

# XLA's sorting kernels are many, and only move integers.
EXCEPT_SORTS = r"(?!.*sort)"
RESULTS = pathlib.Path(__file__).parents[1] / "results"


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the compilation.

    Attributes:
        card: Card to compile for.
        backends: Backends of the kernels; none: all that this JAX has.
        quick: Compile two widths, one optimizer and small batches only.
        steps: Whether to compile training steps.
        attention: Whether to compile HSTU attention for a Hopper card, too, or alone.
        write: Whether to write the page of results.
        only: Regular expression found in the names of the programs to compile; None: all.
    """

    card: Literal[tuple(CARDS)] = "h200"  # type: ignore[valid-type]
    backends: tuple[Literal[BACKENDS], ...] = ()  # type: ignore[valid-type]
    quick: bool = False
    steps: bool = True
    attention: Literal["too", "alone", "not"] = "too"
    write: bool = True
    only: str | None = None


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """A kernel of a program: a line of the results."""

    program: str
    kernel: Kernel
    resident: int
    blocks: int | None
    shares: tuple[str, str]

    def __str__(self) -> str:
        before, tile = self.kernel.before_first_store, self.kernel.tile
        cells = (
            self.program,
            self.kernel.name,
            self.kernel.registers,
            self.resident,
            self.turns,
            f"{before.round_trips:g}",
            f"{tile.round_trips:g}",
            self.blocks or "",
            *self.shares,
        )
        return f"| {' | '.join(map(str, cells))} |"

    @property
    def turns(self) -> str:
        """Round trips of each loop's turn, with the KB under way."""
        return ", ".join(
            f"{each.round_trips:g} ({each.bytes_under_way(self.resident) / 1e3:.0f})"
            for each in self.kernel.turns
        )


@dataclasses.dataclass
class Report:
    """Lines of the results, and sentences about failures."""

    card: Card
    kernels: list[KernelRow] = dataclasses.field(default_factory=list)
    calls: list[str] = dataclasses.field(default_factory=list)
    steps: list[str] = dataclasses.field(default_factory=list)
    attention: list[str] = dataclasses.field(default_factory=list)
    refused: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    def attention_page(self, options: str) -> str:
        """Return the results of HSTU attention, in Markdown."""
        failed = [f"- {each}" for each in self.failures if " attention" in each] or ["None."]
        calls = [each for each in self.calls if " attention" in each]
        return "\n".join(
            [
                f"# HSTU attention compiled for {self.card.name} by JAX {jax.__version__}\n",
                f"Made by `python -m benchmarks.gpu.compile{options}` without a GPU. Nothing was "
                "timed; docs/internals/gpu.md says what the figures mean.\n",
                *ATTENTION_HEADER,
                *self.attention,
                "\nKernels and the like that a call launches:\n",
                *CALL_HEADER,
                *calls,
                "\nBounds by the tensor cores alone, which no schedule can exceed:\n",
                *attention_programs.BOUND_HEADER,
                *attention_programs.bounds(self.card),
                "\nFailures:\n",
                *failed,
                "",
            ]
        )

    def page(self, options: str, contents: str) -> str:
        """Return the results, made with options of the command line, in Markdown.

        ``contents`` is a sentence about the programs.
        """
        failed = [f"- {failure}" for failure in self.failures] or ["None."]
        refused = ["\nNot taken:\n", *(f"- {each}" for each in self.refused)]
        return "\n".join(
            [
                f"# Kernels compiled for {self.card.name} by JAX {jax.__version__}\n",
                f"Made by `python -m benchmarks.gpu.compile{options}` without a GPU. Nothing was "
                "timed; docs/internals/gpu.md says what the figures mean.\n",
                f"{contents}\n",
                *KERNEL_HEADER,
                *map(str, self.kernels),
                "\nKernels and the like that a call launches:\n",
                *CALL_HEADER,
                *self.calls,
                *(["\nTraining steps:\n", *STEP_HEADER, *self.steps] if self.steps else []),
                *(refused if self.refused else []),
                "\nFailures:\n",
                *failed,
                "",
            ]
        )


KERNEL_HEADER = (
    "| program | kernel | registers | warps resident | round trips a turn (KB under way) "
    "| round trips before first store | of a tile without its loop | blocks "
    "| share of the bound, % | by its loop alone |",
    "|---|---|---|---|---|---|---|---|---|---|",
)
CALL_HEADER = (
    f"| call | launches | {' | '.join(Launches.NAMES)} |",
    "|---|---|" + "---|" * len(Launches.NAMES),
)
ATTENTION_HEADER = (
    "| program | kernel | registers | spilled bytes | matrix products a turn | waits for them "
    "| clocks of the tensor cores | of special functions | instructions | with a mask "
    "| copies by the copy engine |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)
STEP_HEADER = (
    "| step | arguments GB | of them in place | temporaries GB | kernels with float atomics "
    f"| launches | {' | '.join(Launches.NAMES)} |",
    "|---|---|---|---|---|---|" + "---|" * len(Launches.NAMES),
)


def main(options: Options) -> None:
    warnings.filterwarnings("ignore", message=".*Triton.*", category=DeprecationWarning)
    card, tools = CARDS[options.card], find_tools()
    report = Report(card)
    backends = options.backends or [x for x in BACKENDS if reason_missing(x) is None]
    if options.attention != "not" and "mosaic" in backends and card.major == 9:
        compile_attention(options, tools, report)
    if options.attention == "alone":
        print(*report.failures or ["No failure."], sep="\n")
        sys.exit(bool(report.failures))
    print(*KERNEL_HEADER, sep="\n")
    for program in _chosen(calls(backends, options.quick), options.only):
        if (reason := programs.refusal(program)) is not None:
            report.refused.append(f"{program.name}: {reason}")
        elif (built := build(program, report)) is not None:
            check_call(program, built, tools, report)
    print(*CALL_HEADER, *report.calls, sep="\n", flush=True)
    if options.steps:
        print(*STEP_HEADER, sep="\n")
        for program in _chosen(programs.steps(backends, options.quick), options.only):
            if (built := build(program, report)) is not None:
                check_step(program, built, tools, report)
                print(report.steps[-1], flush=True)
    print(*report.failures or ["No failure."], sep="\n")
    if options.write and options.only is None and not options.backends:
        path = RESULTS / f"compiled.{options.card}.jax-{jax.__version__}.md"
        used = "" if options.card == "h200" else f" --card {options.card}"
        used += " --quick" if options.quick else ""
        used += "" if options.steps else " --no-steps"
        path.write_text(report.page(used, contents(backends, options.quick, options.steps)))
        print(path)
    sys.exit(bool(report.failures))


def compile_attention(options: Options, tools: pathlib.Path, report: Report) -> None:
    """Compile the calls of HSTU attention, and write their page."""
    print(*ATTENTION_HEADER, sep="\n")
    for program in _chosen(attention_programs.calls(options.quick), options.only):
        if (built := build(program, report)) is not None:
            check_attention(program, built, tools, report)
    if options.write and options.only is None and not options.quick:
        path = RESULTS / f"compiled_attention.{options.card}.jax-{jax.__version__}.md"
        used = "" if options.card == "h200" else f" --card {options.card}"
        path.write_text(report.attention_page(f"{used} --attention alone"))
        print(path)


def contents(backends: Sequence[str], quick: bool, steps: bool) -> str:
    """Return a sentence about the programs of a run."""
    calls = "rows of 64 and 128 columns, 20 ids a bag, row-wise Adagrad" if quick else "all calls"
    if not steps:
        of_steps = "no training steps"
    else:
        of_steps = "training steps but the largest" if quick else "all training steps"
    return f"Programs of {', '.join(backends)} and XLA: {calls}; {of_steps}."


def calls(backends: Any, quick: bool) -> Iterator[Program]:
    """Yield the calls of all backends, and of XLA."""
    for backend in backends:
        yield from programs.calls(module(backend), quick)
        yield from programs.packed_calls(module(backend), quick)
    yield from programs.reference_calls()


def _chosen(every: Iterator[Program], only: str | None) -> Iterator[Program]:
    return (program for program in every if only is None or re.search(only, program.name))


@dataclasses.dataclass(frozen=True)
class Built:
    """A compiled program, and what it hands to a card."""

    compiled: Any
    launches: Launches


def build(program: Program, report: Report) -> Built | None:
    """Compile a program; return None, and note a failure, where it does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        dump = pathlib.Path(folder)
        try:
            compiled = report.card.compile(
                program.function, *program.arguments, donate=program.donate, dump=dump
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            name = type(error).__name__
            report.failures.append(f"{program.name} does not compile: {name}: {reason}")
            return None
        return Built(compiled, Launches.of(dump))


def check_call(program: Program, built: Built, tools: pathlib.Path, report: Report) -> None:
    """Add the lines of a call and of its kernels, and hold it to the rules."""
    check_program(program, built, report)
    launches, every = built.launches, kernels(built.compiled, tools, EXCEPT_SORTS)
    names = triton_kernels(built.compiled.as_text())
    own = [kernel for kernel in every if kernel.is_mosaic or kernel.name in names]
    for kernel in own:
        resident = report.card.resident_warps(kernel.registers, kernel.warps, kernel.shared_memory)
        shares = shares_of_bound(program, kernel, resident, report.card)
        blocks = launches.blocks.get(kernel.name)
        report.kernels.append(KernelRow(program.name, kernel, resident, blocks, shares))
        print(report.kernels[-1], flush=True)
        report.failures += failures(kernel, program.name, report.card.name, resident)
    for kernel in every:
        if kernel not in own and kernel.float_atomics:
            report.failures += failures(kernel, program.name, report.card.name, 0)
    backend, primitive, *_ = program.name.split()
    is_held = any(limit_of(kernel.name, program.name, report.card.name) for kernel in own)
    if backend != "reference" and primitive in PRIMITIVES and not is_held:
        has = ", ".join(kernel.name for kernel in own) or "none"
        report.failures.append(f"No kernel of {program.name} has a limit: it has {has}.")
    report.calls.append(f"| {' | '.join(map(str, (program.name, *launches.cells())))} |")


def check_attention(program: Program, built: Built, tools: pathlib.Path, report: Report) -> None:
    """Add the lines of a call of attention, and hold its kernels to their rules."""
    found = [each for each in kernels(built.compiled, tools, "hstu") if each.is_mosaic]
    if not found:
        report.failures.append(f"{program.name} has no kernel.")
    for kernel in found:
        report.failures += matrix_code.failures(kernel, program.name)
        copies = sum(each.name.startswith("UTMALDG") for each in kernel.instructions)
        for loop in matrix_code.loops_of(kernel):
            cells = (
                program.name,
                kernel.name,
                kernel.registers,
                kernel.spilled,
                loop.products,
                loop.waits,
                f"{loop.tensor_clocks:.0f}",
                f"{loop.special_clocks:.0f}",
                loop.whole,
                loop.masked,
                copies,
            )
            report.attention.append(f"| {' | '.join(map(str, cells))} |")
            print(report.attention[-1], flush=True)
    calls = program.name, *built.launches.cells()
    report.calls.append(f"| {' | '.join(map(str, calls))} |")


def check_step(program: Program, built: Built, tools: pathlib.Path, report: Report) -> None:
    """Add a training step's line, and hold it to the rules."""
    check_program(program, built, report)
    memory = built.compiled.memory_analysis()
    atomic = [x for x in kernels(built.compiled, tools, EXCEPT_SORTS) if x.float_atomics]
    cells = [
        program.name,
        f"{memory.argument_size_in_bytes / 1e9:.2f}",
        f"{memory.alias_size_in_bytes / 1e9:.2f}",
        f"{memory.temp_size_in_bytes / 1e9:.2f}",
        len(atomic),
        *built.launches.cells(),
    ]
    report.steps.append(f"| {' | '.join(map(str, cells))} |")
    for kernel in atomic:
        report.failures += failures(kernel, program.name, report.card.name, 0)


def triton_kernels(text: str) -> set[str]:
    """Return the names of the Triton kernels of an optimized program."""
    lines = (line for line in text.splitlines() if "num_warps" in line)
    return {found[1] for line in lines if (found := re.search(r'name = "(\w+)"', line))}


def check_program(program: Program, built: Built, report: Report) -> None:
    """Note copies of tables, large temporaries, tables that are not changed in place, launches."""
    compiled, total = built.compiled, built.launches.total
    if (most := most_launches(program.name)) is not None and total > most:
        report.failures.append(f"{program.name} takes {total} launches, over {most}.")
    for shape in program.tables:
        size = ",".join(map(str, shape))
        if re.search(rf"\[{size}\]\S* copy(-start)?\(", compiled.as_text()):
            report.failures.append(f"{program.name} copies an array of a table's shape [{size}].")
    tables = sum(
        math.prod(x.shape) * x.dtype.itemsize
        for x in jax.tree.leaves(program.arguments)
        if x.shape in program.tables
    )
    memory = compiled.memory_analysis()
    temporaries = memory.temp_size_in_bytes
    if program.temporaries is None and tables and temporaries >= tables:
        report.failures.append(
            f"{program.name} takes {temporaries / 1e9:.2f} GB of temporaries for tables of "
            f"{tables / 1e9:.2f} GB."
        )
    if program.temporaries is not None and temporaries > program.temporaries:
        report.failures.append(
            f"{program.name} takes {temporaries:,} bytes of temporaries, over "
            f"{program.temporaries:,}."
        )
    if program.donate and memory.alias_size_in_bytes < tables:
        report.failures.append(
            f"{program.name} changes {memory.alias_size_in_bytes / 1e9:.2f} GB in place, less "
            f"than its tables' {tables / 1e9:.2f} GB."
        )


def shares_of_bound(program: Program, kernel: Kernel, resident: int, card: Card) -> tuple[str, str]:
    """Return the estimated shares of the card's memory in percent; "" where there are none."""
    work = program.work
    if work is None or work.kernel != kernel.name:
        return "", ""
    stricter, simple = (
        " to ".join(
            dict.fromkeys(f"{100 * share:.0f}" for share in estimate(card, kernel, resident))
        )
        for estimate in (work.shares, work.simple_shares)
    )
    return stricter, simple


def find_tools() -> pathlib.Path:
    """Return the folder of cuobjdump and nvdisasm: that of the package triton, or of a CUDA."""
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        return pathlib.Path(spec.origin).parent / "backends/nvidia/bin"
    if (found := shutil.which("nvdisasm")) is not None:
        return pathlib.Path(found).parent
    sys.exit(
        "neither the package triton nor a CUDA toolkit is here; docs/internals/gpu.md names the "
        "set-up"
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
