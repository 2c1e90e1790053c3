"""Contiguous row numbers of ids, in order of first appearance."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from jaxtyping import Int, Integer

from jaxrec.data.parquet import read_checked, write_checked

MAPS_DIRECTORY = "maps"

# TorchRec's numbers: 0 is unused, 1 is the row of rare and unknown ids, 2 the first id's row.
RARE = 1
FIRST = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Appearances:
    """Distinct ids of a column, ascending, with each id's count and first row.

    All three arrays are ``[distinct]``.
    """

    ids: Integer[np.ndarray, " distinct"]
    counts: Int[np.ndarray, " distinct"]
    first: Int[np.ndarray, " distinct"]

    @classmethod
    def count(cls, columns: Iterable[Integer[np.ndarray, " _"]]) -> Appearances:
        """Count the ids of a column that comes in chunks."""
        start, total = 0, cls(np.empty(0, np.uint32), np.empty(0, np.int64), np.empty(0, np.int64))
        for column in columns:
            ids, first, counts = np.unique(column, return_index=True, return_counts=True)
            total = total.merge(cls(ids, counts, first + start))
            start += len(column)
        return total

    def merge(self, later: Appearances) -> Appearances:
        """Merge with the appearances in later rows, whose ``first`` counts from the same row."""
        if not len(self.ids):
            return later
        # A stable sort keeps the earlier of two appearances first.
        ids = np.concatenate([self.ids, later.ids])
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
        counts = np.concatenate([self.counts, later.counts])[order]
        first = np.concatenate([self.first, later.first])[order]
        return Appearances(ids[starts], np.add.reduceat(counts, starts), first[starts])


@dataclasses.dataclass(frozen=True, eq=False)
class ContiguousMap:
    """Row numbers of ids that are not rare: ``ids[i]`` has row ``numbers[i]``.

    The ids ``[kept]`` ascend; the numbers ``[kept]`` are a permutation of 2, 3, 4, ...
    """

    ids: Integer[np.ndarray, " kept"]
    numbers: Int[np.ndarray, " kept"]

    @classmethod
    def of(cls, appearances: Appearances, threshold: int) -> ContiguousMap:
        """Number the ids that appear at least ``threshold`` times, by their first appearance."""
        kept = appearances.counts >= threshold
        # The ids stay sorted, for the binary search; their numbers are in order of appearance.
        numbers = np.empty(int(kept.sum()), np.int32)
        order = np.argsort(appearances.first[kept])
        numbers[order] = np.arange(FIRST, FIRST + len(order), dtype=np.int32)
        return cls(appearances.ids[kept], numbers)

    @property
    def num_rows(self) -> int:
        """Number of rows of the table, including the rows 0 and 1."""
        return FIRST + len(self.ids)

    def __call__(self, ids: Integer[np.ndarray, " ids"]) -> Int[np.ndarray, " ids"]:
        """Return the row numbers of ids; 1 for rare and unknown ids."""
        if not len(self.ids):
            return np.full(len(ids), RARE, np.int32)
        positions = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[positions] == ids, self.numbers[positions], np.int32(RARE))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file with columns ``id`` and ``number``."""
        write_checked(pa.table({"id": self.ids, "number": self.numbers}), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ContiguousMap:
        table = read_checked(path)
        return cls(table["id"].to_numpy(), table["number"].to_numpy())
