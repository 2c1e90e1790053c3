"""Vocabularies: row indices of strings and 64-bit ids, learned from rows or frozen at an export."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int, UInt64

from jaxrec.data.distinct import DistinctValues, as_arrow
from jaxrec.data.files import DataError
from jaxrec.data.parquet import read_checked, write_checked
from jaxrec.ragged import hash_ids
from jaxrec.ragged.arrow import map_values

# Number of counted values that may wait to be added to the total.
_PENDING = 1 << 20

# Number of pieces of counts that are kept apart.
_MAX_PIECES = 64

_METADATA_KEY = b"jaxrec.vocabulary"


@dataclasses.dataclass(frozen=True, eq=False)
class ValueCounts:
    """Counts of the values of a column, whose parts may be counted apart and added.

    Memory grows with the number of distinct values, not with the number of rows.

    Attributes:
        pieces: Tables of values and their counts. Several pieces may have the same value.

    Raises:
        TypeError: Adding counts of values of two kinds, such as strings and integers, raises it.

    Example:
        >>> counts = ValueCounts.of(pa.array(["b", "a", None]))
        >>> counts += ValueCounts.of(pa.array([["c", "b"], []]))
        >>> counts.vocabulary(min_count=2).values.to_pylist()
        ['b']
    """

    pieces: tuple[pa.Table, ...] = ()

    @classmethod
    def of(cls, column: Any) -> ValueCounts:
        """Count the values of a column without nulls.

        Args:
            column: Column as for `Vocabulary.build`.

        Raises:
            TypeError: The values are neither strings, bytes nor integers.
        """
        pieces: list[pa.Table] = []

        def count(values: pa.Array) -> np.ndarray:
            pieces.append(_count(values))
            return np.zeros(len(values), bool)

        map_values(as_arrow(column), count, accepts_nulls=True)
        return sum((cls((piece,)) for piece in pieces if len(piece)), cls())

    def __add__(self, other: ValueCounts) -> ValueCounts:
        pieces = (*self.pieces, *other.pieces)
        for piece in pieces[1:]:
            if piece.schema != pieces[0].schema:
                raise TypeError(
                    f"the column has values of Arrow type {piece['value'].type}, and before "
                    f"of {pieces[0]['value'].type}; a vocabulary has values of one kind"
                )
        # Adding up costs as much as the total is large, so that doing it for every piece would be
        # quadratic. Waiting until the other pieces outnumber the largest adds each a few times.
        sizes = [len(piece) for piece in pieces]
        if sum(sizes) > 2 * max(_PENDING, max(sizes, default=0)):
            pieces = (_added_up(pieces),)
        elif len(pieces) > _MAX_PIECES:
            # Many pieces of a few values: looking at all of them at each addition would take
            # longer than counting.
            largest = sizes.index(max(sizes))
            pieces = (pieces[largest], _added_up(pieces[:largest] + pieces[largest + 1 :]))
        return ValueCounts(pieces)

    def vocabulary(
        self, *, min_count: int = 1, max_size: int | None = None, num_unknown: int = 1
    ) -> Vocabulary:
        """Make a vocabulary from the counts, with the arguments of `Vocabulary.build`."""
        if min_count < 1 or num_unknown < 0 or (max_size is not None and max_size < 0):
            raise ValueError(
                "min_count must be 1 or more, max_size and num_unknown 0 or more; got "
                f"min_count={min_count}, max_size={max_size}, num_unknown={num_unknown}"
            )
        if not self.pieces:
            raise ValueError("a vocabulary needs at least one value, got none")
        table = _added_up(self.pieces).filter(pc.field("count") >= min_count)
        # By value among equal counts: the order of chunks must not change a row index.
        table = table.sort_by([("count", "descending"), ("value", "ascending")])[:max_size]
        values = table["value"].combine_chunks()
        return Vocabulary(values, table["count"].to_numpy(), num_unknown)


def _count(values: pa.Array) -> pa.Table:
    """Count the values of an array without nulls: a table of values and their counts."""
    distinct = DistinctValues.of(values)
    return pa.table({"value": distinct.values, "count": distinct.counts})


def _added_up(pieces: tuple[pa.Table, ...]) -> pa.Table:
    """Add the counts of equal values."""
    table = pa.concat_tables(pieces).combine_chunks()
    if not len(table):
        return table
    encoded = table["value"].chunk(0).dictionary_encode()
    # Sums of whole numbers below 2**53 are exact in float64.
    counts = np.bincount(encoded.indices.to_numpy(), table["count"].to_numpy())
    return pa.table({"value": encoded.dictionary, "count": counts.astype(np.int64)})


class ValueIndex(NamedTuple):
    """Ascending hashes of a vocabulary's values, and the position of each hash's value.

    ``seed`` is a seed of the hash with which all hashes differ.
    """

    hashes: UInt64[np.ndarray, " size"]
    positions: Int[np.ndarray, " size"]
    seed: int


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """Row indices of known strings, bytes or 64-bit ids.

    The first ``num_unknown`` rows of the table are for unknown values; a value's hash chooses one.
    The rows of known values follow, the most frequent first.

    Attributes:
        values: ``[size]`` Arrow array of large_string, large_binary or int64, all different.
            uint64 ids are stored as int64 with the same bits.
        counts: ``[size]`` int64, the count of each value, descending.
        num_unknown: Number of rows for unknown values; 0: an unknown value is an error.

    Example:
        >>> cities = Vocabulary.build(pa.array(["Rome", "Oslo", "Rome", "Bonn", "Bonn", "Rome"]))
        >>> cities.values.to_pylist(), cities.num_embeddings
        (['Rome', 'Bonn', 'Oslo'], 4)
        >>> cities(np.array(["Oslo", "Rome", "Paris"]))
        array([3, 1, 0], dtype=int32)
        >>> cities(pa.array([["Oslo", "Rome"], []])).to_pylist()
        [[3, 1], []]
    """

    values: pa.Array
    counts: Int[np.ndarray, " size"]
    num_unknown: int = 1

    @classmethod
    def build(
        cls,
        columns: Any | Iterable[Any],
        *,
        min_count: int = 1,
        max_size: int | None = None,
        num_unknown: int = 1,
    ) -> Vocabulary:
        """Make a vocabulary from the values of a column.

        Args:
            columns: Arrow array, chunked array or NumPy array of strings, bytes or integers, or an
                Arrow array of lists of them; or an iterable of such arrays, which is read once.
                Nulls do not count.
            min_count: Smallest number of appearances of a known value. Rarer values train the rows
                for unknown values; with a ``min_count`` of 1 these rows are not trained.
            max_size: Largest number of known values; None: no limit. The most frequent values are
                kept, and the smaller of equally frequent values.
            num_unknown: Number of rows for unknown values.

        Raises:
            TypeError: The values are neither strings, bytes nor integers, or of several kinds.
            ValueError: A number is out of range, or there is no column.
        """
        is_one = isinstance(columns, pa.Array | pa.ChunkedArray | np.ndarray)
        parts = (ValueCounts.of(column) for column in ([columns] if is_one else columns))
        counts = sum(parts, ValueCounts())
        return counts.vocabulary(min_count=min_count, max_size=max_size, num_unknown=num_unknown)

    def __len__(self) -> int:
        """Number of known values."""
        return len(self.values)

    @property
    def num_embeddings(self) -> int:
        """Number of rows of the table, for unknown and known values."""
        return self.num_unknown + len(self.values)

    def __call__(self, column: Any, *, nulls: Literal["unknown", "error"] = "unknown") -> Any:
        """Look up the row indices of values.

        Args:
            column: Arrow array, chunked array or NumPy array, or an Arrow array of lists.
            nulls: "unknown": a null gets row 0. "error": a null is an error. A null list always
                stays null, which `KeyedJaggedArray.from_arrow` reads as an empty bag.

        Returns:
            int32 row indices in the form of the column: an Arrow array with the same chunks and
            lists, or a NumPy array of the same shape.

        Raises:
            TypeError: The values are of another kind than the vocabulary's.
            ValueError: A value is null and ``nulls`` is "error", or a value is unknown or null and
                ``num_unknown`` is 0.
        """
        if nulls not in ("unknown", "error"):
            raise ValueError(f"nulls must be 'unknown' or 'error', got {nulls!r}")
        rows = map_values(as_arrow(column), self._rows, accepts_nulls=nulls == "unknown")
        if isinstance(column, pa.Array | pa.ChunkedArray):
            return rows
        return rows.to_numpy().reshape(np.shape(column))

    def _rows(self, values: pa.Array) -> Int[np.ndarray, " values"]:
        # Columns repeat their values: each distinct one is looked up once.
        distinct = DistinctValues.of(values)
        if distinct.values.type != self.values.type and len(distinct.values):
            raise TypeError(
                f"the values are of Arrow type {values.type}, but the vocabulary was made of "
                f"{self.values.type}; convert them"
            )
        if not self.num_unknown and distinct.counts.sum() < len(values):
            raise ValueError("a value is null, and the vocabulary has no rows for unknown values")
        # The last row, and those of null values in a dictionary, are for nulls.
        rows = np.zeros(distinct.size + 1, np.int32)
        if len(distinct.values):
            rows[distinct.places] = self._rows_of_present(distinct.values)
        return rows[distinct.codes]

    def _rows_of_present(self, values: pa.Array) -> Int[np.ndarray, " values"]:
        places, is_known = self._places(values)
        if is_known.all():
            return (places + self.num_unknown).astype(np.int32)
        if not self.num_unknown:
            value = values[int(np.flatnonzero(~is_known)[0])].as_py()
            raise ValueError(
                f"{value!r} is not in the vocabulary, which has no rows for unknown values; "
                "make it with num_unknown=1 or more"
            )
        rows = np.where(is_known, places + self.num_unknown, 0).astype(np.int32)
        if self.num_unknown > 1:
            unknown = values.filter(pa.array(~is_known))
            hashes = np.asarray(hash_ids(unknown, None, self.index.seed))
            rows[~is_known] = hashes % np.uint64(self.num_unknown)
        return rows

    def _places(
        self, values: pa.Array
    ) -> tuple[Int[np.ndarray, " values"], Bool[np.ndarray, " values"]]:
        """Return the places of values among those of the vocabulary, and whether each is there."""
        # Arrow makes a hash table of the vocabulary at each call, and then is faster by far.
        if len(values) > len(self.values) // 4:
            found = pc.index_in(values, value_set=self.values)
            return found.fill_null(0).to_numpy().astype(np.int64), np.asarray(found.is_valid())
        index = self.index
        wanted = np.asarray(hash_ids(values, None, index.seed))
        places = np.zeros(len(values), np.int64)
        is_known = np.zeros(len(values), bool)
        if last := len(index.positions):
            found = np.minimum(np.searchsorted(index.hashes, wanted), last - 1)
            places = index.positions[found]
            # An unknown value may have the hash of a known one: the values decide.
            is_known = np.asarray(pc.equal(self.values.take(pa.array(places)), values))
        return places, is_known

    @functools.cached_property
    def index(self) -> ValueIndex:
        """Hashes of the values, by which `__call__` finds their rows."""
        # A binary search over hashes is faster than one over strings, and takes 16 bytes a value.
        # Two values rarely have the same hash of 64 bits; another seed then tells them apart.
        for seed in range(1 << 10):
            hashes = np.asarray(hash_ids(self.values, None, seed))
            order = np.argsort(hashes)
            hashes = hashes[order]
            if not (hashes[1:] == hashes[:-1]).any():
                return ValueIndex(hashes, order, seed)
        raise ValueError("the values of a vocabulary must all be different")

    def __reduce__(self) -> tuple[Any, ...]:
        # Without `index`, which is as large as the values and is computed where it is needed.
        return Vocabulary, (self.values, self.counts, self.num_unknown)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file with columns ``value`` and ``count``, complete or not at all.

        Raises:
            OSError: The file cannot be written.
        """
        metadata = {_METADATA_KEY: json.dumps({"num_unknown": self.num_unknown})}
        table = pa.table({"value": self.values, "count": self.counts})
        write_checked(table.replace_schema_metadata(metadata), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read a file that `save` wrote.

        Raises:
            OSError: The file cannot be read.
            DataError: The file holds no vocabulary.
        """
        table = read_checked(path)
        described = (table.schema.metadata or {}).get(_METADATA_KEY)
        if described is None:
            raise DataError(f"{path} holds no vocabulary; Vocabulary.save writes them")
        values = table["value"].combine_chunks()
        return cls(values, table["count"].to_numpy(), **json.loads(described))


@dataclasses.dataclass(frozen=True, eq=False)
class FrozenVocabulary:
    """Raw ids (int64 ``[size]``, ascending) that had a row of an open table at an export.

    The id at position ``i`` has row ``i + 1``; all other ids have row 0.
    """

    ids: Int[np.ndarray, " size"]

    def __len__(self) -> int:
        return self.ids.size

    @property
    def num_embeddings(self) -> int:
        return 1 + self.ids.size

    def __call__(self, ids: pa.Array) -> pa.Array:
        """Look up the int32 row indices of int64 raw ids; nulls stay null."""
        wanted = ids.fill_null(0).to_numpy()
        places = np.searchsorted(self.ids, wanted)
        known = np.zeros(wanted.size, bool)
        # searchsorted puts an id above the largest behind the end, where there is no id to compare.
        inside = places < self.ids.size
        known[inside] = self.ids[places[inside]] == wanted[inside]
        rows = np.where(known, places + 1, 0).astype(np.int32)
        return pa.array(rows, mask=np.asarray(ids.is_null()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file with the column ``id``, complete or not at all."""
        write_checked(pa.table({"id": self.ids}), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FrozenVocabulary:
        table = read_checked(path)
        if table.column_names != ["id"] or table["id"].type != pa.int64():
            raise DataError(f"{path} holds no frozen vocabulary")
        ids = table["id"].to_numpy()
        if table["id"].null_count or not (ids[1:] > ids[:-1]).all():
            raise DataError(f"{path} holds ids that do not ascend")
        return cls(ids)
