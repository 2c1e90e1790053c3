"""The distinct values of a column: what vocabularies count and look up, once for each value."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int

from jaxrec.data.column_types import is_bytes, is_string

# Number of integers up to which hashing them takes less time than finding their range.
_FEW = 1000


class DistinctValues(NamedTuple):
    """The distinct values of an array without lists, in some order.

    Attributes:
        values: ``[distinct]`` large_string, large_binary or int64, without nulls. Values of an
            array that came as a dictionary may repeat.
        counts: ``[distinct]`` int64, number of rows of each value.
        places: ``[distinct]`` places of the values in a dictionary of ``size`` values.
        codes: ``[rows]`` place of each row's value in the dictionary; ``size`` for a null.
        size: Number of values of the dictionary.
    """

    values: pa.Array
    counts: Int[np.ndarray, " distinct"]
    places: Int[np.ndarray, " distinct"]
    codes: Int[np.ndarray, " rows"]
    size: int

    @classmethod
    def of(cls, values: pa.Array) -> DistinctValues:
        encoded = _encoded(values)
        dictionary, size = encoded.dictionary, len(encoded.dictionary)
        codes = encoded.indices.cast(pa.int64())
        codes = (codes.fill_null(size) if codes.null_count else codes).to_numpy()
        counts = np.bincount(codes, minlength=size)[:size]
        is_used = counts > 0
        if dictionary.null_count:
            is_used &= np.asarray(dictionary.is_valid())
        places = np.flatnonzero(is_used)
        if len(places) < size:
            dictionary = dictionary.take(pa.array(places))
        # Only the distinct values are converted.
        return cls(plain_values(dictionary), counts[places], places, codes, size)


def _encoded(values: pa.Array) -> pa.DictionaryArray:
    """Encode an array as a dictionary, some of whose values may be unused."""
    if isinstance(values, pa.DictionaryArray):
        # A few rows of a large dictionary use little of it.
        if len(values.dictionary) <= 2 * len(values):
            return values
        values = values.cast(values.type.value_type)
    if pa.types.is_string_view(values.type) or pa.types.is_binary_view(values.type):
        values = plain_values(values)
    if pa.types.is_integer(values.type) and len(values) - values.null_count > _FEW:
        values = values if values.type == pa.uint64() else values.cast(pa.int64())
        low, high = pc.min_max(values).as_py().values()
        # Subtracting the smallest value is much faster than hashing.
        if high - low < 2 * len(values):
            codes = pc.subtract(values, pa.scalar(low, values.type))
            # Counted from 0, since the number behind the largest may not fit its type.
            kind = values.type.to_pandas_dtype()
            dictionary = np.arange(high - low + 1).astype(kind) + kind(low)
            return pa.DictionaryArray.from_arrays(codes, dictionary)
    return values.dictionary_encode()


def as_arrow(column: Any) -> pa.Array | pa.ChunkedArray:
    """Convert a NumPy array to Arrow; return a column of Arrow as it is."""
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return column
    try:
        # None and NaN are nulls, as in columns of pandas.
        return pa.array(np.asarray(column).reshape(-1), from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TypeError(f"the values are of several kinds ({error}); expected one kind") from None


def plain_values(values: pa.Array) -> pa.Array:
    """Convert values to large_string, large_binary or int64; uint64 keeps its bits."""
    kind = values.type
    if isinstance(kind, pa.DictionaryType):
        return plain_values(values.cast(kind.value_type))
    if is_string(kind):
        return values.cast(pa.large_string())
    if is_bytes(kind):
        # Arrow has no cast from bytes of a fixed size to large_binary.
        fixed = pa.types.is_fixed_size_binary(kind)
        return (values.cast(pa.binary()) if fixed else values).cast(pa.large_binary())
    if pa.types.is_integer(kind):
        # An unsafe cast wraps large uint64 ids to negative int64, one to one.
        return values.cast(pa.int64(), safe=False)
    if pa.types.is_null(kind):
        return values
    raise TypeError(
        f"the values are of Arrow type {kind}; expected strings, binary values or integers, or "
        "dictionaries or lists of them"
    )
