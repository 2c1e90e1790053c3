"""The command ``jaxrec data``, which converts logs between formats."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
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

from jaxrec.arguments import NOT_GIVEN, ConfigError, parse, required
from jaxrec.data.addresses import Address, data_path
from jaxrec.data.criteo.conversion import convert, is_converted
from jaxrec.data.criteo.exports import Counts, DayFiles, write_multi_hot, write_npy, write_records
from jaxrec.data.criteo.parts import Conversion
from jaxrec.data.criteo.text import BadLine
from jaxrec.data.files import DataError
from jaxrec.data.formats.conversion import table_files
from jaxrec.data.multi_hot import MLPERF_SIZES, MLPERF_TABLE_ROWS, MultiHot
from jaxrec.data.parquet import ParquetGroups
from jaxrec.data.sequences.histories import write_histories
from jaxrec.data.transforms import CATEGORICAL_NAMES, NUM_CATEGORICAL
from jaxrec.train.data_path import DataPath

USAGE_ERRORS = (ConfigError,)
FAILURES = (DataError,)

# Number of malformed lines to print. All are counted.
MAX_PRINTED = 20

USAGE = """usage: jaxrec data FORMAT INPUT OUTPUT [OPTIONS]

  criteo     Criteo's click logs as text, plain or gzip (Kaggle, 1TB), to Parquet files

INPUT is a file or a directory of files, OUTPUT the directory of the Parquet files, which
`jaxrec train --data OUTPUT` reads.

  npy        these Parquet files to TorchRec's npy files
  multi-hot  these Parquet files to MLPerf's multi-hot npz files
  records    these Parquet files to one file of MLPerf's binary records

INPUT is the directory of the Parquet files, OUTPUT a directory, or for records a file.

  histories  files with a row for each event to Parquet files with a row for each user

INPUT is a file, a directory or a pattern in quotes, OUTPUT a new directory.
`jaxrec data FORMAT --help` lists options."""


@dataclasses.dataclass(frozen=True)
class CriteoOptions:
    """Write Criteo's click log (Kaggle or 1TB) as Parquet files.

    The same command continues a conversion that was stopped.

    Example: jaxrec data criteo day_0.gz parts --ids contiguous --threshold 10
    """

    input: Annotated[pathlib.Path, tyro.conf.Positional, required("INPUT")] = NOT_GIVEN
    """Text file, plain or gzip, or a directory of such files."""
    output: Annotated[pathlib.Path, tyro.conf.Positional, required("OUTPUT")] = NOT_GIVEN
    """Directory of the Parquet files."""
    ids: Literal["hash", "contiguous", "raw"] = "hash"
    """How ids become row indices. hash: the id modulo table-rows. contiguous: numbers in the order
    of first appearance; all rare ids share one row. raw: ids stay as they are."""
    table_rows: tuple[int, ...] = (100_000,)
    """For hash: number of rows of each table, one number or 26."""
    threshold: int = 1
    """For contiguous: smallest number of appearances of an id with its own row."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """At a malformed line, stop (fail), or report it and go on (skip)."""
    compression: Literal["lz4", "zstd", "none"] = "lz4"
    """Compression of the Parquet files."""
    threads: int | None = None
    """Number of threads that parse; by default one per core."""


@dataclasses.dataclass(frozen=True)
class NpyOptions:
    """Write the Parquet files of a click log as TorchRec's npy files: labels, dense
    features and ids, three files for each text file of the log.

    Example: jaxrec data npy parts npy
    """

    input: Annotated[pathlib.Path, tyro.conf.Positional, required("INPUT")] = NOT_GIVEN
    """Directory of the Parquet files of jaxrec data criteo."""
    output: Annotated[pathlib.Path, tyro.conf.Positional, required("OUTPUT")] = NOT_GIVEN
    """Directory of the npy files."""
    counts: Counts = "log"
    """How counts become dense features. log: log(x + 3). log_above_smallest: log(x - smallest + 2)
    with the smallest count of the text file. raw: as they are."""


@dataclasses.dataclass(frozen=True)
class MultiHotOptions(NpyOptions):
    """Write the Parquet files of a click log as MLPerf's multi-hot data set, with several ids in
    place of each id.

    Example: jaxrec data multi-hot parts multi_hot --distribution pareto
    """

    sizes: tuple[int, ...] = MLPERF_SIZES
    """Number of ids per sample of each of the 26 features; by default MLPerf's."""
    table_rows: tuple[int, ...] = MLPERF_TABLE_ROWS
    """Number of rows of each table; by default MLPerf's. A table takes 4 bytes of memory for each
    row and id."""
    distribution: Literal["uniform", "pareto"] = "uniform"
    """Distribution of the ids that are added."""


@dataclasses.dataclass(frozen=True)
class RecordOptions:
    """Write the Parquet files of a click log as one file of MLPerf's binary records.

    Example: jaxrec data records parts train_data.bin
    """

    input: Annotated[pathlib.Path, tyro.conf.Positional, required("INPUT")] = NOT_GIVEN
    """Directory of the Parquet files of jaxrec data criteo, with ids hash or contiguous."""
    output: Annotated[pathlib.Path, tyro.conf.Positional, required("OUTPUT")] = NOT_GIVEN
    """The file."""


@dataclasses.dataclass(frozen=True)
class HistoriesOptions:
    """Group a log of events by user. The Parquet files have a row for each user, with lists of the
    user's events, the earliest first.

    Example: jaxrec data histories events.parquet users
    """

    input: Annotated[DataPath, tyro.conf.Positional, required("INPUT")] = NOT_GIVEN
    """File, directory of files, pattern in quotes, 'parts/*.parquet', or an address of one of
    these; the files are Parquet, CSV, TSV, JSON lines or Arrow."""
    output: Annotated[pathlib.Path, tyro.conf.Positional, required("OUTPUT")] = NOT_GIVEN
    """New directory of the Parquet files."""
    user: str = "uid"
    """Column of the users."""
    time: str = "timestamp"
    """Column of the times."""
    columns: tuple[str, ...] = ()
    """Other columns to keep; by default all."""


def run(options: Sequence[str]) -> int:
    """Run ``jaxrec data``; return the exit code."""
    name, *rest = list(options) or ["--help"]
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    if name not in _FORMATS:
        raise ConfigError(f"unknown format {name!r}; there is {', '.join(_FORMATS)}")
    default, write = _FORMATS[name]
    write(parse(f"data {name}", rest, default))
    return 0


def _npy(options: NpyOptions) -> None:
    _check_paths(options.input, options.output)
    _report(write_npy(options.input, options.output, counts=options.counts))


def _multi_hot(options: MultiHotOptions) -> None:
    _check_paths(options.input, options.output)
    for name, numbers in (("sizes", options.sizes), ("table-rows", options.table_rows)):
        if len(numbers) != NUM_CATEGORICAL or min(numbers) < 1:
            raise ConfigError(
                f"{name} is {NUM_CATEGORICAL} numbers of 1 or more, one for each feature; got "
                f"{numbers}"
            )
    multi_hot = MultiHot(CATEGORICAL_NAMES, options.sizes, options.table_rows, options.distribution)
    _report(write_multi_hot(options.input, options.output, multi_hot, counts=options.counts))


def _records(options: RecordOptions) -> None:
    _check_paths(options.input, options.output)
    rows = write_records(options.input, options.output)
    print(f"{rows:,} rows in {options.output}")


def _check_paths(source: pathlib.Path, output: pathlib.Path) -> None:
    if NOT_GIVEN in (source, output):
        raise ConfigError(
            "give the Parquet files of `jaxrec data criteo` and an output: INPUT OUTPUT"
        )


def _report(made: Sequence[DayFiles]) -> None:
    for files in made:
        print(f"{files.labels}, {files.dense}, {files.sparse}")


def _criteo(options: CriteoOptions) -> None:
    if NOT_GIVEN in (options.input, options.output):
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
    # Asked before `convert`, which returns at once in this case: the user should know why.
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


def _histories(options: HistoriesOptions) -> None:
    if NOT_GIVEN in (options.input, options.output):
        raise ConfigError("give the log and the directory of the Parquet files: INPUT OUTPUT")
    if isinstance(output := data_path(options.output), Address):
        raise ConfigError(f"the output is a directory of this machine, got {output}")
    keys = (options.user, options.time)
    columns = tuple(dict.fromkeys((*keys, *options.columns))) if options.columns else None
    log = ParquetGroups.of_files(table_files(options.input), columns)
    counts = write_histories(log, options.output, user=options.user, time=options.time)
    print(
        f"{counts.events:,} events of {counts.users:,} users in {options.output}; the longest "
        f"history has {counts.longest:,}"
    )


# By format the options with their defaults, and the function that writes the files.
_FORMATS: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "criteo": (CriteoOptions(), _criteo),
    "npy": (NpyOptions(), _npy),
    "multi-hot": (MultiHotOptions(), _multi_hot),
    "records": (RecordOptions(), _records),
    "histories": (HistoriesOptions(), _histories),
}
