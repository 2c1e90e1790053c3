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
from jaxrec.data.convert import convert, is_converted
from jaxrec.data.parts import Conversion
from jaxrec.data.text import BadLine, DataError

USAGE_ERRORS = (ConfigError,)
FAILURES = (DataError,)

FORMATS = ("criteo",)

# Bad lines that are shown one by one.
SHOWN = 20

# No file has this name.
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

    A run that was stopped goes on where it was when the same command is given again.
    """

    input: Annotated[pathlib.Path, tyro.conf.Positional, _required("INPUT")] = _NOT_GIVEN
    """Text file, plain or gzip, or a directory of them."""
    output: Annotated[pathlib.Path, tyro.conf.Positional, _required("OUTPUT")] = _NOT_GIVEN
    """Directory of the Parquet files."""
    ids: Literal["hash", "contiguous", "raw"] = "hash"
    """What ids become: themselves modulo table-rows; row numbers in order of appearance, one for
    all rare ids; or themselves."""
    table_rows: tuple[int, ...] = (100_000,)
    """For hash: rows of the tables, one number for all or 26."""
    threshold: int = 1
    """For contiguous: how often an id appears that gets a row of its own."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """What to do with a line that is no row: stop, or leave it out and report it."""
    compression: Literal["lz4", "zstd", "none"] = "lz4"
    """Of the Parquet files."""
    threads: int | None = None
    """How many parse; one a core if not given."""


def run(options: Sequence[str]) -> int:
    """Runs ``jaxrec data``; returns the exit code."""
    name, *rest = list(options) or ["--help"]
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}; there is {', '.join(FORMATS)}")
    return _criteo(parse("data criteo", rest, CriteoOptions()))


def _criteo(said: CriteoOptions) -> int:
    if _NOT_GIVEN in (said.input, said.output):
        raise ConfigError("give the log and the directory of the Parquet files: INPUT OUTPUT")
    if said.threads is not None and said.threads < 1:
        raise ConfigError(f"threads must be 1 or more, got {said.threads}")
    try:
        conversion = Conversion(
            said.ids, said.table_rows, said.threshold, said.bad_rows, said.compression
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    is_done = is_converted(said.output)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    shown = 0

    def report(bad: BadLine) -> None:
        nonlocal shown
        shown += 1
        if shown <= SHOWN:
            console.print(f"left out: {bad}")
        elif shown == SHOWN + 1:
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
            said.input,
            said.output,
            conversion,
            threads=said.threads,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            report=report,
        )
    console.print(
        f"{summary.rows:,} rows in {said.output}"
        + (f", {summary.bad_lines:,} bad lines left out" if summary.bad_lines else "")
        + ("; they were made before, nothing is left to do" if is_done else "")
    )
    return 0
