"""Vocabularies and statistics of a schema, learned in one pass over the training rows."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable

import pyarrow as pa

from jaxrec.data.column_types import check_columns, is_list
from jaxrec.data.encode import (
    Moments,
    Place,
    encode_categorical,
    encode_label,
    encode_weight,
    flat_values,
    present_numbers,
)
from jaxrec.data.encoder import TableEncoder
from jaxrec.data.groups import PlacedGroups
from jaxrec.data.list_lengths import ListLengths
from jaxrec.data.prefetch import prefetch
from jaxrec.data.schema import Schema
from jaxrec.data.text import DataError
from jaxrec.data.vocabulary import ValueCounts


def needs_pass(schema: Schema, columns: pa.Schema) -> bool:
    """Whether an encoder of columns of these types has something to learn."""
    return (
        any(options.is_learned for options in schema.dense.values())
        or any(options.encoding == "vocabulary" for options in schema.categorical.values())
        or any(is_list(columns.field(name).type) for name in schema.categorical)
    )


def learn_encoder(
    schema: Schema,
    training: PlacedGroups | Iterable[pa.Table],
    held_out: PlacedGroups | Iterable[pa.Table] = (),
    progress: Callable[[int], None] = lambda rows: None,
) -> TableEncoder:
    """Learn the vocabularies, means and lengths of lists that a schema needs.

    Goes through the rows once, group by group; memory grows with the distinct values. Columns
    without a vocabulary are checked on the way, so that training does not stop at a bad value.

    Args:
        schema: The columns.
        training: Rows to learn from.
        held_out: Rows of which only the lengths of lists matter.
        progress: Told the number of rows of each group that has been read.

    Raises:
        OSError: Rows cannot be read.
        DataError: A column is lacking, has another type, or has a value that it must not have.
    """
    counts = {n: ValueCounts() for n, x in schema.categorical.items() if x.encoding == "vocabulary"}
    moments = {name: Moments() for name, x in schema.dense.items() if x.is_learned}
    lengths: dict[str, ListLengths] = {}
    for groups, is_training in ((training, True), (held_out, False)):
        if not is_training and not lengths:
            break
        for table, path, first in _tables(groups):
            check_columns(schema, table.schema, path)
            for name, options in schema.categorical.items():
                place = Place(path, first, name)
                flat, each = flat_values(table[name], place)
                if each is not None:
                    seen = ListLengths.of(each)
                    lengths[name] = lengths[name] + seen if name in lengths else seen
                if not is_training:
                    continue
                if name in counts:
                    _count(counts[name], flat, place)
                else:
                    encode_categorical(table[name], options, None, place)
            if is_training:
                encode_label(table[schema.label], Place(path, first, schema.label))
                if schema.weight is not None:
                    encode_weight(table[schema.weight], Place(path, first, schema.weight))
                for name, dense in schema.dense.items():
                    values, is_null = present_numbers(table[name], dense, Place(path, first, name))
                    if name in moments:
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
                f"column {name!r} has no values in the training rows; leave it out of the schema"
            ) from None
    return TableEncoder(schema, vocabularies, moments, lengths)


def _count(counts: ValueCounts, flat: pa.Array, place: Place) -> None:
    try:
        counts.add(flat)
    except TypeError as error:
        raise DataError(f"{place.path}, column {place.column!r}: {error}") from None


def _tables(
    groups: PlacedGroups | Iterable[pa.Table],
) -> Iterable[tuple[pa.Table, str | pathlib.Path, int]]:
    """Each group with its file and the rows of the file before it."""
    if not isinstance(groups, PlacedGroups):
        return ((table, "the table", 0) for table in groups)
    numbers = range(len(groups.sizes))
    return prefetch(((groups.read(group), *groups.place(group)) for group in numbers), 1)
