"""The command ``jaxrec predict``, which predicts the rows of files."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from rich.console import Console

from jaxrec.arguments import NOT_GIVEN, ConfigError, parse, required
from jaxrec.data import DataError, ParquetGroups, Vocabulary
from jaxrec.data.addresses import Address, data_path
from jaxrec.data.arrays import as_column
from jaxrec.data.common_types import CommonTypes
from jaxrec.data.files import DataFiles
from jaxrec.data.formats.conversion import format_of, table_files
from jaxrec.data.groups import check_key, missing_column
from jaxrec.data.parquet import open_parquet
from jaxrec.data.partitions import key_column, key_types, keys_of
from jaxrec.data.structs import flat_schema, flat_table
from jaxrec.data.views import without_views
from jaxrec.files.atomic import write_atomically
from jaxrec.serve import ArtifactError, ServedModel, load
from jaxrec.serve.artifact.batch_spec import output_columns
from jaxrec.train.data_path import DataPath
from jaxrec.train.progress import counted

USAGE_ERRORS = (ConfigError,)
FAILURES = (ArtifactError, DataError)

# Number of bytes of a column to read at a time from a file, and by a request for an address.
_BUFFER_BYTES, _REQUEST_BYTES = 1 << 18, 1 << 23


@dataclasses.dataclass(frozen=True)
class PredictOptions:
    """Predict the rows of files by a model that `jaxrec export` wrote.

    The columns are encoded as in training; labels are not needed. The output has a row for each
    row of the input, in the same order.

    Example: jaxrec predict model new.parquet --output scores.parquet --keep user item
    """

    model: Annotated[pathlib.Path, tyro.conf.Positional, required("MODEL")] = NOT_GIVEN
    """Directory of the exported model."""
    input: Annotated[DataPath, tyro.conf.Positional, required("INPUT")] = NOT_GIVEN
    """File, directory of files, a pattern in quotes, 'parts/*.parquet', or an address of one of
    these, such as s3://bucket/parts. Files are Parquet, CSV, TSV, JSON lines or Arrow, known by
    their names."""
    output: Annotated[
        pathlib.Path,
        tyro.conf.arg(aliases=["-o"], metavar="OUTPUT", help_behavior_hint="(required)"),
    ] = NOT_GIVEN
    """Parquet file of the scores."""
    keep: tuple[str, ...] = ()
    """Columns of the input to copy to the output."""
    batch_size: int = 16_384
    """Number of rows to read at a time."""


def run(options: Sequence[str]) -> int:
    """Run ``jaxrec predict``; return the exit code."""
    parsed = parse("predict", options, PredictOptions())
    if NOT_GIVEN in (parsed.model, parsed.input, parsed.output):
        raise ConfigError("give the model, the rows and the output: MODEL INPUT -o OUTPUT")
    if parsed.batch_size < 1:
        raise ConfigError(f"--batch-size must be above 0, got {parsed.batch_size}")
    if isinstance(output := data_path(parsed.output), Address):
        raise ConfigError(f"the output is a file of this machine, got {output}")
    if parsed.output.is_dir():
        raise ConfigError(f"{parsed.output} is a directory; the output is a Parquet file")
    kind = format_of(parsed.input)
    served = load(parsed.model)
    if served.encoder is None:
        raise ArtifactError(
            f"{parsed.model} was exported without an encoder of columns; jaxrec export writes one, "
            "and jaxrec.serve.load takes other batches"
        )
    console = Console(highlight=False, markup=False, soft_wrap=True)
    begun = time.perf_counter()
    # A column of text may have numbers alone here: the vocabulary has "7" and not 7.
    texts = _text_columns(served) if kind is not None and kind.guesses_types else ()
    files = table_files(parsed.input, dict.fromkeys(texts, pa.string()))
    if parsed.output.resolve() in [path.resolve() for path in files.sources or files.paths]:
        raise ConfigError(f"{parsed.output} is one of the input files; give another output")
    rows = _predict(parsed, served, files, console)
    seconds = time.perf_counter() - begun
    console.print(f"{rows:,} rows in {seconds:.1f} s; scores in {parsed.output}")
    return 0


def _predict(
    options: PredictOptions, served: ServedModel, files: DataFiles, console: Console
) -> int:
    """Write the scores of all rows; return the number of rows."""
    total = sum(ParquetGroups(files.paths, sources=files.sources).sizes)
    with contextlib.ExitStack() as stack:
        unfinished = stack.enter_context(write_atomically(options.output))
        advance = stack.enter_context(counted(console, "predicting", total))
        writer = None
        for table in _scores(options, served, files):
            # The first table has the schema that a writer needs.
            if writer is None:
                writer = stack.enter_context(
                    pq.ParquetWriter(unfinished, table.schema, write_page_checksum=True)
                )
            writer.write_table(table)
            advance(len(table))
        if writer is None:
            raise DataError(f"{options.input} has no rows")
    return total


def _scores(options: PredictOptions, served: ServedModel, files: DataFiles) -> Iterator[pa.Table]:
    """Yield the columns of the output file, ``options.batch_size`` rows at a time."""
    assert served.encoder is not None
    schema = served.encoder.schema
    columns = list(dict.fromkeys([*schema.feature_inputs, *options.keep]))
    kept = _kept_types(files, options.keep)
    types = key_types(files.paths)
    # Directories such as shop=7 may all have numbers here, where training had text as well.
    types |= dict.fromkeys(types.keys() & _text_columns(served), pa.string())
    for path, source in zip(files.paths, files.sources or files.paths, strict=True):
        first = 0
        for rows in _read(path, source, columns, options.batch_size, types, files.keys):
            encoded = served.encoder.encode(rows, source, first)
            batch = served.encoder.pack(encoded, len(rows))
            predicted = output_columns(served.predict(batch.dense, batch.features))
            outputs = {name: as_column(array) for name, array in predicted.items()}
            if clash := sorted(outputs.keys() & set(options.keep)):
                raise DataError(f"--keep {clash[0]} has the name of a column of scores")
            columns_kept = {field.name: rows[field.name].cast(field.type) for field in kept}
            yield pa.table(columns_kept | outputs)
            first += len(rows)


def _text_columns(served: ServedModel) -> set[str]:
    """Return the columns whose values were text in training."""
    assert served.encoder is not None
    is_text = {
        name: not pa.types.is_integer(vocabulary.values.type)
        for name, vocabulary in served.encoder.vocabularies.items()
        if isinstance(vocabulary, Vocabulary)
    }
    return {name for name, text in (is_text | served.encoder.is_text).items() if text}


def _kept_types(files: DataFiles, keep: tuple[str, ...]) -> pa.Schema:
    """Return the output types of the columns ``keep``; all input files must agree on them."""
    types = CommonTypes(keep)
    groups = ParquetGroups(files.paths, keep, sources=files.sources)
    for path, columns in groups.schemas_of_rows.items():
        types.add(columns, path)
    return pa.schema([types.schema.field(name) for name in keep])


def _read(
    path: pathlib.Path,
    source: pathlib.Path,
    columns: list[str],
    batch_size: int,
    types: Mapping[str, pa.DataType],
    checked: Sequence[str],
) -> Iterator[pa.Table]:
    """Yield columns of a Parquet file, ``batch_size`` rows at a time.

    A column may come from a directory ``key=value`` of the path; ``types`` has its type. If the
    file has a column of one of the keys ``checked``, its values must be the directory's.
    """
    keys = keys_of(path)
    buffer_size = _REQUEST_BYTES if isinstance(path, Address) else _BUFFER_BYTES
    # Without pre-buffering PyArrow reads a page when it needs it: a row group need not fit memory.
    with open_parquet(
        path, pre_buffer=False, buffer_size=buffer_size, page_checksum_verification=True
    ) as file:
        stored = flat_schema(file.schema_arrow).names
        # The fields of a struct that is null in all rows.
        fields = {*flat_schema(file.schema_arrow, columns).names} - {*stored}
        for name in columns:
            if name not in stored and name not in fields and name not in keys:
                raise missing_column(source, name, stored)
        wanted = [name for name in columns if name in stored]
        for batch in file.iter_batches(batch_size, columns=wanted):
            rows = without_views(flat_table(pa.Table.from_batches([batch])))
            for name in fields:
                rows = rows.append_column(name, pa.nulls(len(batch)))
            for name in columns:
                if name in stored and name in checked:
                    check_key(rows[name], name, keys[name], source)
                if name not in rows.column_names:
                    rows = rows.append_column(name, key_column(keys[name], types[name], len(batch)))
            if len(batch):
                yield rows
