"""Contiguous row numbers of ids, in order of first appearance."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int, Integer

from jaxrec.atomic import write_atomically
from jaxrec.data.criteo.parts import parquet_writer
from jaxrec.data.transforms import CATEGORICAL_NAMES

MAPS_DIRECTORY = "maps"

# TorchRec's numbers: 0 is unused, 1 is the row of rare and unknown ids, 2 the first id's row.
RARE = 1
FIRST = 2

# Number of ids of a column that are counted at once.
CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True, eq=False)
class Appearances:
    """Counts and first rows of the ids of a column.

    Attributes:
        ids: ``[distinct]``, ascending.
        counts: ``[distinct]`` int64, numbers of appearances.
        first: ``[distinct]`` int64, rows of the first appearances.
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
        """Merge with the appearances of later rows."""
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
    """Row numbers of the ids that are not rare.

    Attributes:
        ids: ``[kept]``, ascending.
        numbers: ``[kept]`` int32, a permutation of 2, 3, 4, ...
    """

    ids: Integer[np.ndarray, " kept"]
    numbers: Int[np.ndarray, " kept"]

    @classmethod
    def of(cls, appearances: Appearances, threshold: int) -> ContiguousMap:
        """Number the ids that appear at least ``threshold`` times, by their first appearance."""
        kept = appearances.counts >= threshold
        numbers = np.empty(int(kept.sum()), np.int32)
        order = np.argsort(appearances.first[kept])
        numbers[order] = np.arange(FIRST, FIRST + len(order), dtype=np.int32)
        return cls(appearances.ids[kept], numbers)

    @property
    def num_rows(self) -> int:
        """Number of rows of the ids' table."""
        return FIRST + len(self.ids)

    def __call__(self, ids: Integer[np.ndarray, " ids"]) -> Int[np.ndarray, " ids"]:
        """Return the row numbers of ids; 1 for rare and unknown ids."""
        if not len(self.ids):
            return np.full(len(ids), RARE, np.int32)
        positions = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[positions] == ids, self.numbers[positions], np.int32(RARE))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Parquet file with columns ``id`` and ``number``."""
        table = pa.table({"id": self.ids, "number": self.numbers})
        with write_atomically(path) as unfinished:
            pq.write_table(table, unfinished, write_page_checksum=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ContiguousMap:
        """Read a file that `save` wrote."""
        table = pq.read_table(path, page_checksum_verification=True)
        return cls(table["id"].to_numpy(), table["number"].to_numpy())


def renumber(
    raw: pathlib.Path, output: pathlib.Path, threshold: int, compression: str
) -> tuple[int, ...]:
    """Copy Parquet files with row numbers in place of raw ids.

    The maps of the columns are saved in ``output / "maps"``. Existing files are not written again.

    Args:
        raw: Directory of the files, which are read in the order of their names.
        output: Directory of the new files, which have the same names.
        threshold: Number of appearances from which an id has its own row.
        compression: Compression of the new files.

    Returns:
        Number of rows of each column's table.
    """
    paths = sorted(raw.glob("*.parquet"))
    (output / MAPS_DIRECTORY).mkdir(exist_ok=True)
    maps = {}
    for name in CATEGORICAL_NAMES:
        path = output / MAPS_DIRECTORY / f"{name}.parquet"
        if not path.exists():
            ContiguousMap.of(Appearances.count(_column(paths, name)), threshold).save(path)
        maps[name] = ContiguousMap.load(path)
    for path in paths:
        if not (output / path.name).exists():
            _rewrite(path, output / path.name, maps, compression)
    return tuple(numbers.num_rows for numbers in maps.values())


def _column(paths: Iterable[pathlib.Path], name: str) -> Iterator[np.ndarray]:
    pieces: list[np.ndarray] = []
    for path in paths:
        for batch in pq.ParquetFile(path, page_checksum_verification=True).iter_batches(
            columns=[name]
        ):
            pieces.append(batch.column(0).to_numpy())
            if sum(map(len, pieces)) >= CHUNK:
                yield np.concatenate(pieces)
                pieces = []
    if pieces:
        yield np.concatenate(pieces)


def _rewrite(
    source: pathlib.Path, target: pathlib.Path, maps: dict[str, ContiguousMap], compression: str
) -> None:
    file = pq.ParquetFile(source, page_checksum_verification=True)
    schema = file.schema_arrow
    for name in maps:
        number = pa.field(name, pa.int32(), nullable=False)
        schema = schema.set(schema.get_field_index(name), number)
    with (
        write_atomically(target) as unfinished,
        parquet_writer(unfinished, schema, compression) as writer,
    ):
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            columns = [
                pa.array(maps[name](table[name].to_numpy())) if name in maps else table[name]
                for name in schema.names
            ]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=len(table))
