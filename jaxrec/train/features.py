"""Schema and encoder of a run's Parquet files."""

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
from jaxrec.data.conversion import SUMMARY_FILE, read_summary
from jaxrec.data.learn import needs_pass
from jaxrec.data.parts import is_part
from jaxrec.data.schema import criteo_schema
from jaxrec.data.transforms import NUM_CATEGORICAL
from jaxrec.train.config import DataConfig, TrainConfig
from jaxrec.train.open_vocabularies import check_fixed, with_dynamic_columns

# Directory of the `TableEncoder` in a run's directory.
FEATURES_DIRECTORY = "features"

# First bytes of a Parquet file.
_MAGIC = b"PAR1"


def is_parquet(path: pathlib.Path | None) -> bool:
    """Return whether a path is a Parquet file or a directory, which holds Parquet files.

    Raises:
        OSError: The file cannot be read.
    """
    if path is None or path.is_dir():
        return path is not None
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def run_encoder(config: TrainConfig, console: Console) -> TableEncoder:
    """Load the encoder of a resumed run, or learn the encoder of a new run.

    Args:
        config: The configuration of a run on Parquet files.
        console: Console that shows an inferred schema and the sizes of the vocabularies.

    Raises:
        OSError, DataError, SchemaError: The rows cannot be read or do not fit the schema.
        ConfigError: The resumed run has another schema; or the schema does not fit --vocabulary.
    """
    data, resume, is_dynamic = config.data, config.resume, config.vocabulary.is_dynamic
    if resume is None or not (resume / FEATURES_DIRECTORY).is_dir():
        return learn_features(data, console, is_dynamic=is_dynamic)
    encoder = TableEncoder.load(resume / FEATURES_DIRECTORY)
    schema = encoder.schema
    if data.schema is not None:
        schema = _with_vocabularies(read_schema(data.schema), data, is_dynamic)
    if schema != encoder.schema or data.label not in (None, schema.label):
        raise ConfigError(
            f"the run has a schema of its own, {resume / FEATURES_DIRECTORY}/schema.yaml; leave "
            "--schema and --label out"
        )
    return encoder


def learn_features(
    data: DataConfig, console: Console | None = None, *, is_dynamic: bool = False
) -> TableEncoder:
    """Find the schema of a run's files and learn its encoder from the training rows.

    With several processes each of them learns the same encoder.

    Args:
        data: The Parquet files.
        console: Console that shows an inferred schema and the sizes of the vocabularies.
        is_dynamic: Whether columns with a vocabulary get an open one, which is not learned.

    Raises:
        OSError, DataError, SchemaError: The rows cannot be read or do not fit the schema.
        ConfigError: The schema does not fit ``is_dynamic``.
    """
    console = console or Console(quiet=True)
    schema = _find_schema(data, console, is_dynamic)
    training, held_out = split_groups(data, schema)
    columns = pq.read_schema(training.location(0)[0])
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
    """Return the training rows and the held-out rows of Parquet files, with a schema's columns.

    Raises:
        OSError, DataError: A file cannot be read, lacks a column, or has too few rows.
    """
    whole = _all_rows(_paths(data.path), schema)
    if data.eval_path is not None:
        return whole, _all_rows(_paths(data.eval_path), schema)
    middle = whole.stop - held_out_rows(data, whole.stop)
    return dataclasses.replace(whole, stop=middle), dataclasses.replace(whole, start=middle)


def held_out_rows(data: DataConfig, count: int) -> int:
    """Return the number of held-out rows of ``count`` rows.

    Raises:
        DataError: No training rows are left.
    """
    held_out = max(1, round(count * data.eval_fraction))
    if held_out >= count:
        raise DataError(
            f"{data.path}: {count} rows are too few to train on some and hold out "
            f"{data.eval_fraction:.0%}; give more rows, or others with --data.eval-path"
        )
    return held_out


def _with_vocabularies(schema: Schema, data: DataConfig, is_dynamic: bool) -> Schema:
    """Return a schema with open vocabularies, or check that it has none."""
    if is_dynamic:
        return with_dynamic_columns(schema, data.table_rows)
    check_fixed(schema)
    return schema


def _find_schema(data: DataConfig, console: Console, is_dynamic: bool) -> Schema:
    """Return the given schema, that of Criteo's columns, or one inferred from column types."""
    if data.schema is not None:
        return _with_vocabularies(read_schema(data.schema), data, is_dynamic)
    first = _paths(data.path)[0]
    directory = first.parent
    if data.path == directory and ((directory / SUMMARY_FILE).exists() or is_part(first)):
        # The user chooses the number of rows for raw ids.
        rows = read_summary(directory).table_rows
        if rows and is_dynamic:
            raise ConfigError(
                f"{directory}: `jaxrec data criteo` has made row indices of its ids; --vocabulary "
                "dynamic takes raw ids: convert the log with --ids raw, or leave --vocabulary out"
            )
        return criteo_schema(rows or (data.table_rows,) * NUM_CATEGORICAL, is_dynamic=is_dynamic)
    schema, left_out = infer_schema(pq.read_schema(first), data.label)
    schema = _with_vocabularies(schema, data, is_dynamic)
    console.print(
        f"the schema by the types of the columns; --schema takes another:\n{schema.to_yaml()}"
    )
    for name, kind in left_out.items():
        console.print(f"left out: column {name!r} of type {kind}")
    return schema


def _paths(path: pathlib.Path | None) -> tuple[pathlib.Path, ...]:
    """Return the Parquet files of a directory, or a single file."""
    if path is None:
        raise ConfigError("give the Parquet files with --data")
    if path.is_dir():
        return tuple(map(pathlib.Path, ParquetGroups.of_directory(path).paths))
    if not is_parquet(path):
        raise DataError(
            f"{path} is not a Parquet file; columns with a schema are read from Parquet files"
        )
    return (path,)


def _all_rows(paths: tuple[pathlib.Path, ...], schema: Schema) -> GroupRange:
    groups = ParquetGroups(paths, schema.columns)
    if (count := sum(groups.sizes)) == 0:
        raise DataError(f"{paths[0]}: it has no rows")
    return GroupRange(groups, 0, count)
