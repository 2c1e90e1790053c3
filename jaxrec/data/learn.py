"""Learning an encoder: one pass over the rows that collects statistics and checks all values."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa

from jaxrec.data.column_types import CommonTypes, check_columns, is_list
from jaxrec.data.encode import (
    Location,
    encode_categorical,
    encode_label,
    encode_weight,
    flat_values,
    numbers,
    present_numbers,
)
from jaxrec.data.encoder import TableEncoder, first_rows
from jaxrec.data.feature_table import check_zones, feature_table
from jaxrec.data.files import DataError
from jaxrec.data.groups import LocatedGroups
from jaxrec.data.pipeline import Pipeline
from jaxrec.data.schema import Schema
from jaxrec.data.statistics import ListLengths, Moments
from jaxrec.data.vectors import vector_moments, vectors_of
from jaxrec.data.vocabulary import ValueCounts


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


def learn_encoder(
    schema: Schema,
    training: LocatedGroups | Iterable[pa.Table],
    held_out: LocatedGroups | Iterable[pa.Table] = (),
    progress: Callable[[int], None] = lambda rows: None,
) -> TableEncoder:
    """Learn the vocabularies, the means and the lengths of lists that a schema needs.

    One pass reads the rows group by group; memory grows with the number of distinct values. The
    pass also checks the values of all other columns, so that neither training nor evaluation fails
    later.

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
    counts = {
        name: ValueCounts()
        for name, options in schema.categorical.items()
        if options.encoding == "vocabulary" and options.table is None
    }
    moments = {name: Moments() for name, x in schema.dense.items() if x.is_learned}
    moments |= {name: Moments() for name, x in schema.labels.items() if x.kind == "number"}
    lengths: dict[str, ListLengths] = {}
    example: pa.Table | None = None
    check_zones(schema)
    types = CommonTypes(schema.columns)
    for groups, is_training in ((training, True), (held_out, False)):
        for table, path, first in _tables(groups):
            table = feature_table(schema, table, path, first)
            check_columns(schema, table.schema, path)
            if example is None and is_training:
                example = first_rows(schema, table)
            types.add(table.schema, path)
            # All values are checked: a bad one in the last group ends a run now, not after hours.
            for name, options in schema.categorical.items():
                location = Location(path, first, name)
                flat, each = flat_values(table[name], options, location)
                if each is not None:
                    seen = ListLengths.of(each)
                    lengths[name] = lengths[name] + seen if name in lengths else seen
                # Columns that share a table share its vocabulary, which has the values of all.
                owner = options.table or name
                if owner not in counts:
                    encode_categorical(table[name], options, None, location)
                elif is_training:
                    _count(counts[owner], flat, location)
            for name, label in schema.labels.items():
                location = Location(path, first, name)
                encode_label(table[name], label, Moments(), location)
                if name in moments and is_training:
                    moments[name] += Moments.of(numbers(table[name])[0])
            if schema.weight is not None:
                encode_weight(table[schema.weight], Location(path, first, schema.weight))
            for name, dense in schema.dense.items():
                location = Location(path, first, name)
                if dense.width is not None:
                    vectors, is_null = vectors_of(table[name], dense, location)
                    if name in moments and is_training:
                        moments[name] += vector_moments(vectors[~is_null])
                    continue
                values, is_null = present_numbers(table[name], dense, location)
                if name in moments and is_training:
                    moments[name] += Moments.of(values[~is_null])
            progress(len(table))
    vocabularies = {}
    for name, found in counts.items():
        options = schema.categorical[name]
        try:
            vocabularies[name] = found.vocabulary(
                min_count=options.min_count,
                max_size=options.max_size,
                num_unknown=options.num_unknown,
            )
        except ValueError:
            raise DataError(
                f"column {name!r} has no values in the training rows; leave it out of the schema, "
                f"or by --exclude {name}"
            ) from None
    for name, options in schema.categorical.items():
        if options.table in vocabularies:
            vocabularies[name] = vocabularies[options.table]
    return TableEncoder(schema, vocabularies, moments, lengths, example)


def _count(counts: ValueCounts, flat: pa.Array, location: Location) -> None:
    """Count values of a column; an error about their type names the file and the column."""
    try:
        counts.add(flat)
    except TypeError as error:
        raise DataError(f"{location.path}, column {location.column!r}: {error}") from None


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
