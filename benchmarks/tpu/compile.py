"""Compiles lookups, updates and training steps for TPUs without one.

    python -m benchmarks.tpu.compile [--chip v5e v6e v5p] [--quick] [--only REGEX]

Prints a line for each program and chip, then a sentence for each failure; the exit status is 1 if
there is one. A run of all programs writes ``compiled.tpu-<chip>.jax-<version>.md`` for each chip to
``benchmarks/results``. docs/tpu.md says how to set this up and what the figures mean.

A failure is: a program that does not compile; a copy of a table or of its state; tables that are
not changed in place; or temporaries as large as the chip's memory.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, Literal

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
from benchmarks.tpu.programs import Lowered, Program

RESULTS = pathlib.Path(__file__).parents[1] / "results"
HEADER = (
    f"| program | chip | {' | '.join(Findings.HEADERS)} | compiled in s |",
    "|---|---|" + "---|" * (len(Findings.HEADERS) + 1),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the compilation.

    Attributes:
        chip: Chips to compile for.
        quick: Compile the few programs that CI compiles.
        write: Whether a run of all programs writes the pages of results.
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
    failed = False
    print(*HEADER, sep="\n")
    for chip in options.chip:
        lines: list[str] = []
        failures: list[str] = []
        for program in programs.every():
            if options.quick and not program.is_quick:
                continue
            if options.only is not None and not re.search(options.only, program.name):
                continue
            line, reasons = compiled(program, CHIPS[chip])
            lines.append(line)
            failures += reasons
            print(line, flush=True)
        print(*failures or ["No failure."], sep="\n", flush=True)
        failed |= bool(failures)
        if options.write and not options.quick and options.only is None:
            path = RESULTS / f"compiled.tpu-{chip}.jax-{jax.__version__}.md"
            path.write_text(page(chip, lines, failures))
            print(path)
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


def page(chip: str, lines: list[str], failures: list[str]) -> str:
    """Return the results for a chip in Markdown."""
    import libtpu

    reasons: list[Any] = [f"- {each}" for each in failures] or ["None."]
    return "\n".join(
        [
            f"# Programs compiled for a TPU {chip} by JAX {jax.__version__}, "
            f"libtpu {libtpu.__version__}\n",
            f"Made by `python -m benchmarks.tpu.compile --chip {chip}` without a TPU. Nothing was "
            "timed; docs/tpu.md says what the figures mean.\n",
            *HEADER,
            *lines,
            "\nFailures:\n",
            *reasons,
            "",
        ]
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
