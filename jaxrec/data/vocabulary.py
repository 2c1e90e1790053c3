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
from jaxtyping import Int, UInt64

from jaxrec.data.column_types import is_bytes, is_string
from jaxrec.data.files import DataError
from jaxrec.data.parquet import read_checked, write_checked
from jaxrec.ragged import hash_ids
from jaxrec.ragged.arrow import map_values

# Number of counted values that may wait to be added to the total.
_PENDING = 1 << 20

_METADATA_KEY = b"jaxrec.vocabulary"


class ValueCounts:
    """Counts of the values of a column that comes in chunks.

    Memory grows with the number of distinct values, not with the number of rows.

    Example:
        >>> counts = ValueCounts()
        >>> counts.add(pa.array(["b", "a", None]))
        >>> counts.add(pa.array([["c", "b"], []]))
        >>> counts.vocabulary(min_count=2).values.to_pylist()
        ['b']
    """

    def __init__(self) -> None:
        self._counted: pa.Table | None = None
        self._pending: list[pa.Table] = []

    def add(self, column: Any) -> None:
        """Count the values of one more chunk, without nulls.

        Args:
            column: As for `Vocabulary.build`.

        Raises:
            TypeError: The values are neither strings, bytes nor integers, or of another kind than
                earlier values.
        """

        def count(values: pa.Array) -> np.ndarray:
            counts = _plain(values).drop_null().value_counts()
            piece = pa.table({"value": counts.field(0), "count": counts.field(1)})
            if len(piece):
                before = (self._pending or [self._counted or piece])[0]
                if before.schema != piece.schema:
                    raise TypeError(
                        f"the column has values of Arrow type {piece['value'].type}, and before "
                        f"of {before['value'].type}; a vocabulary has values of one kind"
                    )
                self._pending.append(piece)
            return np.zeros(len(values), bool)

        map_values(_as_arrow(column), count, accepts_nulls=True)
        # Adding up costs as much as the total is large, so that doing it for every chunk would be
        # quadratic. Waiting until the pending counts outnumber the total adds each a few times.
        waiting = sum(map(len, self._pending))
        if waiting > max(_PENDING, len(self._counted or ())):
            self._add_up()

    def _add_up(self) -> pa.Table | None:
        pieces = [*([] if self._counted is None else [self._counted]), *self._pending]
        if self._pending:
            total = pa.concat_tables(pieces).group_by("value").aggregate([("count", "sum")])
            self._counted = total.select(["value", "count_sum"]).rename_columns(["value", "count"])
            self._pending = []
        return self._counted

    def vocabulary(
        self, *, min_count: int = 1, max_size: int | None = None, num_unknown: int = 1
    ) -> Vocabulary:
        """Make a vocabulary from the counts so far, with the arguments of `Vocabulary.build`."""
        if min_count < 1 or num_unknown < 0 or (max_size is not None and max_size < 0):
            raise ValueError(
                "min_count must be 1 or more, max_size and num_unknown 0 or more; got "
                f"min_count={min_count}, max_size={max_size}, num_unknown={num_unknown}"
            )
        table = self._add_up()
        if table is None:
            raise ValueError("a vocabulary needs at least one value, got none")
        table = table.filter(pc.field("count") >= min_count)
        # By value among equal counts: the order of chunks must not change a row index.
        table = table.sort_by([("count", "descending"), ("value", "ascending")])[:max_size]
        values = table["value"].combine_chunks()
        return Vocabulary(values, table["count"].to_numpy(), num_unknown)


class ValueIndex(NamedTuple):
    """Ascending hashes of a vocabulary's values, and the position of each hash's value.

    With the seed ``seed`` all hashes differ.
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
        counts = ValueCounts()
        is_one = isinstance(columns, pa.Array | pa.ChunkedArray | np.ndarray)
        for column in [columns] if is_one else columns:
            counts.add(column)
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
        rows = map_values(_as_arrow(column), self._rows, accepts_nulls=nulls == "unknown")
        if isinstance(column, pa.Array | pa.ChunkedArray):
            return rows
        return rows.to_numpy().reshape(np.shape(column))

    def _rows(self, values: pa.Array) -> Int[np.ndarray, " values"]:
        plain = _plain(values)
        if not len(plain):
            return np.empty(0, np.int32)
        known = np.asarray(plain.is_valid())
        present = plain if known.all() else plain.drop_null()
        if present.type != self.values.type and len(present):
            raise TypeError(
                f"the values are of Arrow type {values.type}, but the vocabulary was made of "
                f"{self.values.type}; convert them"
            )
        rows = np.zeros(len(plain), np.int32)
        if len(present):
            # Columns repeat their values: each distinct one is looked up once.
            distinct = present.dictionary_encode()
            of_distinct = self._rows_of_present(distinct.dictionary)
            rows[known] = of_distinct[distinct.indices.to_numpy()]
        if not self.num_unknown and not known.all():
            raise ValueError("a value is null, and the vocabulary has no rows for unknown values")
        return rows

    def _rows_of_present(self, values: pa.Array) -> Int[np.ndarray, " values"]:
        index = self.index
        wanted = np.asarray(hash_ids(values, None, index.seed))
        places = np.zeros(len(values), np.int64)
        is_known = np.zeros(len(values), bool)
        if last := len(index.positions):
            found = np.minimum(np.searchsorted(index.hashes, wanted), last - 1)
            places = index.positions[found]
            # An unknown value may have the hash of a known one: the values decide.
            is_known = np.asarray(pc.equal(self.values.take(pa.array(places)), values))
        if not self.num_unknown:
            if not is_known.all():
                value = values[int(np.flatnonzero(~is_known)[0])].as_py()
                raise ValueError(
                    f"{value!r} is not in the vocabulary, which has no rows for unknown values; "
                    "make it with num_unknown=1 or more"
                )
            return places.astype(np.int32)
        unknown = wanted % np.uint64(self.num_unknown)
        return np.where(is_known, places + self.num_unknown, unknown).astype(np.int32)

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


def _as_arrow(column: Any) -> pa.Array | pa.ChunkedArray:
    if isinstance(column, pa.Array | pa.ChunkedArray):
        return column
    try:
        # None and NaN are nulls, as in columns of pandas.
        return pa.array(np.asarray(column).reshape(-1), from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TypeError(f"the values are of several kinds ({error}); expected one kind") from None


def _plain(values: pa.Array) -> pa.Array:
    """Convert values to large_string, large_binary or int64; uint64 keeps its bits."""
    kind = values.type
    if isinstance(kind, pa.DictionaryType):
        return _plain(values.cast(kind.value_type))
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
