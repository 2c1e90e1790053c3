"""Learning an encoder: statistics of parts of the rows, and their sum."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import pathlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import pyarrow as pa

from jaxrec.data.column_types import check_columns, is_integral, is_list, value_type
from jaxrec.data.common_types import common_columns
from jaxrec.data.encode import (
    Location,
    encode_categorical,
    encode_label,
    encode_weight,
    flat_values,
    numbers,
    present_numbers,
)
from jaxrec.data.encoder import TableEncoder, as_batch, first_rows
from jaxrec.data.feature_table import check_zones, feature_table
from jaxrec.data.files import DataError
from jaxrec.data.groups import LocatedGroups
from jaxrec.data.pipeline import Pipeline
from jaxrec.data.schema import Schema
from jaxrec.data.statistics import ListLengths, Moments, NumberSums
from jaxrec.data.vectors import vectors_of
from jaxrec.data.vocabulary import ValueCounts

Statistic = TypeVar("Statistic", ValueCounts, NumberSums, ListLengths)


def needs_pass(schema: Schema, files: Iterable[pa.Schema]) -> bool:
    """Return whether an encoder must be learned from the rows of files with these columns."""
    return (
        any(options.is_learned for options in schema.dense.values())
        or any(label.kind == "number" for label in schema.labels.values())
        or any(options.encoding == "vocabulary" for options in schema.categorical.values())
        or any(
            is_list(each.field(name).type)
            for each in files
            for name, options in schema.categorical.items()
            if options.part is None
        )
    )


@dataclasses.dataclass(frozen=True, eq=False)
class ColumnStatistics:
    """Statistics of rows from which an encoder is learned; add them for several parts of the rows.

    Counts and sums are exact, so that any parts, added in any order, give the same encoder; only
    its `TableEncoder.example` is that of the leftmost part.

    Attributes:
        schema: The schema.
        counts: Counts of the values of each column that owns a vocabulary.
        sums: Sums of each column of numbers whose mean is needed.
        lengths: Histogram of the list lengths of each column of lists.
        types: Each combination of types that the schema's columns have in a file, with the name of
            one such file.
        example: The first two training rows, without labels; None: all rows are held out.
    """

    schema: Schema
    counts: Mapping[str, ValueCounts] = dataclasses.field(default_factory=dict)
    sums: Mapping[str, NumberSums] = dataclasses.field(default_factory=dict)
    lengths: Mapping[str, ListLengths] = dataclasses.field(default_factory=dict)
    types: Mapping[pa.Schema, str | os.PathLike[str]] = dataclasses.field(default_factory=dict)
    example: pa.Table | None = None

    @classmethod
    def of(
        cls,
        schema: Schema,
        table: pa.Table,
        path: str | os.PathLike[str] = "the table",
        first_row: int = 0,
        *,
        held_out: bool = False,
    ) -> ColumnStatistics:
        """Check all values of a table, and compute its statistics.

        Args:
            schema: The schema.
            table: Table with the columns of the schema.
            path: The table's file, for errors.
            first_row: Number of the table's first row in the file, for errors.
            held_out: Whether the rows are held out. Only the lengths of their lists are learned,
                since evaluation needs capacities, too.

        Raises:
            DataError: A column is missing, has another type, or has an invalid value.
        """
        table = feature_table(schema, table, path, first_row)
        check_columns(schema, table.schema, path)
        counts: dict[str, ValueCounts] = {}
        sums: dict[str, NumberSums] = {}
        lengths: dict[str, ListLengths] = {}
        # All values are checked: a bad one in the last rows ends a run now, not after hours.
        for name, options in schema.categorical.items():
            location = Location(path, first_row, name)
            flat, each = flat_values(table[name], options, location)
            if each is not None:
                lengths[name] = ListLengths.of(each)
            if options.encoding != "vocabulary":
                encode_categorical(table[name], options, None, location)
            elif not held_out:
                # Columns that share a table share its vocabulary, which has the values of all.
                owner = options.table or name
                try:
                    counts[owner] = counts.get(owner, ValueCounts()) + ValueCounts.of(flat)
                except TypeError as error:
                    raise DataError(f"{path}, column {name!r}: {error}") from None
        for name, label in schema.labels.items():
            encode_label(table[name], label, Moments(), Location(path, first_row, name))
            if label.kind == "number" and not held_out:
                sums[name] = NumberSums.of(numbers(table[name])[0])
        if schema.weight is not None:
            encode_weight(table[schema.weight], Location(path, first_row, schema.weight))
        for name, dense in schema.dense.items():
            location = Location(path, first_row, name)
            values_of = present_numbers if dense.width is None else vectors_of
            values, is_null = values_of(table[name], dense, location)
            if dense.is_learned and not held_out:
                sums[name] = NumberSums.of(
                    (values[~is_null] if is_null.any() else values).reshape(-1)
                )
        kinds = pa.schema([table.schema.field(name) for name in schema.columns])
        example = None if held_out else first_rows(schema, table)
        return cls(schema, counts, sums, lengths, {kinds.remove_metadata(): path}, example)

    def __add__(self, other: ColumnStatistics) -> ColumnStatistics:
        """Add the statistics of other rows; raise a DataError if their columns' types differ."""
        types = {**self.types, **other.types, **self.types}
        if len(types) > len(self.types):
            _common(self.schema, types)
        counts = _sum(self.counts, other.counts)
        sums, lengths = _sum(self.sums, other.sums), _sum(self.lengths, other.lengths)
        # A part of a cluster may have no rows.
        example = self.example or other.example
        return ColumnStatistics(self.schema, counts, sums, lengths, types, example)

    def encoder(self) -> TableEncoder:
        """Make the encoder.

        Raises:
            DataError: A column that needs a vocabulary has no values.
        """
        vocabularies = {}
        for name, options in self.schema.categorical.items():
            if options.encoding != "vocabulary" or options.table is not None:
                continue
            try:
                vocabularies[name] = self.counts.get(name, ValueCounts()).vocabulary(
                    min_count=options.min_count,
                    max_size=options.max_size,
                    num_unknown=options.num_unknown,
                )
            except ValueError:
                raise DataError(
                    f"column {name!r} has no values in the training rows; leave it out of the "
                    f"schema, or by --exclude {name}"
                ) from None
        for name, options in self.schema.categorical.items():
            if options.table in vocabularies:
                vocabularies[name] = vocabularies[options.table]
        # In the schema's order, not in that of the parts.
        columns = self.schema.columns
        moments = {name: self.sums[name].moments() for name in columns if name in self.sums}
        lengths = {name: self.lengths[name] for name in columns if name in self.lengths}
        example = self.example
        if example is not None and len(self.types) > 1:
            example = _with_values(example, _common(self.schema, self.types))
        return TableEncoder(self.schema, vocabularies, moments, lengths, example)


def _common(schema: Schema, types: Mapping[pa.Schema, str | os.PathLike[str]]) -> pa.Schema:
    """Return the types on which the columns of all files agree, or raise a DataError."""
    return common_columns([(path, kinds) for kinds, path in types.items()], schema.columns)


def _with_values(example: pa.Table, types: pa.Schema) -> pa.Table:
    """Give columns of nulls or booleans the types that other files have for them.

    An encoder later takes columns of these types, which must not depend on the order of the files.
    """
    for number, field in enumerate(example.schema):
        if field.name not in types.names:
            continue
        kind, wanted = value_type(field.type), types.field(field.name).type
        if pa.types.is_boolean(kind) and not pa.types.is_boolean(value_type(wanted)):
            # Arrow makes no decimals and halves of booleans.
            wide = pa.int64() if is_integral(value_type(wanted)) else pa.float64()
            wanted = pa.list_(wide) if is_list(wanted) else wide
        elif not pa.types.is_null(kind):
            continue
        wanted = wanted if is_list(wanted) else value_type(wanted)
        column = example[field.name].cast(wanted)
        example = example.set_column(number, field.with_type(wanted), column)
    return example


def _sum(one: Mapping[str, Statistic], other: Mapping[str, Statistic]) -> dict[str, Statistic]:
    """Add the statistics of equal columns."""
    added = {name: one[name] + other[name] for name in one if name in other}
    return {**one, **other, **added}


def learn_encoder(
    schema: Schema,
    training: LocatedGroups | Iterable[pa.Table],
    held_out: LocatedGroups | Iterable[pa.Table] = (),
    progress: Callable[[int], None] = lambda rows: None,
) -> TableEncoder:
    """Learn the vocabularies, the means and the lengths of lists that a schema needs.

    One pass reads the rows group by group; memory grows with the number of distinct values. The
    pass also checks the values of all other columns, so that neither training nor evaluation fails
    later. On a cluster `EncoderLearner` learns the same encoder.

    Args:
        schema: The schema.
        training: The training rows.
        held_out: The held-out rows. Only the lengths of lists are learned from them, since
            evaluation needs capacities, too.
        progress: Called after each group with the group's number of rows.

    Raises:
        OSError: Rows cannot be read.
        DataError: A column is missing, has another type, or has an invalid value.
    """
    check_zones(schema)
    total = ColumnStatistics(schema)
    for groups, is_held_out in ((training, False), (held_out, True)):
        for table, path, first in _tables(groups):
            total += ColumnStatistics.of(schema, table, path, first, held_out=is_held_out)
            progress(len(table))
    return total.encoder()


@dataclasses.dataclass(frozen=True)
class EncoderLearner:
    """Learns an encoder on a cluster: a function from Arrow to Arrow, whose results are merged.

    Called with a table or a record batch it returns one row, the statistics of all rows, in the
    column ``statistics`` of bytes; called with an iterator of record batches, as Spark does, one
    record batch of one row. `encoder` merges the rows of all parts. The parts and their order do
    not matter: the encoder is that of `learn_encoder`, bit for bit, but for `TableEncoder.example`.

    The bytes are a pickle. Merge only what your own cluster has made.

    Attributes:
        schema: The schema.

    Raises:
        SchemaError: A time zone of the schema is unknown.
        DataError: A column is missing, has another type, or has an invalid value.

    Example:
        >>> schema = Schema.from_dict({"label": "label", "categorical": ["city"]})
        >>> table = pa.table({"label": [0, 1, 1], "city": ["Oslo", "Rome", "Rome"]})
        >>> learner = EncoderLearner(schema)
        >>> parts = [learner(table[:2]), learner(table[2:])]
        >>> learner.encoder(parts).vocabularies["city"].values.to_pylist()
        ['Rome']
    """

    schema: Schema

    def __post_init__(self) -> None:
        check_zones(self.schema)

    def __call__(self, rows: Any) -> Any:
        if isinstance(rows, pa.Table):
            return self._row(ColumnStatistics.of(self.schema, rows))
        if isinstance(rows, pa.RecordBatch):
            return as_batch(self(pa.Table.from_batches([rows])))
        return self._merged(rows)

    def _merged(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        parts = (ColumnStatistics.of(self.schema, pa.Table.from_batches([x])) for x in batches)
        yield as_batch(self._row(sum(parts, ColumnStatistics(self.schema))))

    def _row(self, statistics: ColumnStatistics) -> pa.Table:
        return pa.table({"statistics": pa.array([pickle.dumps(statistics, 5)], pa.binary())})

    def encoder(self, parts: Iterable[pa.Table | pa.RecordBatch]) -> TableEncoder:
        """Merge parts, tables or record batches of rows that calls returned, to an encoder.

        Raises:
            DataError: The types of the parts' columns differ, or a column that needs a vocabulary
                has no values.
        """
        rows = (row for part in parts for row in part.column("statistics").to_pylist())
        return functools.reduce(operator.add, map(pickle.loads, rows)).encoder()


def _tables(
    groups: LocatedGroups | Iterable[pa.Table],
) -> Iterator[tuple[pa.Table, str | pathlib.Path, int]]:
    """Yield each group's rows, its file, and the number of its first row in the file."""
    if not isinstance(groups, LocatedGroups):
        yield from ((table, "the table", 0) for table in groups)
        return
    numbers = range(len(groups.sizes))
    # The next group is read while one is counted.
    with Pipeline((groups.read(group), *groups.location(group)) for group in numbers) as tables:
        yield from tables
