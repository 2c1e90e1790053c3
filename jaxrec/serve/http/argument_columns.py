"""Requests with a column for each argument of a model that was exported without an encoder."""

from __future__ import annotations

import re
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrec.data.column_types import is_list
from jaxrec.data.encode import joined
from jaxrec.ragged.bounds import find_bad_ids
from jaxrec.serve.artifact.batch_spec import ArrayInput, BatchSpec, Feature, RaggedInput
from jaxrec.serve.artifact.requests import Column, Request, checked_array, offsets_of
from jaxrec.serve.http.input_columns import InputColumn, InputColumns, Kind

WEIGHTS = ".weights"


class ArgumentColumns(InputColumns[Request]):
    """A column for each array and for each feature of the batches that a model takes.

    An array's column has the last name of its path, such as ``bias`` for ``batch[0]['bias']``, or
    ``input0`` for ``batch[0]``. A feature's column has the feature's name, and its weights are
    ``NAME.weights``. Where two columns would share a name, an array gets its whole path and a
    feature its input's path before its name.
    """

    def __init__(self, spec: BatchSpec) -> None:
        self._spec = spec
        self._names = _column_names(spec)
        super().__init__(self._columns())

    def _columns(self) -> Iterator[InputColumn]:
        for each in self._spec.inputs:
            if isinstance(each, ArrayInput):
                yield _array_column(self._names[each.name, ""], each)
                continue
            for feature in each.features:
                name = self._names[each.name, feature.name]
                count = feature.fixed or 2
                last = (feature.num_ids or 2) - 1
                ids = [min(i, last) for i in range(count)]
                second = [] if feature.fixed is None else ids
                yield InputColumn(
                    name,
                    "integer",
                    is_list=True,
                    num_ids=feature.num_ids,
                    arrow_type=pa.int64(),
                    example=(ids, second),
                )
                if each.is_weighted:
                    yield InputColumn(
                        name + WEIGHTS,
                        "number",
                        is_list=True,
                        arrow_type=pa.float64(),
                        example=([1.0] * count, [1.0] * len(second)),
                    )

    def request(self, table: pa.Table) -> Request:
        request = Request.of_inputs(self._spec, self.inputs(table))
        request.check()
        return request

    def inputs(self, table: pa.Table) -> list[np.ndarray | list[Column]]:
        """Return the model's inputs, in order, with ids that are those of their tables."""
        inputs: list[np.ndarray | list[Column]] = []
        for each in self._spec.inputs:
            if isinstance(each, ArrayInput):
                inputs.append(_array(self._names[each.name, ""], each, table))
            else:
                inputs.append(
                    [
                        _bags(self._names[each.name, feature.name], each, feature, table)
                        for feature in each.features
                    ]
                )
        return inputs


def _column_names(spec: BatchSpec) -> dict[tuple[str, str], str]:
    """Return column names by input and feature; the feature of an array is ""."""
    short: dict[tuple[str, str], str] = {}
    for number, each in enumerate(spec.inputs):
        if isinstance(each, RaggedInput):
            short |= {(each.name, feature.name): feature.name for feature in each.features}
        else:
            keys = re.findall(r"\['(.*?)'\]", each.name)
            short[each.name, ""] = keys[-1] if keys else f"input{number}"
    taken = list(short.values())
    return {
        (place, feature): f"{place}.{feature}".rstrip(".") if taken.count(name) > 1 else name
        for (place, feature), name in short.items()
    }


def _array_column(name: str, each: ArrayInput) -> InputColumn:
    dtype = jnp.dtype(each.dtype)
    kinds: dict[str, tuple[Kind, pa.DataType]] = {
        "b": ("bool", pa.bool_()),
        "i": ("integer", pa.int64()),
        "u": ("integer", pa.int64()),
    }
    kind, arrow_type = kinds.get(dtype.kind, ("number", pa.float64()))
    sample = np.zeros(each.shape, {"bool": bool, "integer": int, "number": float}[kind]).tolist()
    return InputColumn(
        name, kind, shape=each.shape, arrow_type=arrow_type, example=(sample, sample)
    )


def _array(name: str, each: ArrayInput, table: pa.Table) -> np.ndarray:
    """Return a column as an array ``[samples, *shape]`` of the input's type."""
    column = joined(table[name])
    shape = [len(column)]
    for dimension in each.shape:
        # One level of lists for each dimension, each of which must have one length in all samples.
        column, lengths = _flat(name, column)
        if lengths is None or (lengths != dimension).any():
            sample = 0 if lengths is None else int(np.argmax(lengths != dimension))
            raise ValueError(
                f"column {name!r}, sample {sample // max(1, int(np.prod(shape[1:])))}: expected "
                f"numbers of the shape {list(each.shape)}"
            )
        shape.append(dimension)
    kind = column.type
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise TypeError(f"column {name!r} is of type {table[name].type}; expected {each.dtype}")
    _check_nulls(name, column, None)
    values = column.to_numpy(zero_copy_only=False).reshape(shape)
    try:
        return checked_array(each, values)
    except (TypeError, ValueError) as error:
        raise type(error)(f"column {name!r}: {error}") from None


def _bags(name: str, each: RaggedInput, feature: Feature, table: pa.Table) -> Column:
    """Return a feature's ids, checked against its table, and their weights."""
    ids, lengths = _numbers(name, table, is_integer=True)
    # As int64, before the cast to int32, which would turn a large id into another valid one.
    bad = find_bad_ids(feature.name, ids, lengths, feature.num_ids)
    if bad is not None:
        raise ValueError(bad.message)
    weights = None
    if each.is_weighted:
        weights, of_weights = _numbers(name + WEIGHTS, table, is_integer=False)
        if len(of_weights) == len(lengths) and (of_weights != lengths).any():
            sample = int(np.argmax(of_weights != lengths))
            raise ValueError(
                f"feature {feature.name!r}, sample {sample}: {lengths[sample]} ids and "
                f"{of_weights[sample]} weights; give a weight for each id"
            )
        weights = weights.astype(np.float32)
    return Column(ids.astype(np.int32), lengths, offsets_of(lengths), weights)


def _numbers(name: str, table: pa.Table, *, is_integer: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return a column's numbers ``[values]``, and the int32 number of them in each sample."""
    flat, lengths = _flat(name, joined(table[name]))
    is_number = pa.types.is_integer(flat.type) or (
        not is_integer and pa.types.is_floating(flat.type)
    )
    if not is_number:
        raise TypeError(
            f"column {name!r} is of type {table[name].type}; expected lists of "
            f"{'integers' if is_integer else 'numbers'}"
        )
    _check_nulls(name, flat, lengths)
    try:
        values = flat.cast(pa.int64() if is_integer else pa.float64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise ValueError(f"column {name!r}: {error}") from None
    return values, np.ones(len(flat), np.int32) if lengths is None else lengths


def _flat(name: str, column: pa.Array) -> tuple[pa.Array, np.ndarray | None]:
    """Return a column's values without lists, and the length of each list; None without lists."""
    if not is_list(column.type):
        return column, None
    _check_nulls(name, column, None)
    return column.flatten(), pc.list_value_length(column).to_numpy().astype(np.int32)


def _check_nulls(name: str, array: pa.Array, lengths: np.ndarray | None) -> None:
    if array.null_count:
        position = int(np.argmax(np.asarray(array.is_null())))
        if lengths is not None:
            position = int(np.searchsorted(np.cumsum(lengths), position, side="right"))
        raise ValueError(
            f"column {name!r}, sample {position}: the value is null; leave an id out of its list, "
            "or give a number"
        )
