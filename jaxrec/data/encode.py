"""Encoding of single columns for a model, with errors that name the row."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Float32, Int

from jaxrec.data.column_types import is_dense, is_list, value_type
from jaxrec.data.files import DataError
from jaxrec.data.schema import CategoricalColumn, DenseColumn, LabelColumn
from jaxrec.data.statistics import Moments
from jaxrec.data.transforms import log_counts
from jaxrec.data.vocabulary import FrozenVocabulary, Vocabulary
from jaxrec.ragged import hash_ids
from jaxrec.ragged.raw_ids import RESERVED

_TOO_LARGE = "the number {:g} does not fit float32; take its log"

# Makes the error of a value, given the value's position in the column and the problem as text.
ValueErrors: TypeAlias = Callable[[int, str], DataError]


@dataclasses.dataclass(frozen=True)
class Location:
    """Location of a column's rows in a file, for errors; ``row`` is the number of the first row."""

    path: str | os.PathLike[str]
    row: int
    column: str

    def error(self, row: int | np.integer, problem: str) -> DataError:
        """Return an error about a row, ``row`` rows after the first row of the location."""
        return DataError(
            f"{self.path}, row {self.row + int(row)} (from 0), column {self.column!r}: {problem}"
        )


def _check(
    bad: Bool[np.ndarray, " values"], error: ValueErrors, problem: str, values: Any = None
) -> None:
    """Raise the error of the first value that ``bad`` marks, if any.

    With ``values``, the bad value replaces the ``{}`` of ``problem``.
    """
    if bad.any():
        position = int(np.argmax(bad))
        raise error(position, problem if values is None else problem.format(values[position]))


def joined(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, without a copy if it has one chunk."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def decoded(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array of its values, not as a dictionary."""
    array = joined(column)
    return array.cast(value_type(array.type)) if pa.types.is_dictionary(array.type) else array


def numbers(column: Any) -> tuple[Float[np.ndarray, " rows"], Bool[np.ndarray, " rows"]]:
    """Return a column's numbers as float64, with 0 for nulls, and whether each is null."""
    array = joined(column)
    # float64 for all types, so that one set of checks serves; large int64 lose their last bits,
    # which float32 features do not have anyway.
    values = array.cast(pa.float64(), safe=False)
    if not array.null_count:
        return values.to_numpy(), np.zeros(len(array), bool)
    return values.fill_null(0).to_numpy(), np.asarray(array.is_null())


def is_boolean(rows: pa.Table | None, name: str) -> bool:
    """Return whether a column of a table has booleans or lists of them; False without a table."""
    if rows is None or name not in rows.column_names:
        return False
    kind = rows.schema.field(name).type
    return pa.types.is_boolean(getattr(kind, "value_type", kind))


def check_booleans(column: Any, error: ValueErrors) -> None:
    """Raise an error unless a column's numbers are 0 or 1; other types are not checked."""
    if pa.types.is_floating(column.type) or pa.types.is_integer(column.type):
        values, _ = numbers(column)
        problem = "the value is {:g}; expected true or false"
        _check((values != 0) & (values != 1), error, problem, values)


def encode_label(
    column: Any, label: LabelColumn, moments: Moments, location: Location
) -> Float32[np.ndarray, " rows"]:
    """Return a column's labels; numbers are standardized by the moments of the training rows."""
    if label.kind == "number":
        return encode_dense(column, DenseColumn(missing="error"), moments, location)
    values, is_null = numbers(column)
    advice = (
        "labels must be 0 or 1: make a column of them, name another column as the label, or "
        "predict the number, by --label-kind number or kind: number of a schema's label"
    )
    _check(is_null, location.error, f"the label is null; {advice}")
    bad = (values != 0) & (values != 1)
    _check(bad, location.error, f"the label is {{:g}}; {advice}", values)
    return values.astype(np.float32)


def encode_weight(column: Any, location: Location) -> Float32[np.ndarray, " rows"]:
    values, is_null = numbers(column)
    weights = values.astype(np.float32)
    _check(is_null, location.error, "the weight is null; weights must be 0 or above")
    bad = ~(weights >= 0) | np.isinf(weights)
    _check(bad, location.error, "the weight is {:g}; weights must be 0 or above", values)
    return weights


def present_numbers(
    column: Any, options: DenseColumn, location: Location
) -> tuple[Float[np.ndarray, " rows"], Bool[np.ndarray, " rows"]]:
    """Return a dense column's numbers as float64, with 0 for nulls, and whether each is null.

    Numbers to standardize after a logarithm are returned as logarithms, of which `Moments` are
    learned. A number that the column's transform cannot take is an error.
    """
    values, is_null = numbers(column)
    if options.missing == "error":
        problem = "the number is null; fill it, or give missing: zero in the schema"
        _check(is_null, location.error, problem)
    # Most columns pass this check alone, which NaN does not.
    limit = 2.0**62 if options.transform == "log_counts" else np.finfo(np.float32).max
    if not np.abs(values).max(initial=0) <= limit:
        _check_large(values, options, location)
    if options.transform == "log_standardize":
        values = signed_log1p(values)
    return values, is_null


def _check_large(
    values: Float[np.ndarray, " rows"], options: DenseColumn, location: Location
) -> None:
    """Raise an error for a number that is not finite, or too large for a column's transform."""
    problem = "the number is {}; replace it, by null where it is unknown"
    _check(~np.isfinite(values), location.error, problem, values)
    if options.transform == "log_counts":
        is_large = (values < -(2.0**63)) | (values >= 2.0**63)
        _check(is_large, location.error, "the number {:g} is not a count of 64 bits", values)
    elif options.transform not in ("log1p", "log_standardize"):
        # The logarithm of any float64 fits float32.
        _check(np.abs(values) > np.finfo(np.float32).max, location.error, _TOO_LARGE, values)


def signed_log1p(values: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Compute ``sign(x) * log(1 + abs(x))``."""
    return np.copysign(np.log1p(np.abs(values)), values)


def encode_dense(
    column: Any, options: DenseColumn, moments: Moments, location: Location
) -> Float32[np.ndarray, " rows"]:
    values, is_null = present_numbers(column, options, location)
    # An age counts from the earliest time of the training rows.
    origin = (moments.smallest or 0.0) if options.is_from_earliest else 0.0
    if is_null.any():
        values = np.where(is_null, moments.mean if options.missing == "mean" else origin, values)
    if origin and not options.is_standardized:
        values = values - origin
    if options.is_standardized:
        encoded = (values - moments.mean) / moments.scale
    elif options.transform == "log1p":
        encoded = signed_log1p(values)
    elif options.transform == "log_counts":
        encoded = log_counts(values.astype(np.int64))
    else:
        encoded = values
    # Standardizing by a small scale may still overflow: an error with the row is better than
    # NumPy's warning.
    with np.errstate(over="ignore"):
        encoded = encoded.astype(np.float32)
    _check(~np.isfinite(encoded), location.error, _TOO_LARGE, values)
    return encoded


def flat_values(
    column: Any, options: CategoricalColumn, location: Location
) -> tuple[pa.Array, Int[np.ndarray, " rows"] | None]:
    """Return a categorical column's values without lists, and the length of each list.

    The lengths are int64 ``[rows]``, or None for a column without lists. Numbers are returned as
    integers (`as_integers`).
    """
    array = joined(column)
    lengths, problem = None, "the value is null; fill it, or give missing: unknown in the schema"
    if is_list(array.type):
        lengths = pc.list_value_length(array).fill_null(0).to_numpy().astype(np.int64)
        array, problem = array.flatten(), "a value of the list is null; drop it or fill it"
    error = value_errors(lengths, location)
    flat = as_integers(array, error)
    # A null beside other values of a list is refused always: an empty bag cannot stand for it.
    if flat.null_count and (lengths is not None or options.missing == "error"):
        _check(np.asarray(flat.is_null()), error, problem)
    return flat, lengths


def value_errors(lengths: Int[np.ndarray, " rows"] | None, location: Location) -> ValueErrors:
    """Return a function that makes the error of a value of a column of lists, or of plain values.

    ``lengths`` has the length of each list ``[rows]``; the error names the list's row.
    """
    if lengths is None:
        return location.error

    def error(position: int, problem: str) -> DataError:
        # Positions count the values of all lists. Only an error needs the sums.
        row = np.searchsorted(np.cumsum(lengths), position, side="right")
        return location.error(row, problem)

    return error


def as_integers(flat: pa.Array, error: ValueErrors) -> pa.Array:
    """Convert bools, floats and decimals to int64, and NaN to null; leave other values as they are.

    A number with a fraction is an error, and so is a float so large that its type skips integers.
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
    # pandas writes a column of integers with nulls as floats.
    values, is_null = numbers(flat)
    is_null = is_null | np.isnan(values)
    problem = "{:g} is not a whole number, as ids are"
    _check(~is_null & ~are_whole(values, kind), error, problem, values)
    return pa.array(np.where(is_null, 0, values).astype(np.int64), mask=is_null)


def are_whole(
    values: Float[np.ndarray, " values"], kind: pa.DataType
) -> Bool[np.ndarray, " values"]:
    """Return which numbers are whole and so small that the float type ``kind`` has all integers."""
    # float16, float32 and float64 hold all integers up to 2^11, 2^24 and 2^53. Beyond, two ids
    # may have become one number before we see them.
    digits = {16: 11, 32: 24}.get(kind.bit_width, 53)
    return (np.abs(values) <= 2.0**digits) & (values == np.floor(values))


def _integers_of_decimals(flat: pa.Array, error: ValueErrors) -> pa.Array:
    try:
        return flat.cast(pa.int64())
    except pa.ArrowInvalid:
        # Arrow's error does not name the row: look for it, slowly, only when there is one.
        for position, value in enumerate(flat.to_pylist()):
            if value is not None and not (value == int(value) and -(2**63) <= value < 2**63):
                raise error(position, f"{value} is not an integer of 64 bits") from None
        raise


def encode_categorical(
    column: Any,
    options: CategoricalColumn,
    vocabulary: Vocabulary | FrozenVocabulary | None,
    location: Location,
) -> pa.Array:
    """Return a column's row indices, int32 or lists of int32; int64 raw ids for "dynamic".

    A null gets row 0 from a `Vocabulary`, and stays null, an empty bag, with other encodings.
    """
    flat, lengths = flat_values(column, options, location)
    try:
        if isinstance(vocabulary, Vocabulary):
            rows = pa.array(vocabulary(flat))
        else:
            rows = _rows(flat, options, value_errors(lengths, location))
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


def _rows(flat: pa.Array, options: CategoricalColumn, error: ValueErrors) -> pa.Array:
    """Encode values by an encoding that needs no vocabulary; nulls stay null."""
    count = options.num_embeddings
    if count is None:
        raise ValueError("its vocabulary has not been learned")
    if flat.null_count:
        # Encode the other values, then put the nulls back; NumPy has none.
        valid = np.asarray(flat.is_valid())
        rows = _rows(
            flat.drop_null(), options, lambda at, x: error(int(np.flatnonzero(valid)[at]), x)
        )
        places = np.cumsum(valid) - 1
        return rows.take(pa.array(places, mask=np.asarray(flat.is_null())))
    if options.encoding == "hash":
        return pa.array(hash_ids(flat, count))
    if options.encoding in ("dynamic", "frozen"):
        return pa.array(_raw_ids(flat, error))
    if isinstance(flat.type, pa.DictionaryType):
        flat = flat.cast(flat.type.value_type)
    ids = flat.to_numpy(zero_copy_only=False)
    if options.encoding == "modulo":
        # int8 ids of a large table: the number of rows must fit the type of the ids.
        wide = ids if np.iinfo(ids.dtype).max >= count else ids.astype(np.int64)
        return pa.array((wide % wide.dtype.type(count)).astype(np.int32))
    problem = f"is outside of its table of {count} rows; give a larger num_embeddings"
    bad = (ids < 0) | (ids >= count)
    _check(bad, error, f"id {{}} {problem}, or another encoding", ids)
    return pa.array(ids.astype(np.int32))


def _raw_ids(flat: pa.Array, error: ValueErrors) -> Int[np.ndarray, " values"]:
    """Return int64 ``[values]``: the bits of integers, the hashes of strings and bytes."""
    kind = flat.type.value_type if isinstance(flat.type, pa.DictionaryType) else flat.type
    if not pa.types.is_integer(kind):
        # A user can renumber an id that is reserved, but not a string whose hash is.
        hashes = np.asarray(hash_ids(flat, None)).view(np.int64)
        return np.where(hashes == RESERVED, RESERVED - 1, hashes)
    wide = pa.int64() if pa.types.is_signed_integer(kind) else pa.uint64()
    ids = flat.cast(wide).to_numpy().view(np.int64)
    problem = "id -1 (2**64 - 1 unsigned) is reserved, since many pipelines pad with it; make it "
    _check(ids == RESERVED, error, problem + "null, or give such ids another number")
    return ids
