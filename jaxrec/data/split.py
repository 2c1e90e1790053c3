"""Hold-outs: which rows of a data set are trained on, and which are held out."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, UInt64

from jaxrec.data.column_types import is_bytes, is_string
from jaxrec.data.encode import Location, decoded, joined
from jaxrec.data.files import DataError
from jaxrec.data.groups import ColumnGroups
from jaxrec.data.selection import RowMask
from jaxrec.ragged import hash_ids

# Share of the rows that is held out if no other is given.
DEFAULT_FRACTION = 0.1

# Number of rows that a split without a column decides about at once.
_ROWS_AT_ONCE = 1 << 20


class Split(abc.ABC):
    """Decides for each row of a data set whether it is held out.

    The decision depends only on the rows' numbers and on their values in some columns. So it is the
    same in each epoch, in each process, and after a restart.

    Implementors give `decide` and `advice`, and `columns` if they read any. Those that decide about
    each row by itself derive from `RowSplit`.
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that decide; (): the numbers of the rows do."""
        return ()

    @abc.abstractmethod
    def decide(self, total: int, source: str, groups: ColumnGroups | None) -> RowMask:
        """Return the held-out rows; arguments and errors are those of `mask`."""

    @abc.abstractmethod
    def advice(self, total: int, held_out: int, groups: ColumnGroups | None) -> str:
        """Return why all rows are on one side, and what to do."""

    def mask(self, total: int, source: str, groups: ColumnGroups | None = None) -> RowMask:
        """Return the held-out rows of a data set.

        Args:
            total: Number of rows.
            source: The data's name in errors.
            groups: The rows, for a split by `columns`. Only these are read.

        Raises:
            DataError: All rows are on one side, or a value cannot be compared.
        """
        mask = self.decide(total, source, groups)
        if mask.count in (0, total):
            raise DataError(f"{source}: {self.advice(total, mask.count, groups)}")
        return mask


class RowSplit(Split):
    """A split that decides about each row by its number, or by its value in one column."""

    @property
    def column(self) -> str | None:
        """Name of the column that decides which rows are held out. None: the row numbers do."""
        return None

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.column is None else (self.column,)

    @abc.abstractmethod
    def is_held_out(
        self, rows: range, total: int, values: pa.ChunkedArray | None, location: Location
    ) -> Bool[np.ndarray, " rows"]:
        """Return which of some rows are held out.

        Args:
            rows: Numbers of the rows in the data set.
            total: Number of rows of the data set.
            values: Values of `column` in these rows; None if the split reads no column.
            location: Location of the values, for errors.

        Raises:
            DataError: A value cannot be compared.
        """

    def decide(self, total: int, source: str, groups: ColumnGroups | None) -> RowMask:
        mask = RowMask.empty(total)
        first = 0
        for values, location in self._parts(total, source, groups):
            count = min(_ROWS_AT_ONCE, total - first) if values is None else len(values)
            rows = range(first, first + count)
            mask.add(first, self.is_held_out(rows, total, values, location))
            first += count
        return mask

    def _parts(
        self, total: int, source: str, groups: ColumnGroups | None
    ) -> Iterator[tuple[pa.ChunkedArray | None, Location]]:
        name = self.column
        if name is None:
            for _ in range(0, total, _ROWS_AT_ONCE):
                yield None, Location(source, 0, "")
        elif groups is not None:
            for group in range(len(groups.sizes)):
                location = Location(*groups.location(group), name)
                yield groups.read(group, [name])[name], location


@dataclasses.dataclass(frozen=True)
class LastRows(RowSplit):
    """Holds out the last rows of the files, at least one.

    Attributes:
        fraction: Share of the rows.
    """

    fraction: float = DEFAULT_FRACTION

    def is_held_out(
        self, rows: range, total: int, values: pa.ChunkedArray | None, location: Location
    ) -> Bool[np.ndarray, " rows"]:
        return np.arange(rows.start, rows.stop) >= total - max(1, round(total * self.fraction))

    def advice(self, total: int, held_out: int, groups: ColumnGroups | None) -> str:
        return (
            f"{total} rows are too few to train on some and hold out {self.fraction:.0%}; give "
            "more rows, or others with --hold-out-data"
        )

    def __str__(self) -> str:
        return f"the last {100 * self.fraction:.4g} % of the rows"


@dataclasses.dataclass(frozen=True)
class RandomRows(RowSplit):
    """Holds out each row with a probability, by a hash of its number.

    Attributes:
        fraction: The probability.
        seed: Seed of the hash.
    """

    fraction: float = DEFAULT_FRACTION
    seed: int = 0

    def is_held_out(
        self, rows: range, total: int, values: pa.ChunkedArray | None, location: Location
    ) -> Bool[np.ndarray, " rows"]:
        hashes = hash_ids(np.arange(rows.start, rows.stop), None, self.seed)
        return _is_low(hashes, self.fraction)

    def advice(self, total: int, held_out: int, groups: ColumnGroups | None) -> str:
        return (
            f"random:{self.fraction:.4g} holds out {held_out} of {total} rows; give more rows, "
            "another fraction, or another --seed"
        )

    def __str__(self) -> str:
        return f"random {100 * self.fraction:.4g} % of the rows, seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class ValuesOf(RowSplit):
    """Holds out all rows of some values of a column, such as some users, by hashes of the values.

    Rows without a value are trained on.

    Attributes:
        name: The column.
        fraction: Probability that a value is held out.
        seed: Seed of the hash.
    """

    name: str
    fraction: float = DEFAULT_FRACTION
    seed: int = 0

    @property
    def column(self) -> str:
        return self.name

    def is_held_out(
        self, rows: range, total: int, values: pa.ChunkedArray | None, location: Location
    ) -> Bool[np.ndarray, " rows"]:
        assert values is not None
        keys = row_keys(joined(values), location)
        valid = np.asarray(keys.is_valid())
        result = np.zeros(len(keys), bool)
        hashes = np.asarray(hash_ids(keys.drop_null(), None, self.seed))
        result[valid] = _is_low(hashes, self.fraction)
        return result

    def advice(self, total: int, held_out: int, groups: ColumnGroups | None) -> str:
        return (
            f"{'all' if held_out else 'no'} values of column {self.name!r} are among the "
            f"{self.fraction:.4g} that are held out; name a column with more values, or give "
            "another fraction or another --seed"
        )

    def __str__(self) -> str:
        return f"random {100 * self.fraction:.4g} % of the values of {self.name}, seed {self.seed}"


def _is_low(hashes: UInt64[np.ndarray, " rows"], fraction: float) -> Bool[np.ndarray, " rows"]:
    """Return which 64-bit hashes are in the lowest ``fraction`` of their range."""
    # 32 bits of the hash, so that the product is exact.
    return (hashes >> np.uint64(32)) < fraction * 2.0**32


def row_keys(array: pa.Array, location: Location) -> pa.Array:
    """Return values as integers, strings or bytes, for hashing; NaN becomes null.

    A value has the same key in all files, whatever the width of its type.
    """
    array = decoded(array)
    kind = array.type
    if pa.types.is_integer(kind) or is_string(kind) or is_bytes(kind):
        return array
    if pa.types.is_null(kind):
        return array
    if pa.types.is_boolean(kind):
        return array.cast(pa.int8())
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        return array.cast(pa.int32())
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return array.cast(pa.int64())
    if pa.types.is_decimal(kind):
        return array.cast(pa.string())
    if pa.types.is_floating(kind):
        # pandas writes integers with missing values as floats; these have the keys of the integers.
        values = array.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
        is_whole = (np.abs(values) < 2.0**53) & (values == np.floor(values))
        whole = np.where(is_whole, values, 0).astype(np.int64)
        keys = np.where(is_whole, whole, np.ascontiguousarray(values).view(np.int64))
        return pa.array(keys, mask=np.isnan(values))
    raise DataError(
        f"{location.path}, column {location.column!r} is of type {kind}; --hold-out-by takes a "
        "column of numbers, text, dates or times"
    )
