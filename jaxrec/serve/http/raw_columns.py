"""Requests with raw columns, which the model's encoder encodes as in training."""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from jaxrec.data import TableEncoder, Vocabulary
from jaxrec.data.encode import is_boolean, joined
from jaxrec.data.encoder import bags_of
from jaxrec.data.statistics import Moments
from jaxrec.serve.artifact.batch_spec import ArrayInput, BatchSpec
from jaxrec.serve.artifact.requests import Column, Request, offsets_of
from jaxrec.serve.http.input_columns import InputColumn, InputColumns, Kind


class RawColumns(InputColumns[Request]):
    """A column for each dense and categorical column of an encoder's schema."""

    def __init__(self, encoder: TableEncoder, spec: BatchSpec) -> None:
        super().__init__([*_dense(encoder), *_categorical(encoder)])
        self._encoder, self._spec = encoder, spec

    def request(self, table: pa.Table) -> Request:
        encoded = self._encoder.encode(table.select(self.names), "the request")
        schema = self._encoder.schema
        dense = np.zeros((len(table), len(schema.dense)), np.float32)
        for number, name in enumerate(schema.dense):
            dense[:, number] = joined(encoded[name]).to_numpy()
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
    for name in encoder.schema.dense:
        if is_boolean(encoder.example, name):
            kind: Kind = "bool"
            arrow_type = pa.bool_()
            values: tuple[Any, ...] = (False, True)
        else:
            mean = encoder.moments.get(name, Moments()).mean
            value = float(f"{mean:.3g}") if math.isfinite(mean) else 0.0
            kind, arrow_type, values = "number", pa.float64(), (value, value + 1)
        yield InputColumn(
            name,
            kind,
            may_be_null=True,
            arrow_type=arrow_type,
            example=_example(encoder, name) or values,
        )


def _categorical(encoder: TableEncoder) -> Iterator[InputColumn]:
    for name, options in encoder.schema.categorical.items():
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


def _example(encoder: TableEncoder, name: str) -> tuple[Any, ...]:
    """Return a column of the training rows that the encoder keeps, in types of JSON."""
    if encoder.example is None:
        return ()
    column = encoder.example[name]
    values = [_shown(value) for value in column.to_pylist()]
    if pa.types.is_float32(column.type):  # the shortest digits of a number
        values = [None if value is None else float(str(np.float32(value))) for value in values]
    return tuple(values)


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
