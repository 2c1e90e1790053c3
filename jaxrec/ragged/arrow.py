"""Conversion of Arrow columns to flat columns, and functions of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrec.ragged.columns import WIDE_IDS, Column, by_name, check_weight_lengths, sample_of

if TYPE_CHECKING:
    import pyarrow as pa


def named_columns(data: Any) -> dict[str, Any]:
    """Return the columns of a table, record batch or mapping by name."""
    if not _is_table(data):
        return by_name("data", data)
    names = list(data.column_names)
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"columns {repeated} occur more than once in the table; rename_columns() gives each a "
            "name of its own, select() by position leaves some out"
        )
    return dict(zip(names, data.columns, strict=True))


def from_arrow(
    feature: str, array: Any, weights: Any | None = None, *, id_bits: int = 32
) -> Column:
    """Make a column of an Arrow array of ids, one for each sample, or of lists of ids.

    With 64 bits, strings and binary values stay in Arrow.
    """
    # A null row is an empty bag. A null inside a list is refused: it could mean a missing id or an
    # id to ignore, and Arrow does not tell which.
    wanted, accepts = ("integers", _is_integer) if id_bits == 32 else ("integers, strings", _is_id)
    values, lengths = _flat(feature, array, wanted, accepts)
    if weights is None:
        return Column(values, lengths)
    flat_weights, weight_lengths = _flat(feature, weights, "floating point", _is_number)
    check_weight_lengths(feature, lengths, weight_lengths)
    return Column(values, lengths, flat_weights)


def _flat(
    feature: str, array: pa.Array | pa.ChunkedArray, wanted: str, accepts: Any
) -> tuple[Any, np.ndarray]:
    """Return the values of all samples, and the number of values of each sample.

    ``accepts`` tells whether values may have an Arrow type; errors call such values ``wanted``.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(array, pa.Array | pa.ChunkedArray):
        raise TypeError(f"feature {feature!r} is a {type(array).__name__}; expected an Arrow array")
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    if isinstance(array, pa.ChunkedArray):  # no chunks, in Arrow versions that keep them
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if accepts(array.type):
        array = _decoded(array)
        lengths = np.asarray(array.is_valid()).astype(np.int64)
        return _unboxed(array.drop_null()), lengths
    if not _is_list(array.type) or not accepts(array.type.value_type):
        hint = f"; {WIDE_IDS}" if accepts is _is_integer and _is_id(_element(array.type)) else ""
        raise TypeError(
            f"feature {feature!r} is of Arrow type {array.type}; expected {wanted} or lists of "
            f"them{hint}"
        )
    lengths = pc.list_value_length(array).fill_null(0).to_numpy().astype(np.int64)
    flat = _decoded(array.flatten())  # without the rows that are null
    if flat.null_count:
        position = int(np.flatnonzero(np.asarray(flat.is_null()))[0])
        raise ValueError(
            f"feature {feature!r}, sample {sample_of(lengths, position)} has a null inside its "
            "list; fill or drop it"
        )
    return _unboxed(flat), lengths


def _unboxed(array: pa.Array) -> Any:
    """Return numbers as a NumPy array, and other values as they are."""
    return array.to_numpy(zero_copy_only=False) if _is_number(array.type) else array


def map_values(
    array: Any, function: Callable[[Any], np.ndarray], *, accepts_nulls: bool = False
) -> Any:
    """Replace the values of an Arrow column by numbers; keep its chunks, lists and null lists.

    ``function`` takes an Arrow array of values and returns one number for each.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    def of_chunk(chunk: pa.Array, first: int) -> pa.Array:
        if not _is_list(chunk.type):
            if not accepts_nulls and (position := _first_null(chunk)) is not None:
                raise null_error(f"value {first + position}")
            return pa.array(function(chunk))
        lengths = pc.list_value_length(chunk).fill_null(0).to_numpy().astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        flat = chunk.flatten()  # without null lists
        if not accepts_nulls and (position := _first_null(flat)) is not None:
            row = int(np.searchsorted(offsets, position, side="right")) - 1
            raise null_error(f"value {position - offsets[row]} of list {first + row}")
        # Lists keep their offsets and nulls; only what is in them changes.
        is_large = len(flat) >= 2**31
        lists = pa.LargeListArray if is_large else pa.ListArray
        starts = pa.array(offsets if is_large else offsets.astype(np.int32))
        return lists.from_arrays(starts, pa.array(function(flat)), mask=chunk.is_null())

    if isinstance(array, pa.Array):
        return of_chunk(array, 0)
    if not isinstance(array, pa.ChunkedArray):
        raise TypeError(f"expected an Arrow array or chunked array, got {type(array).__name__}")
    chunks, first = [], 0
    for chunk in array.chunks or [pa.array([], array.type)]:
        chunks.append(of_chunk(chunk, first))
        first += len(chunk)
    return pa.chunked_array(chunks)


def null_error(where: str) -> ValueError:
    return ValueError(f"{where} is null; drop nulls or fill them with a value")


def _first_null(array: pa.Array) -> int | None:
    import pyarrow as pa

    # Arrow counts a dictionary's null codes, not codes of a null value.
    if isinstance(array.type, pa.DictionaryType) and array.dictionary.null_count:
        array = array.cast(array.type.value_type)
    if not array.null_count:
        return None
    return int(np.flatnonzero(np.asarray(array.is_null()))[0])


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return (
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


def _is_table(data: Any) -> bool:
    return hasattr(data, "column_names") and hasattr(data, "columns")


def _is_integer(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_integer(kind)


def _is_id(kind: pa.DataType) -> bool:
    """Return whether values of a type can be raw ids: integers, strings or binary values."""
    import pyarrow as pa

    if isinstance(kind, pa.DictionaryType):
        return _is_id(kind.value_type)
    names = "string large_string string_view binary large_binary binary_view fixed_size_binary"
    return pa.types.is_integer(kind) or any(
        getattr(pa.types, f"is_{name}")(kind) for name in names.split()
    )


def _element(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if _is_list(kind) else kind


def _decoded(array: pa.Array) -> pa.Array:
    """Cast an array to a type whose nulls Arrow can drop; dictionaries of integers to integers."""
    import pyarrow as pa

    # `drop_null` keeps the nulls of views. In a dictionary it sees null codes, but not codes of a
    # null value. Dictionaries of strings stay: `hash_ids` hashes each distinct string once.
    kind = array.type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return array.cast(pa.large_binary())
    if not isinstance(kind, pa.DictionaryType):
        return array
    is_plain = pa.types.is_integer(kind.value_type) or array.dictionary.null_count
    return array.cast(kind.value_type) if is_plain else array


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_floating(kind) or pa.types.is_integer(kind)
