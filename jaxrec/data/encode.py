"""Encoding of a table's columns for a model; errors name the row."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Float32, Int

from jaxrec.data.column_types import is_dense, is_list, value_type
from jaxrec.data.files import DataError
from jaxrec.data.schema import CategoricalColumn, DenseColumn
from jaxrec.data.statistics import Moments
from jaxrec.data.transforms import log_counts
from jaxrec.data.vocabulary import FrozenVocabulary, Vocabulary
from jaxrec.ragged import hash_ids
from jaxrec.ragged.raw_ids import RESERVED


@dataclasses.dataclass(frozen=True)
class Location:
    """Location of a column's rows in a file, for errors.

    Attributes:
        path: The file.
        row: Number of the first row in the file, from 0.
        column: Name of the column.
    """

    path: str | os.PathLike[str]
    row: int
    column: str

    def error(self, row: int | np.integer, problem: str) -> DataError:
        """Return an error that names a row, counted from the first row."""
        return DataError(
            f"{self.path}, row {self.row + int(row)} (from 0), column {self.column!r}: {problem}"
        )


def joined(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def numbers(column: Any) -> tuple[Float[np.ndarray, " rows"], Bool[np.ndarray, " rows"]]:
    """Return a column's numbers, with 0 for nulls, and the mask of nulls."""
    array = joined(column)
    is_null = np.asarray(array.is_null())
    return array.cast(pa.float64(), safe=False).fill_null(0).to_numpy(), is_null


def is_boolean(rows: pa.Table | None, name: str) -> bool:
    """Return whether a column is one of booleans, or of lists of these."""
    if rows is None:
        return False
    kind = rows.schema.field(name).type
    return pa.types.is_boolean(getattr(kind, "value_type", kind))


def check_booleans(column: Any, error: Any) -> None:
    """Check that the values of a column of booleans are booleans, or the numbers 0 and 1.

    Args:
        column: The column of a request.
        error: Function of a row and a problem, which makes the error of a value.

    Raises:
        DataError: A value is another number.
    """
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        return
    numbers = column.cast(pa.float64(), safe=False).fill_null(0).to_numpy()
    if (wrong := (numbers != 0) & (numbers != 1)).any():
        row = int(np.argmax(wrong))
        raise error(row, f"the value is {numbers[row]:g}; expected true or false")


def encode_label(column: Any, location: Location) -> Float32[np.ndarray, " rows"]:
    values, is_null = numbers(column)
    bad = is_null | ((values != 0) & (values != 1))
    if bad.any():
        row = int(np.argmax(bad))
        raise location.error(
            row,
            f"the label is {'null' if is_null[row] else f'{values[row]:g}'}; labels must be 0 or "
            "1: make a column of them, or name another column as the label",
        )
    return values.astype(np.float32)


def encode_weight(column: Any, location: Location) -> Float32[np.ndarray, " rows"]:
    values, is_null = numbers(column)
    weights = values.astype(np.float32)
    bad = is_null | ~(weights >= 0) | np.isinf(weights)
    if bad.any():
        row = int(np.argmax(bad))
        weight = "null" if is_null[row] else f"{values[row]:g}"
        raise location.error(row, f"the weight is {weight}; weights must be 0 or above")
    return weights


def present_numbers(
    column: Any, options: DenseColumn, location: Location
) -> tuple[Float[np.ndarray, " rows"], Bool[np.ndarray, " rows"]]:
    """Return a dense column's numbers and the mask of nulls; check that the numbers are finite."""
    values, is_null = numbers(column)
    if options.missing == "error" and is_null.any():
        raise location.error(
            np.argmax(is_null), "the number is null; fill it, or give missing: zero in the schema"
        )
    if not (is_finite := np.isfinite(values)).all():
        row = np.argmax(~is_finite)
        raise location.error(
            row, f"the number is {values[row]}; replace it, by null where it is unknown"
        )
    if options.transform == "log_counts":
        is_large = (values < -(2.0**63)) | (values >= 2.0**63)
        problem = "is not a count of 64 bits"
    else:
        is_large = np.abs(values) > np.finfo(np.float32).max
        problem = "does not fit float32; take its log"
    if options.transform != "log1p" and is_large.any():
        row = np.argmax(is_large)
        raise location.error(row, f"the number {values[row]:g} {problem}")
    return values, is_null


def encode_dense(
    column: Any, options: DenseColumn, moments: Moments, location: Location
) -> Float32[np.ndarray, " rows"]:
    values, is_null = present_numbers(column, options, location)
    if options.missing == "mean" and is_null.any():
        values = np.where(is_null, moments.mean, values)
    if options.transform == "standardize":
        encoded = (values - moments.mean) / moments.scale
    elif options.transform == "log1p":
        encoded = np.copysign(np.log1p(np.abs(values)), values)
    elif options.transform == "log_counts":
        encoded = log_counts(values.astype(np.int64))
    else:
        encoded = values
    with np.errstate(over="ignore"):
        encoded = encoded.astype(np.float32)
    if not (is_finite := np.isfinite(encoded)).all():
        row = np.argmax(~is_finite)
        raise location.error(row, f"the number {values[row]:g} does not fit float32; take its log")
    return encoded


def flat_values(
    column: Any, options: CategoricalColumn, location: Location
) -> tuple[pa.Array, Int[np.ndarray, " rows"] | None]:
    """Return a column's values and the lengths of its lists; None for a column without lists.

    Whole numbers of any type, and values that are all null, are integers.
    """
    array = joined(column)
    if not is_list(array.type):
        flat = as_integers(array, location.error)
        if options.missing == "error" and flat.null_count:
            position = np.argmax(np.asarray(flat.is_null()))
            raise location.error(
                position, "the value is null; fill it, or give missing: unknown in the schema"
            )
        return flat, None
    lengths = pc.list_value_length(array).fill_null(0).to_numpy().astype(np.int64)

    def error(position: int, problem: str) -> DataError:
        return location.error(row_of(lengths, position), problem)

    flat = as_integers(array.flatten(), error)
    if flat.null_count:
        position = np.argmax(np.asarray(flat.is_null()))
        raise location.error(
            row_of(lengths, position), "a value of the list is null; drop it or fill it"
        )
    return flat, lengths


def as_integers(flat: pa.Array, error: Callable[[int, str], DataError]) -> pa.Array:
    """Return bools, floats and decimals as int64, and NaN as null; other values as they are.

    pandas writes a column of integers with nulls as floats.

    Args:
        flat: The values.
        error: Function of a position and a problem, which makes the error of a value.

    Raises:
        DataError: A number is not whole, or its type does not hold all integers up to it.
    """
    kind = value_type(flat.type)
    if not is_dense(kind) or pa.types.is_integer(kind):
        return flat
    if isinstance(flat.type, pa.DictionaryType):
        flat = flat.cast(kind)
    if pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return flat.cast(pa.int64())
    if pa.types.is_decimal(kind):
        return _integers_of_decimals(flat, error)
    values, is_null = numbers(flat)
    is_null = is_null | np.isnan(values)
    if (is_wrong := ~is_null & ~are_whole(values, kind)).any():
        position = int(np.argmax(is_wrong))
        raise error(position, f"{values[position]:g} is not a whole number, as ids are")
    return pa.array(np.where(is_null, 0, values).astype(np.int64), mask=is_null)


def are_whole(
    values: Float[np.ndarray, " values"], kind: pa.DataType
) -> Bool[np.ndarray, " values"]:
    """Return which numbers of a type of floats are integers, none of which it leaves out."""
    digits = {16: 11, 32: 24}.get(kind.bit_width, 53)
    return (np.abs(values) <= 2.0**digits) & (values == np.floor(values))


def _integers_of_decimals(flat: pa.Array, error: Callable[[int, str], DataError]) -> pa.Array:
    try:
        return flat.cast(pa.int64())
    except pa.ArrowInvalid:
        for position, value in enumerate(flat.to_pylist()):
            if value is not None and not (value == int(value) and -(2**63) <= value < 2**63):
                raise error(position, f"{value} is not an integer of 64 bits") from None
        raise


def row_of(lengths: Int[np.ndarray, " rows"] | None, position: int | np.integer) -> int:
    """Return the row of the value at a position of the flat values."""
    if lengths is None:
        return int(position)
    return int(np.searchsorted(np.cumsum(lengths), position, side="right"))


def encode_categorical(
    column: Any,
    options: CategoricalColumn,
    vocabulary: Vocabulary | FrozenVocabulary | None,
    location: Location,
) -> pa.Array:
    """Return a column's row indices, int32 or lists of int32; a null is an empty bag.

    Raw ids of a column of encoding "dynamic" are int64.
    """
    flat, lengths = flat_values(column, options, location)
    try:
        if isinstance(vocabulary, Vocabulary):
            rows = pa.array(vocabulary(flat))
        else:
            rows = _rows(flat, options, lambda at, text: location.error(row_of(lengths, at), text))
            if options.encoding == "frozen":
                if vocabulary is None:
                    raise ValueError("encoding frozen is of exported models alone; take dynamic")
                rows = vocabulary(rows)
    except (TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{location.path}, column {location.column!r}: {error}") from None
    if lengths is None:
        return rows
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), rows)


def _rows(
    flat: pa.Array, options: CategoricalColumn, error: Callable[[int, str], DataError]
) -> pa.Array:
    count = options.num_embeddings
    if count is None:
        raise ValueError("its vocabulary has not been learned")
    if flat.null_count:
        rows = _rows(flat.drop_null(), options, error)
        places = np.cumsum(np.asarray(flat.is_valid())) - 1
        return rows.take(pa.array(places, mask=np.asarray(flat.is_null())))
    if options.encoding == "hash":
        return pa.array(hash_ids(flat, count))
    if options.encoding in ("dynamic", "frozen"):
        return pa.array(_raw_ids(flat, error))
    if isinstance(flat.type, pa.DictionaryType):
        flat = flat.cast(flat.type.value_type)
    ids = flat.to_numpy(zero_copy_only=False)
    if options.encoding == "modulo":
        wide = ids if np.iinfo(ids.dtype).max >= count else ids.astype(np.int64)
        return pa.array((wide % wide.dtype.type(count)).astype(np.int32))
    if (outside := (ids < 0) | (ids >= count)).any():
        position = int(np.argmax(outside))
        raise error(
            position,
            f"id {ids[position]} is outside of its table of {count} rows; give a larger "
            "num_embeddings, or another encoding",
        )
    return pa.array(ids.astype(np.int32))


def _raw_ids(flat: pa.Array, error: Callable[[int, str], DataError]) -> Int[np.ndarray, " values"]:
    """Return integers by their bits, and strings and bytes by their hash, as int64."""
    kind = flat.type.value_type if isinstance(flat.type, pa.DictionaryType) else flat.type
    if not pa.types.is_integer(kind):
        hashes = np.asarray(hash_ids(flat, None)).view(np.int64)
        return np.where(hashes == RESERVED, RESERVED - 1, hashes)
    wide = pa.int64() if pa.types.is_signed_integer(kind) else pa.uint64()
    ids = flat.cast(wide).to_numpy().view(np.int64)
    if (reserved := ids == RESERVED).any():
        raise error(
            int(np.argmax(reserved)),
            "id -1 (2**64 - 1 unsigned) is reserved, since many pipelines pad with it; make it "
            "null, or give such ids another number",
        )
    return ids
