"""Compiles lookups, updates and training steps for TPUs without one.

    python -m benchmarks.tpu.compile [--chip v5e v6e v5p] [--quick] [--only REGEX]

Prints a line for each program and chip, then a sentence for each failure; the exit status is 1 if
there is one. Except with ``--quick`` or ``--no-write``, it then writes the lines into
``benchmarks/results/compiled.tpu-<chip>.jax-<version>.md``, which keeps those of other programs.
docs/tpu.md says how to set this up and what the figures mean.

A failure is: a program that does not compile; a copy of a table or of its state; tables that are
not changed in place; or temporaries as large as the chip's memory. Programs that are known to fail
are not supported: the pages list them apart, and they do not count for the exit status.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Literal

# No CPU computes anything here, and no metadata server of a TPU is asked.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
# Described chips are nobody's, so several processes may compile at once.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Models over a mesh are made on as many simulated devices.
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
)

import jax
import tyro

from benchmarks.tpu import programs
from benchmarks.tpu.chips import CHIPS, Chip
from benchmarks.tpu.findings import Findings
from benchmarks.tpu.pages import HEADER, RESULTS, Results, page
from benchmarks.tpu.programs import Lowered, Program


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the compilation.

    Attributes:
        chip: Chips to compile for.
        quick: Compile the few programs that CI compiles.
        write: Whether to write the pages of results; ``quick`` never does.
        only: Regular expression found in the names of the programs to compile; None: all.
    """

    chip: tuple[Literal[tuple(CHIPS)], ...] = tuple(CHIPS)  # type: ignore[valid-type]
    quick: bool = False
    write: bool = True
    only: str | None = None


def main(options: Options) -> None:
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    if (reason := missing()) is not None:
        sys.exit(reason)
    versions = f"JAX {jax.__version__}, libtpu {importlib.metadata.version('libtpu')}"
    every, failed = list(programs.every()), False
    print(*HEADER, sep="\n")
    for chip in options.chip:
        path = RESULTS / f"compiled.tpu-{chip}.jax-{jax.__version__}.md"
        results = Results.read(path)
        failures: list[str] = []
        for program in every:
            if chip not in program.chips or (options.quick and not program.is_quick):
                continue
            if options.only is not None and not re.search(options.only, program.name):
                continue
            line, reasons = compiled(program, CHIPS[chip])
            results.add(program.name, line, reasons)
            failures += reasons if program.is_supported else []
            print(line, *reasons, sep="\n", flush=True)
            # After each program, since a run of all of them takes long.
            if options.write and not options.quick:
                path.write_text(page(chip, results, every, versions))
        print("Failed." if failures else "No failure.", flush=True)
        failed |= bool(failures)
    sys.exit(failed)


def missing() -> str | None:
    """Return why nothing can be compiled for TPUs here; None: it can."""
    try:
        import libtpu  # noqa: F401
    except ImportError:
        return "the package libtpu is not installed; docs/tpu.md names the set-up"
    return None


def compiled(program: Program, chip: Chip) -> tuple[str, list[str]]:
    """Compile a program for a chip; return its line, and sentences about failures."""
    start, name = f"| {program.name} | {chip.name} |", f"{program.name} for {chip.name}"
    try:
        lowered = program.lower(chip)
        # Processor time of all threads. Wall-clock time would depend on other programs.
        before = time.process_time()
        executable = lowered.lowered.compile()
        seconds = time.process_time() - before
        found = Findings.of(executable, lowered.tables)
    except Exception as error:
        reason = " ".join(str(error).split()).replace("|", "\\|")[:300]
        cells = [f"{type(error).__name__}: {reason}", *[""] * len(Findings.HEADERS)]
        return f"{start} {' | '.join(cells)} |", [f"{name} does not compile: {reason}"]
    line = f"{start} {' | '.join([*found.cells(), f'{seconds:.1f}'])} |"
    return line, list(check(name, found, lowered, chip))


def check(name: str, found: Findings, lowered: Lowered, chip: Chip) -> Iterator[str]:
    """Yield a sentence for each rule that a compiled program breaks."""
    for shape in found.copies:
        yield f"{name} copies an array of a table's shape {shape}."
    if found.in_place < lowered.table_bytes:
        yield (
            f"{name} changes {found.in_place / 1e6:.1f} MB in place, less than its tables' "
            f"{lowered.table_bytes / 1e6:.1f} MB."
        )
    needed, memory = found.arguments + found.temporaries, chip.machine(1).memory
    if needed > memory:
        yield f"{name} needs {needed / 1e9:.1f} GB of the chip's {memory / 1e9:.1f} GB."


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
