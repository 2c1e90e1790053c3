"""Parquet files of columns of one's own: their schema, and what is learned of their rows."""

from __future__ import annotations

import dataclasses
import pathlib
import time

import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxrec.arguments import ConfigError
from jaxrec.data import (
    DataError,
    GroupRange,
    ParquetGroups,
    Schema,
    TableEncoder,
    infer_schema,
    learn_encoder,
    read_schema,
)
from jaxrec.data.convert import SUMMARY_FILE, read_summary
from jaxrec.data.learn import needs_pass
from jaxrec.data.parts import is_part
from jaxrec.data.schema import criteo_schema
from jaxrec.data.transforms import NUM_CATEGORICAL
from jaxrec.train.config import DataConfig

# Directory of a run's `TableEncoder`.
FEATURES_DIRECTORY = "features"

# What a Parquet file begins with.
_MAGIC = b"PAR1"


def is_parquet(path: pathlib.Path | None) -> bool:
    """Whether the rows of a path are in Parquet files: a directory's are.

    Raises:
        OSError: The file cannot be read.
    """
    if path is None or path.is_dir():
        return path is not None
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def run_encoder(data: DataConfig, resume: pathlib.Path | None, console: Console) -> TableEncoder:
    """Load the encoder of a run to go on with, or learn that of a new run.

    Args:
        data: Where the Parquet files are.
        resume: Directory of the run to go on with; None: the run is a new one.
        console: Told the schema, if it is inferred, and the sizes of the vocabularies.

    Raises:
        OSError, DataError, SchemaError: The rows cannot be read, or do not fit the schema.
        ConfigError: The run to go on with has another schema.
    """
    if resume is None or not (resume / FEATURES_DIRECTORY).is_dir():
        return learn_features(data, console)
    encoder = TableEncoder.load(resume / FEATURES_DIRECTORY)
    schema = encoder.schema if data.schema is None else read_schema(data.schema)
    if schema != encoder.schema or data.label not in (None, schema.label):
        raise ConfigError(
            f"the run has a schema of its own, {resume / FEATURES_DIRECTORY}/schema.yaml; leave "
            "--schema and --label out"
        )
    return encoder


def learn_features(data: DataConfig, console: Console | None = None) -> TableEncoder:
    """Find the schema of a run's files and learn what it needs from the training rows.

    With several processes each of them does: all come to the same.

    Raises:
        OSError, DataError, SchemaError: The rows cannot be read, or do not fit the schema.
    """
    console = console or Console(quiet=True)
    schema = _find_schema(data, console)
    training, held_out = split_groups(data, schema)
    columns = pq.read_schema(training.place(0)[0])
    if not needs_pass(schema, columns):
        return TableEncoder(schema, {}, {}, {})
    started, rows = time.perf_counter(), sum(training.sizes)
    bar = Progress(
        TextColumn("reading the columns"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=rows)
        encoder = learn_encoder(
            schema, training, held_out, lambda count: bar.update(task, advance=count)
        )
    console.print(
        f"learned the columns from {rows:,} rows in {time.perf_counter() - started:.1f} s"
    )
    for name, vocabulary in encoder.vocabularies.items():
        console.print(f"  {name}: {len(vocabulary):,} values")
    return encoder


def split_groups(data: DataConfig, schema: Schema) -> tuple[GroupRange, GroupRange]:
    """The training rows and the held-out rows of Parquet files, with the columns of a schema.

    Raises:
        OSError, DataError: A file cannot be read, lacks a column, or has too few rows.
    """
    whole = _all_rows(_paths(data.path), schema)
    if data.eval_path is not None:
        return whole, _all_rows(_paths(data.eval_path), schema)
    middle = whole.stop - held_out_rows(data, whole.stop)
    return dataclasses.replace(whole, stop=middle), dataclasses.replace(whole, start=middle)


def held_out_rows(data: DataConfig, count: int) -> int:
    """The number of rows that are held out, of so many.

    Raises:
        DataError: None would be left to train on.
    """
    held_out = max(1, round(count * data.eval_fraction))
    if held_out >= count:
        raise DataError(
            f"{data.path}: {count} rows are too few to train on some and hold out "
            f"{data.eval_fraction:.0%}; give more rows, or others with --data.eval-path"
        )
    return held_out


def _find_schema(data: DataConfig, console: Console) -> Schema:
    """The schema that is given, that of Criteo's columns, or one by the types of the columns."""
    if data.schema is not None:
        return read_schema(data.schema)
    first = _paths(data.path)[0]
    directory = first.parent
    if data.path == directory and ((directory / SUMMARY_FILE).exists() or is_part(first)):
        # Raw ids need as many rows as the user gives them.
        rows = read_summary(directory).table_rows or (data.table_rows,) * NUM_CATEGORICAL
        return criteo_schema(rows)
    schema, left_out = infer_schema(pq.read_schema(first), data.label)
    console.print(
        f"the schema by the types of the columns; --schema takes another:\n{schema.to_yaml()}"
    )
    for name, kind in left_out.items():
        console.print(f"left out: column {name!r} of type {kind}")
    return schema


def _paths(path: pathlib.Path | None) -> tuple[pathlib.Path, ...]:
    """The Parquet files of a directory, or the one that is given."""
    if path is None:
        raise ConfigError("give the Parquet files with --data")
    if path.is_dir():
        return tuple(map(pathlib.Path, ParquetGroups.of_directory(path).paths))
    if not is_parquet(path):
        raise DataError(f"{path} is no Parquet file, which columns of your own are read from")
    return (path,)


def _all_rows(paths: tuple[pathlib.Path, ...], schema: Schema) -> GroupRange:
    groups = ParquetGroups(paths, schema.columns)
    if (count := sum(groups.sizes)) == 0:
        raise DataError(f"{paths[0]}: there are no rows in it")
    return GroupRange(groups, 0, count)
