"""The schema of a run's files, and the encoder of their columns."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from jaxrec.arguments import ConfigError
from jaxrec.data import (
    DataError,
    ParquetGroups,
    Schema,
    TableEncoder,
    infer_schema,
    learn_encoder,
    read_schema,
)
from jaxrec.data.column_types import check_columns, is_list, is_string, value_type
from jaxrec.data.column_values import are_ids, number_labels, skewed_numbers, suspects, whole_floats
from jaxrec.data.common_types import CommonTypes
from jaxrec.data.criteo.conversion import SUMMARY_FILE, read_summary
from jaxrec.data.criteo.log import criteo_schema
from jaxrec.data.criteo.parts import is_part
from jaxrec.data.encoder import SCHEMA_FILE, EncodedGroups
from jaxrec.data.feature_table import check_zones
from jaxrec.data.files import DataFiles, has_pattern
from jaxrec.data.formats.conversion import as_parquet, format_of, table_files
from jaxrec.data.generated import TABLE_ROWS
from jaxrec.data.groups import GroupRange, LocatedGroups
from jaxrec.data.infer import LABEL_NAMES
from jaxrec.data.learn import needs_pass
from jaxrec.data.patterns import covered
from jaxrec.data.selection import SelectedGroups, selected_rows
from jaxrec.data.structs import flat_schema
from jaxrec.data.transforms import NUM_CATEGORICAL
from jaxrec.data.vectors import learned_widths
from jaxrec.train.config import FEATURES_DIRECTORY, DataConfig, TrainConfig
from jaxrec.train.hold_out import split_of
from jaxrec.train.open_vocabularies import check_fixed, with_dynamic_columns
from jaxrec.train.progress import counted
from jaxrec.train.row_memory import check_groups, converted_group_bytes, return_freed_memory

# Types of `--data.types`.
COLUMN_TYPES = {
    "string": pa.string(),
    "integer": pa.int64(),
    "float": pa.float64(),
    "boolean": pa.bool_(),
}

# The training rows or the held-out rows of files.
RowsOf: TypeAlias = GroupRange | SelectedGroups

# Fewest rows for the conclusion that a column without repeated values tells nothing.
_MIN_ROWS = 20

# First bytes of a Parquet file.
_MAGIC = b"PAR1"


def is_parquet(path: pathlib.Path | None) -> bool:
    """Return whether a path is a file with columns, or a directory or pattern of such files."""
    if path is None or path.is_dir() or has_pattern(path):
        return path is not None
    if format_of(path) is not None:
        return True
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def saved_encoder(path: str | os.PathLike[str]) -> TableEncoder | None:
    """Load the encoder of a saved run; None: the run is not on Parquet files."""
    features = pathlib.Path(path, FEATURES_DIRECTORY)
    return TableEncoder.load(features) if features.is_dir() else None


def text_table_rows(config: TrainConfig) -> tuple[int, ...]:
    """Return the number of rows of each table, for text in Criteo's format or a generated log."""
    if config.data.path is None and not config.vocabulary.is_dynamic:
        return TABLE_ROWS
    return (config.data.table_rows,) * NUM_CATEGORICAL


def text_encoder(config: TrainConfig) -> TableEncoder:
    """Return the encoder of the columns of text in Criteo's format and of a generated log."""
    is_dynamic = config.vocabulary.is_dynamic
    schema = criteo_schema(text_table_rows(config), is_dynamic=is_dynamic)
    return TableEncoder(schema, {}, {}, {})


def run_encoder(
    config: TrainConfig,
    console: Console,
    *,
    check: Callable[[Schema], None] = lambda schema: None,
    needs_label: bool = True,
) -> TableEncoder:
    """Load the encoder of a resumed run, or learn a new run's encoder and print its schema.

    ``check`` gets the schema of a new run before anything is learned.
    """
    data, resume, is_dynamic = config.data, config.resume, config.vocabulary.is_dynamic
    convert_files(data, console)
    encoder = None if resume is None else saved_encoder(resume)
    if resume is None or encoder is None:
        return learn_features(
            data,
            console,
            is_dynamic=is_dynamic,
            check=check,
            needs_label=needs_label,
            seed=config.seed,
        )
    schema = encoder.schema
    if data.schema is not None:
        schema = _with_vocabularies(read_schema(data.schema), data, is_dynamic)
    if (
        schema != encoder.schema
        or data.label not in ((), (*schema.labels,))
        or data.weight not in (None, schema.weight)
        or covered(data.exclude, schema.columns)
    ):
        raise ConfigError(
            f"the run has a schema of its own, {resume / FEATURES_DIRECTORY / SCHEMA_FILE}; leave "
            "--schema, --label, --weight and --exclude out"
        )
    return encoder


def convert_files(data: DataConfig, console: Console) -> None:
    """Convert files of other formats than Parquet, with a bar; later reads find the results."""
    return_freed_memory(data.memory)
    for path in (data.path, data.eval_path):
        if path is None or (kind := format_of(path)) is None:
            continue
        types = _types_of(path, data)
        started, size = time.perf_counter(), sum(x.stat().st_size for x in kind.files(path).paths)
        with counted(console, f"converting {kind.name}", size) as advance:
            as_parquet(path, types, advance, converted_group_bytes(data.memory, kind))
        if (seconds := time.perf_counter() - started) > 1:
            console.print(f"converted {path} to Parquet in {seconds:.1f} s; kept for the next run")
    if data.types and data.path is not None:
        _check_types(_types(data), data, data.path)


def _check_types(types: Iterable[str], data: DataConfig, path: pathlib.Path) -> None:
    """Refuse types of columns that the data lack, or of files that hold types themselves."""
    kind = format_of(path)
    if kind is None or not kind.takes_types:
        raise ConfigError(
            f"--data.types gives columns of CSV and JSON lines their types; {path} holds its own"
        )
    columns = flat_schema(pq.read_schema(parquet_data(path, data).paths[0])).names
    for name in types:
        if name not in columns:
            raise ConfigError(
                f"--data.types {name}: {path} has no column {name!r}; its columns are "
                f"{', '.join(columns)}"
            )


def _types(data: DataConfig) -> dict[str, pa.DataType]:
    """Return the types of columns that the user gave."""
    types = {}
    for given in data.types:
        name, _, kind = given.rpartition("=")
        if not name or kind not in COLUMN_TYPES:
            raise ConfigError(
                f"--data.types {given}: give NAME=TYPE, with a type of {', '.join(COLUMN_TYPES)}"
            )
        types[name] = COLUMN_TYPES[kind]
    return types


def _types_of(path: pathlib.Path, data: DataConfig) -> dict[str, pa.DataType]:
    """Return the types of columns of one of a run's paths, as far as they are not guessed."""
    types = _types(data)
    if path != data.eval_path or path == data.path:
        return types
    kind = format_of(path)
    if kind is None or not kind.guesses_types:
        return types
    # A column of text may have numbers alone in the held-out rows: the vocabulary has "7", not 7.
    training = ParquetGroups.of_files(parquet_data(data.path, data))
    return {
        x.name: pa.string()
        for columns in training.schemas_of_rows.values()
        for x in columns
        if not is_list(x.type) and is_string(value_type(x.type))
    } | types


def learn_features(
    data: DataConfig,
    console: Console | None = None,
    *,
    is_dynamic: bool = False,
    check: Callable[[Schema], None] = lambda schema: None,
    needs_label: bool = True,
    seed: int = 0,
) -> TableEncoder:
    """Find the schema of a run's files, and learn its encoder from the training rows.

    With ``is_dynamic`` columns get open vocabularies, which are not learned. ``check`` gets the
    schema before anything is learned, and raises an error if a model cannot take it. ``seed`` is
    that of a random choice of held-out rows.
    """
    console = console or Console(quiet=True)
    schema = converted_schema(data, is_dynamic)
    is_converted = schema is not None
    if schema is None:
        schema = _find_schema(data, console, is_dynamic, needs_label)
    check(schema)
    training, held_out = split_groups(data, schema, seed)
    for rows_of in (training, held_out):
        check_groups(data.memory, files_of(rows_of), schema)
    encoder = TableEncoder(schema, {}, {}, {})
    if is_converted:
        return encoder  # `jaxrec data criteo` has checked the values
    if data.schema is None and (skewed := skewed_numbers(schema, training)):
        schema = _with_logarithms(schema, skewed)
        encoder = TableEncoder(schema, {}, {}, {})
        console.print(f"numbers of which a few are large, taken by logarithm: {', '.join(skewed)}")
    # Before the pass over all rows, so that a user sees the warnings while it runs.
    for suspect in suspects(schema, training, by_name=data.schema is None):
        console.print(f"warning: {suspect}")
    # With nothing to learn, the training rows are checked as they are read; held-out rows would be
    # read only after training.
    if not needs_pass(schema, files_of(training).schemas_of_rows.values()):
        check_rows(encoder, held_out)
        return encoder
    started, rows = time.perf_counter(), sum(training.sizes)
    with counted(console, "reading the columns", rows + sum(held_out.sizes)) as advance:
        encoder = learn_encoder(schema, training, held_out, advance)
    console.print(
        f"learned the columns from {rows:,} rows in {time.perf_counter() - started:.1f} s"
    )
    names = [name for name, x in encoder.vocabularies.items() if not len(x)]
    if names and rows >= _MIN_ROWS:
        encoder = _without_values(encoder, names, data, console)
        check(encoder.schema)
    for name, vocabulary in encoder.vocabularies.items():
        console.print(f"  {name}: {len(vocabulary):,} values")
    for name, column in schema.dense.items():
        if column.width is not None and name in encoder.moments:
            missing = rows - encoder.moments[name].count // column.width
            console.print(
                f"  {name}: vectors of {column.width} numbers"
                + (f"; {missing:,} rows have none, and zeros stand for it" if missing else "")
            )
    return encoder


def _without_values(
    encoder: TableEncoder, names: Sequence[str], data: DataConfig, console: Console
) -> TableEncoder:
    """Leave out columns whose vocabularies have no values, as far as the user did not name them.

    A column of ids of the rows, such as UUIDs, has each value once.
    """
    schema = encoder.schema
    named = {*data.item, *data.history, *data.users, *covered(data.categorical, names)}
    left_out = [name for name in names if data.schema is None and name not in named]
    if len(left_out) == len(schema.categorical):
        left_out = []  # a model needs a table
    for name in names:
        count = schema.categorical[name].min_count
        problem = f"no value of it is in {count} training rows or more"
        if name in left_out:
            console.print(
                f"left out: column {name!r}, since {problem}; --categorical {name} takes it "
                "nevertheless"
            )
        else:
            console.print(
                f"warning: column {name!r} tells rows nothing apart, since {problem}, and all of "
                "its values are unknown ones; leave it out, or give min_count: 1 in a schema"
            )
    return encoder.without(left_out) if left_out else encoder


def _with_logarithms(schema: Schema, names: Sequence[str]) -> Schema:
    """Return a schema whose named dense columns are standardized after a logarithm."""
    dense = {
        name: dataclasses.replace(column, transform="log_standardize") if name in names else column
        for name, column in schema.dense.items()
    }
    return dataclasses.replace(schema, dense=dense)


def check_rows(encoder: TableEncoder, rows: LocatedGroups) -> None:
    """Encode rows, so that an invalid value is found before training."""
    groups = EncodedGroups(rows, encoder)
    for group in range(len(groups.sizes)):
        groups.read(group)


def split_groups(data: DataConfig, schema: Schema, seed: int = 0) -> tuple[RowsOf, RowsOf]:
    """Return the training rows and the held-out rows of Parquet files, with a schema's columns."""
    files = parquet_data(data.path, data)
    whole = _all_rows(files, schema)
    if data.eval_path is not None:
        return whole, _all_rows(parquet_data(data.eval_path, data), schema)
    split = split_of(data, seed)
    columns = None
    if split.columns:
        columns = ParquetGroups(files.paths, split.columns, sources=files.sources)
    held_out = split.mask(whole.stop, str(data.path), columns)
    assert isinstance(whole.groups, ParquetGroups)
    return selected_rows(whole.groups, held_out.inverted()), selected_rows(whole.groups, held_out)


def files_of(rows: RowsOf) -> ParquetGroups:
    """Return the row groups of the files that have the training rows, or the held-out rows."""
    assert isinstance(rows.groups, ParquetGroups)
    return rows.groups


def _with_vocabularies(schema: Schema, data: DataConfig, is_dynamic: bool) -> Schema:
    """Return a schema with open vocabularies if ``is_dynamic``; else check that it has none."""
    if is_dynamic:
        return with_dynamic_columns(schema, data.table_rows)
    check_fixed(schema)
    return schema


def converted_schema(data: DataConfig, is_dynamic: bool = False) -> Schema | None:
    """Return the schema of a directory that `jaxrec data criteo` wrote; None for other data."""
    directory = data.path
    if data.schema is not None or directory is None or not directory.is_dir():
        return None
    first = parquet_data(directory, data).paths[0]
    if not ((directory / SUMMARY_FILE).exists() or is_part(first)) or first.parent != directory:
        return None
    # Raw ids have no number of rows in the summary: the user chooses it.
    rows = read_summary(directory).table_rows
    if rows and is_dynamic:
        raise ConfigError(
            f"{directory}: `jaxrec data criteo` has made row indices of its ids; --vocabulary "
            "dynamic takes raw ids: convert the log with --ids raw, or leave --vocabulary out"
        )
    return criteo_schema(rows or (data.table_rows,) * NUM_CATEGORICAL, is_dynamic=is_dynamic)


def _find_schema(data: DataConfig, console: Console, is_dynamic: bool, needs_label: bool) -> Schema:
    """Return the given schema, or infer one from the columns; all files must fit it."""
    files = [parquet_data(path, data) for path in (data.path, data.eval_path) if path is not None]
    if data.schema is not None:
        schema = _with_vocabularies(read_schema(data.schema), data, is_dynamic)
        check_zones(schema)
        groups = [ParquetGroups(each.paths, schema.inputs, sources=each.sources) for each in files]
    else:
        keys = tuple(dict.fromkeys(key for each in files for key in each.keys))
        groups = [ParquetGroups(each.paths, keys=keys, sources=each.sources) for each in files]
    if not sum(groups[0].sizes):
        raise DataError(f"{data.path}: it has no rows")
    schemas = {path: x for rows in groups for path, x in rows.schemas_of_rows.items()}
    # Held-out rows may lack a struct that training rows have, and the reverse.
    names = dict.fromkeys(name for each in schemas.values() for name in each.names)
    columns = {path: flat_schema(each, names) for path, each in schemas.items()}
    types = (
        CommonTypes(exclude=covered(data.exclude, names))
        if data.schema is None
        else CommonTypes(schema.inputs)
    )
    for path, each in columns.items():
        types.add(each, path)
    if data.schema is None:
        schema = _inferred_schema(data, types, groups, console, is_dynamic, needs_label)
    for path, each in columns.items():
        check_columns(schema, each, path)
    return schema


def _inferred_schema(
    data: DataConfig,
    types: CommonTypes,
    groups: Sequence[ParquetGroups],
    console: Console,
    is_dynamic: bool,
    needs_label: bool,
) -> Schema:
    """Infer a schema from the types of the columns, and print the decisions."""
    columns = types.schema
    others = {*data.label, data.weight, *covered(data.exclude, columns.names)}
    # Pandas writes integers with missing values as floats, so that a column of whole floats may be
    # ids.
    whole = whole_floats(pa.schema([x for x in columns if x.name not in others]), groups)
    ids = are_ids(whole, types.mixed)
    named = [name for name in LABEL_NAMES if name in columns.names and name not in others]
    labels = data.label or named[:1]
    numbers = {
        "auto": lambda: number_labels(columns, labels, groups),
        "binary": lambda: [],
        "number": lambda: labels,
    }[data.label_kind]()
    schema, left_out = infer_schema(
        columns,
        labels if labels or not needs_label else None,
        weight=data.weight,
        exclude=data.exclude,
        dense=data.dense,
        categorical=data.categorical,
        ids=ids,
        numbers=numbers,
        widths=learned_widths(pa.schema([x for x in columns if x.name not in others]), groups),
    )
    schema = with_shared_tables(schema, data)
    schema = _with_vocabularies(schema, data, is_dynamic)
    console.print(
        f"the schema by the types of the columns; --schema takes another:\n{schema.to_yaml()}"
    )
    for name, kind in left_out.items():
        console.print(f"left out: column {name!r} of type {kind}")
    if schema.parts:
        parts = ", ".join(name for name, *_ in schema.parts)
        console.print(f"parts of times, which --exclude leaves out: {parts}")
    for names, kind, advice in (
        ([n for n in schema.categorical if n in ids], "ids", "--schema can make them dense"),
        ([n for n in schema.dense if n in whole], "numbers", "--schema can make them categorical"),
    ):
        if names:
            console.print(
                f"floats that are all whole, taken as {kind}: {', '.join(names)}; {advice}"
            )
    return schema


def with_shared_tables(schema: Schema, data: DataConfig) -> Schema:
    """Give each column of --history the table of its column of --item, as far as there are both."""
    pairs = dict(zip(data.history, data.item, strict=False))
    columns = {
        name: dataclasses.replace(column, table=pairs.get(name, column.table))
        if pairs.get(name) in schema.categorical
        else column
        for name, column in schema.categorical.items()
    }
    return dataclasses.replace(schema, categorical=columns)


def parquet_data(path: pathlib.Path | None, data: DataConfig) -> DataFiles:
    """Find the Parquet files of a path; files of another format are converted to Parquet first."""
    if path is None:
        raise ConfigError("give the files with --data")
    types = _types_of(path, data)
    if data.memory is None:
        return table_files(path, types)
    return table_files(path, types, converted_group_bytes(data.memory, format_of(path)))


def _all_rows(files: DataFiles, schema: Schema) -> GroupRange:
    groups = ParquetGroups.of_files(files, schema.inputs, dictionaries=True)
    if (count := sum(groups.sizes)) == 0:
        raise DataError(f"{next(iter(groups.schemas))}: it has no rows")
    return GroupRange(groups, 0, count)
