"""Requests with raw columns, which the model's encoder encodes as in training."""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from jaxrec.data import TableEncoder, Vocabulary
from jaxrec.data.column_types import is_string, value_type
from jaxrec.data.encode import Location, is_boolean, joined
from jaxrec.data.encoder import bags_of
from jaxrec.data.statistics import Moments
from jaxrec.data.times import instants
from jaxrec.data.vectors import stacked
from jaxrec.serve.artifact.batch_spec import ArrayInput, BatchSpec
from jaxrec.serve.artifact.requests import Column, Request, offsets_of
from jaxrec.serve.http.input_columns import InputColumn, InputColumns, Kind


class RawColumns(InputColumns[Request]):
    """A column for each dense and categorical column of an encoder's schema.

    A column of times takes the place of its parts, and fields of structs are columns of their own.
    """

    def __init__(self, encoder: TableEncoder, spec: BatchSpec) -> None:
        columns = {column.name: column for column in (*_dense(encoder), *_categorical(encoder))}
        super().__init__(
            columns.get(name) or _times(encoder, name) for name in encoder.schema.feature_inputs
        )
        self._encoder, self._spec = encoder, spec

    def request(self, table: pa.Table) -> Request:
        encoded = self._encoder.encode(table.select(self.names), "the request")
        schema = self._encoder.schema
        numbers = [joined(encoded[name]) for name in schema.dense]
        dense = stacked(numbers, schema.widths, len(table))
        (ragged,) = self._spec.ragged
        bags = [_bags(joined(encoded[name])) for name in ragged.keys]
        inputs = [dense if isinstance(each, ArrayInput) else bags for each in self._spec.inputs]
        request = Request.of_inputs(self._spec, inputs)
        request.check()
        return request


def _bags(column: pa.Array) -> Column:
    """Return an encoded column's row indices as a column of the request."""
    ids, lengths = bags_of(column)
    return Column(ids, lengths, offsets_of(lengths), None)


def _dense(encoder: TableEncoder) -> Iterator[InputColumn]:
    for name, options in encoder.schema.dense.items():
        if options.part is not None:
            continue
        shape = () if options.width is None else (options.width,)
        if is_boolean(encoder.example, name):
            kind: Kind = "bool"
            arrow_type = pa.bool_()
            values: tuple[Any, ...] = (False, True)
        else:
            mean = encoder.moments.get(name, Moments()).mean
            value = float(f"{mean:.3g}") if math.isfinite(mean) else 0.0
            kind, arrow_type, values = "number", pa.float64(), (value, value + 1)
        if options.width is not None:
            values = tuple([each] * options.width for each in values)
        yield InputColumn(
            name,
            kind,
            shape=shape,
            may_be_null=True,
            arrow_type=arrow_type,
            example=_example(encoder, name) or values,
        )


def _categorical(encoder: TableEncoder) -> Iterator[InputColumn]:
    for name, options in encoder.schema.categorical.items():
        if options.part is not None:
            continue
        kind: Kind = "text or integer"
        arrow_type, num_ids = None, None
        values: list[Any] = [0, 1]
        vocabulary = encoder.vocabularies.get(name)
        if isinstance(vocabulary, Vocabulary):
            known = vocabulary.values
            is_integer = pa.types.is_integer(known.type)
            kind, arrow_type = ("integer" if is_integer else "text"), known.type
            values = [_shown(value) for value in known[:2].to_pylist()]
            values = values or ([0] if is_integer else [""])
        elif name in encoder.is_text:
            if encoder.is_text[name]:
                kind, arrow_type, values = "text", pa.string(), ["a", "b"]
            else:
                kind = "integer"  # of a type that the values choose: with a sign or without
        elif options.encoding in ("ids", "modulo"):
            kind, arrow_type = "integer", pa.int64()
            num_ids = options.num_embeddings if options.encoding == "ids" else None
            values = [0, 0 if num_ids == 1 else 1]
        if is_boolean(encoder.example, name):
            kind, arrow_type, values = "bool", pa.bool_(), [False, True]
        first, last = values[0], values[-1]
        is_list = name in encoder.lengths
        yield InputColumn(
            name,
            kind,
            is_list=is_list,
            num_ids=num_ids,
            may_be_null=True,
            arrow_type=arrow_type,
            example=tuple(_whole(value) for value in _example(encoder, name))
            or (([first, last], []) if is_list else (first, last)),
        )


def _times(encoder: TableEncoder, name: str) -> InputColumn:
    """Return the column of the request with the times that parts are taken of."""
    example: tuple[Any, ...] = ("2024-03-01T10:00:00Z", "2024-12-31T23:59:59Z")
    if encoder.example is not None and len(column := encoder.example[name]):
        if is_string(column.type):
            example = tuple(column.to_pylist())
        else:
            times = instants(column, Location("the example", 0, name)).cast(pa.timestamp("us"))
            kind = column.type
            end = "Z" if pa.types.is_timestamp(kind) and kind.tz is not None else ""
            example = tuple(
                None if each is None
                else str(each.date()) if pa.types.is_date(kind)
                else each.isoformat() + end
                for each in times.to_pylist()
            )  # fmt: skip
    return InputColumn(name, "time", may_be_null=True, arrow_type=pa.string(), example=example)


def _example(encoder: TableEncoder, name: str) -> tuple[Any, ...]:
    """Return a column of the training rows that the encoder keeps, in types of JSON."""
    if encoder.example is None:
        return ()
    column = encoder.example[name]
    values = [_shown(value) for value in column.to_pylist()]
    kind = value_type(column.type)
    if pa.types.is_float32(kind):
        return tuple(_shortest(value) for value in values)
    return tuple(values)


def _shortest(value: Any) -> Any:
    """Return numbers of float32 with the fewest digits that tell them apart."""
    if isinstance(value, list):
        return [_shortest(each) for each in value]
    return None if value is None else float(str(np.float32(value)))


def _whole(value: Any) -> Any:
    """Convert numbers of a categorical column's value to signed 64-bit integers."""
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, float):
        return int(value)
    # The same bits: ids of 64 bits without a sign are stored with one.
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


def _shown(value: Any) -> Any:
    """Convert a column's value to a type of JSON."""
    if isinstance(value, list):
        return [_shown(each) for each in value]
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else value
