"""Which rows of which log a run trains on, and which it holds out."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Generator, Iterable, Iterator

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from jaxrec.data import (
    BatchSource,
    ClickBatch,
    ClickLog,
    Clicks,
    CriteoFile,
    DataError,
    GeneratedLog,
    GroupRange,
    ParquetGroups,
    RowGroups,
    Shard,
    batches,
    prefetch,
    to_numpy,
)
from jaxrec.data.text import LABEL
from jaxrec.data.transforms import CATEGORICAL_NAMES, DENSE_NAMES, log_counts, table_ids
from jaxrec.train.config import DataConfig, TrainConfig
from jaxrec.train.model import table_rows

_ALONE = Shard()


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows ``[start, stop)`` of a log.

    Attributes:
        log: The log.
        start, stop: Its rows.
        shard: Which process this is: each has an equal part of every batch, of the last one as
            well, so that the batches of all are those of one process.
    """

    log: ClickLog
    start: int
    stop: int
    shard: Shard = _ALONE

    def __len__(self) -> int:
        return self.stop - self.start

    def num_batches(self, batch_size: int) -> int:
        """Batches that hold all rows."""
        return -(-len(self) // batch_size)

    def batches(
        self, batch_size: int, first: int = 0, epoch: int = 0
    ) -> Generator[ClickBatch, None, None]:
        """The rows as batches, from batch ``first`` on, made ahead by a thread.

        They come as they are stored in every ``epoch``. With several processes, this one's parts.
        """
        chunks = self.log.chunks(self.start + first * batch_size, self.stop)
        own = _own_rows(chunks, len(self) - first * batch_size, batch_size, self.shard)
        left = self.num_batches(batch_size) - first
        each = batch_size // self.shard.count
        return prefetch(batches(own, each, CATEGORICAL_NAMES, at_least=left))

    def probabilities(self) -> Float[np.ndarray, " rows"] | None:
        """The true probability of a click in each row, where it is known."""
        known = []
        for chunk in self.log.chunks(self.start, self.stop):
            if chunk.probabilities is None:
                return None
            known.append(chunk.probabilities)
        return np.concatenate(known)


def _own_rows(
    chunks: Iterable[Clicks], total: int, batch_size: int, shard: Shard
) -> Iterator[Clicks]:
    """A process's part of every batch of ``total`` rows."""
    if shard.count == 1:
        yield from chunks
        return
    first = 0
    for chunk in chunks:
        batch, place = np.divmod(np.arange(first, first + len(chunk)), batch_size)
        owners = place * shard.count // np.minimum(batch_size, total - batch * batch_size)
        first += len(chunk)
        yield chunk[owners == shard.index]


@dataclasses.dataclass(frozen=True)
class ParquetRows:
    """Rows of what `jaxrec data criteo` wrote.

    Attributes:
        groups: The rows.
        table_rows: Rows of each table; ids are taken modulo these.
        seed: Of the order, another one in each epoch; None: as they are stored.
        shard: Which process this is: each reads an equal stretch of the rows, in an order of its
            own.
    """

    groups: RowGroups
    table_rows: tuple[int, ...]
    seed: int | None = None
    shard: Shard = _ALONE

    def __len__(self) -> int:
        return sum(self.groups.sizes)

    def num_batches(self, batch_size: int) -> int:
        """Batches that hold all rows, those of the process that has most."""
        most = -(-len(self) // self.shard.count)
        return -(-most // (batch_size // self.shard.count))

    def batches(
        self, batch_size: int, first: int = 0, epoch: int = 0
    ) -> Generator[ClickBatch, None, None]:
        """The rows of an epoch as batches, from batch ``first`` on, made ahead by threads.

        With several processes, this one's parts.
        """
        each = batch_size // self.shard.count

        def to_batch(table: pa.Table) -> ClickBatch:
            return next(batches([self._clicks(table)], each, CATEGORICAL_NAMES, at_least=1))

        source = BatchSource(self._own_groups(), each, to_batch, self.seed, epochs=epoch + 1)
        own = source.batches_per_epoch
        yield from source.from_batch(epoch * own + min(first, own))
        for _ in range(max(first, own), self.num_batches(batch_size)):
            yield to_batch(source.groups.read(0)[:0])

    def _own_groups(self) -> RowGroups:
        if self.shard.count == 1:
            return self.groups
        if len(self) < self.shard.count:
            raise DataError(f"{len(self)} rows are too few for {self.shard.count} processes")
        return GroupRange(self.groups, *self.shard.stretch(len(self)))

    def _clicks(self, table: pa.Table) -> Clicks:
        counts = np.stack([to_numpy(table[name]) for name in DENSE_NAMES], axis=1)
        ids = np.stack([to_numpy(table[name]) for name in CATEGORICAL_NAMES], axis=1)
        labels = to_numpy(table[LABEL]).astype(np.float32)
        return Clicks(labels, log_counts(counts), table_ids(ids, self.table_rows))

    def probabilities(self) -> None:
        """Nobody knows them."""


def split_rows(
    config: TrainConfig, shard: Shard = _ALONE
) -> tuple[Rows | ParquetRows, Rows | ParquetRows]:
    """The rows to train on and those that are held out: the last ones, as they come later.

    Args:
        config: Where they are.
        shard: Which process this is, of how many.

    Raises:
        OSError, DataError: A file cannot be read, or has too few rows.
    """
    training, held_out = _split(config)
    return dataclasses.replace(training, shard=shard), dataclasses.replace(held_out, shard=shard)


def _split(config: TrainConfig) -> tuple[Rows | ParquetRows, Rows | ParquetRows]:
    data, tables = config.data, table_rows(config)
    if data.path is None:
        rows = data.generated_rows
        log = GeneratedLog(rows + data.generated_eval_rows, config.seed, tables)
        return Rows(log, 0, rows), Rows(log, rows, log.num_rows)
    whole = _rows_of(data.path, tables, data)
    if data.eval_path is not None:
        return _shuffled(whole, config.seed), _rows_of(data.eval_path, tables, data)
    count = max(1, round(len(whole) * data.eval_fraction))
    if count >= len(whole):
        raise DataError(
            f"{data.path}: {len(whole)} rows are too few to train on some and hold out "
            f"{data.eval_fraction:.0%}; give more rows, or others with --data.eval-path"
        )
    middle = len(whole) - count
    return _shuffled(_part(whole, 0, middle), config.seed), _part(whole, middle, len(whole))


def bad_lines(*parts: Rows | ParquetRows) -> dict[pathlib.Path, int]:
    """The number of lines that are left out, of each text file that has any."""
    logs = {rows.log for rows in parts if isinstance(rows, Rows)}
    files = [log for log in logs if isinstance(log, CriteoFile)]
    return {file.path: file.bad_lines for file in files if file.bad_lines}


def _rows_of(path: pathlib.Path, tables: tuple[int, ...], data: DataConfig) -> Rows | ParquetRows:
    if path.is_dir():
        names = (LABEL, *DENSE_NAMES, *CATEGORICAL_NAMES)
        return ParquetRows(ParquetGroups.of_directory(path, names), tables)
    file = CriteoFile(path, tables, data.bad_rows)
    return Rows(file, 0, file.num_rows)


def _part(rows: Rows | ParquetRows, start: int, stop: int) -> Rows | ParquetRows:
    if isinstance(rows, Rows):
        return dataclasses.replace(rows, start=start, stop=stop)
    return dataclasses.replace(rows, groups=GroupRange(rows.groups, start, stop))


def _shuffled(rows: Rows | ParquetRows, seed: int) -> Rows | ParquetRows:
    """Text can only be read in order."""
    return rows if isinstance(rows, Rows) else dataclasses.replace(rows, seed=seed)
