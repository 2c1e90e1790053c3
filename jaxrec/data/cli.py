"""The command ``jaxrec data``."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from jaxrec.arguments import ConfigError, parse
from jaxrec.data.conversion import convert, is_converted
from jaxrec.data.parts import Conversion
from jaxrec.data.text import BadLine, DataError

USAGE_ERRORS = (ConfigError,)
FAILURES = (DataError,)

FORMATS = ("criteo",)

# Number of bad lines that are printed; all are counted.
MAX_PRINTED = 20

# Default of required paths; no file has this name.
_NOT_GIVEN = pathlib.Path("\0")

USAGE = """usage: jaxrec data FORMAT INPUT OUTPUT [OPTIONS]

  criteo   Criteo's click logs as text, plain or gzip (Kaggle, 1TB), to Parquet files

INPUT is a file or a directory of files, OUTPUT the directory of the Parquet files, which
`jaxrec train --data OUTPUT` reads.
`jaxrec data criteo --help` lists options."""


def _required(name: str) -> Any:
    return tyro.conf.arg(metavar=name, help_behavior_hint="(required)")


@dataclasses.dataclass(frozen=True)
class CriteoOptions:
    """Write Criteo's click log (Kaggle or 1TB) as Parquet files.

    The same command continues a conversion that was stopped.
    """

    input: Annotated[pathlib.Path, tyro.conf.Positional, _required("INPUT")] = _NOT_GIVEN
    """Text file, plain or gzip, or a directory of them."""
    output: Annotated[pathlib.Path, tyro.conf.Positional, _required("OUTPUT")] = _NOT_GIVEN
    """Directory of the Parquet files."""
    ids: Literal["hash", "contiguous", "raw"] = "hash"
    """How ids become row indices. hash: the id modulo table-rows. contiguous: the order of first
    appearance; all rare ids share one row. raw: ids are kept."""
    table_rows: tuple[int, ...] = (100_000,)
    """For hash: number of rows of each table, one number or 26."""
    threshold: int = 1
    """For contiguous: number of appearances from which an id has its own row."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """At a malformed line stop, or skip and report it."""
    compression: Literal["lz4", "zstd", "none"] = "lz4"
    """Compression of the Parquet files."""
    threads: int | None = None
    """Number of threads that parse; by default one per core."""


def run(options: Sequence[str]) -> int:
    """Run ``jaxrec data``; return the exit code."""
    name, *rest = list(options) or ["--help"]
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}; there is {', '.join(FORMATS)}")
    return _criteo(parse("data criteo", rest, CriteoOptions()))


def _criteo(options: CriteoOptions) -> int:
    if _NOT_GIVEN in (options.input, options.output):
        raise ConfigError("give the log and the directory of the Parquet files: INPUT OUTPUT")
    if options.threads is not None and options.threads < 1:
        raise ConfigError(f"threads must be 1 or more, got {options.threads}")
    try:
        conversion = Conversion(
            options.ids,
            options.table_rows,
            options.threshold,
            options.bad_rows,
            options.compression,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    is_done = is_converted(options.output)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    printed = 0

    def report(bad: BadLine) -> None:
        nonlocal printed
        printed += 1
        if printed <= MAX_PRINTED:
            console.print(f"left out: {bad}")
        elif printed == MAX_PRINTED + 1:
            console.print("more are left out, and counted")

    bar = Progress(
        TextColumn("reading"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("")
        summary = convert(
            options.input,
            options.output,
            conversion,
            threads=options.threads,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            report=report,
        )
    console.print(
        f"{summary.rows:,} rows in {options.output}"
        + (f", {summary.bad_lines:,} bad lines left out" if summary.bad_lines else "")
        + ("; they were made before, nothing is left to do" if is_done else "")
    )
    return 0
