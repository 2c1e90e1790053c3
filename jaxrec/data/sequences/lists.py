"""List columns as flat arrays of int32, with errors that name the file, the row and the column."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int, Int32, Num

from jaxrec.data.column_types import is_list
from jaxrec.data.encode import (
    Location,
    encode_categorical,
    flat_values,
    joined,
    value_errors,
)
from jaxrec.data.encoder import bags_of
from jaxrec.data.files import DataError
from jaxrec.data.schema import CategoricalColumn

# Integers that are not ids have no table, so any number of rows will do.
_INTEGERS = CategoricalColumn("ids", 2**31 - 1, missing="error")


@dataclasses.dataclass(frozen=True, eq=False)
class FlatColumn:
    """Values of a column's lists, one list after the other.

    Attributes:
        values: ``[values]`` int32.
        offsets: ``[rows + 1]`` int64, where each list begins and ends.
        location: Where the column comes from, for errors.
    """

    values: Int32[np.ndarray, " values"]
    offsets: Int[np.ndarray, " ends"]
    location: Location

    def error(self, position: int | np.integer, problem: str) -> DataError:
        """Return an error about the value at a position."""
        row = int(np.searchsorted(self.offsets, position, side="right")) - 1
        place = int(position - self.offsets[row])
        return self.location.error(row, f"value {place} of the list: {problem}")


def id_column(
    column: pa.ChunkedArray, options: CategoricalColumn, location: Location
) -> FlatColumn:
    """Encode ids, or lists of ids, as row indices; a null is an empty list.

    Raises:
        DataError: An id is outside its table, or a list has a null.
    """
    values, lengths = bags_of(encode_categorical(column, options, None, location))
    return FlatColumn(values, _offsets(lengths), location)


def integer_column(column: pa.ChunkedArray, location: Location) -> FlatColumn:
    """Return lists of whole numbers, booleans or timestamps, in seconds, from 0 to 2**31 - 1.

    Raises:
        DataError: A value is null, has a fraction or does not fit.
    """
    flat, lengths = flat_values(_in_seconds(joined(column)), _INTEGERS, location)
    error = value_errors(lengths, location)
    if not pa.types.is_integer(flat.type):
        raise DataError(
            f"{location.path}, column {location.column!r} is of type {column.type}; expected whole "
            "numbers, or lists of them"
        )
    values = flat.to_numpy(zero_copy_only=False)
    bad = (values < 0) | (values > 2**31 - 1)
    if bad.any():
        at = int(np.argmax(bad))
        raise error(at, f"the number {values[at]} is not from 0 to 2**31 - 1; times are in seconds")
    each = np.ones(len(column), np.int64) if lengths is None else lengths
    return FlatColumn(values.astype(np.int32), _offsets(each), location)


def _in_seconds(array: pa.Array) -> pa.Array:
    """Convert timestamps, or lists of them, to seconds; leave other columns as they are."""
    kind = array.type.value_type if is_list(array.type) else array.type
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return array
    flat = array.flatten() if is_list(array.type) else array
    seconds = flat.cast(pa.timestamp("s"), safe=False).cast(pa.int64())
    if not is_list(array.type):
        return seconds
    offsets = _offsets(pc.list_value_length(array).fill_null(0).to_numpy())
    return pa.LargeListArray.from_arrays(pa.array(offsets), seconds)


def _offsets(lengths: Num[np.ndarray, " rows"]) -> Int[np.ndarray, " ends"]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def check_one_length(columns: Sequence[FlatColumn]) -> None:
    """Raise an error unless the lists of each row have one length in all columns.

    Raises:
        DataError: Two columns differ; the error names the row and both.
    """
    first, *others = columns
    for other in others:
        if not np.array_equal(first.offsets, other.offsets):
            own, wanted = np.diff(other.offsets), np.diff(first.offsets)
            row = int(np.argmax(own != wanted))
            raise other.location.error(
                row,
                f"its list has {own[row]} values, but that of column {first.location.column!r} has "
                f"{wanted[row]}; they are of the same events, so give them one length",
            )


def check_ascending(times: FlatColumn) -> None:
    """Raise an error unless the times of each list ascend.

    Raises:
        DataError: A time is before the one at the place before it.
    """
    is_earlier = np.diff(times.values) < 0
    # The first time of a list may be before the last one of the list before it.
    ends = times.offsets[1:-1]
    is_earlier[ends[(ends > 0) & (ends < len(times.values))] - 1] = False
    if is_earlier.any():
        at = int(np.argmax(is_earlier)) + 1
        raise times.error(
            at,
            f"the time {times.values[at]} is before the time {times.values[at - 1]} at the place "
            "before it; lists are oldest first",
        )
