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
    Shard,
    TableEncoder,
    batches,
    prefetch,
)
from jaxrec.data.encoder import EncodedGroups
from jaxrec.data.transforms import CATEGORICAL_NAMES
from jaxrec.train.config import DataConfig, TrainConfig
from jaxrec.train.features import held_out_rows, is_parquet, learn_features, split_groups
from jaxrec.train.model import table_rows

_ALONE = Shard()

# Row groups that are shuffled together, and the rows of these where groups are large.
MOST_GROUPS = 8
WINDOW_ROWS = 1 << 20


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


@dataclasses.dataclass(frozen=True, eq=False)
class ParquetRows:
    """Rows of Parquet files.

    Attributes:
        groups: The rows.
        encoder: What becomes of their columns.
        seed: Of the order, another one in each epoch; None: as they are stored.
        shard: Which process this is: each reads an equal stretch of the rows, in an order of its
            own.
    """

    groups: GroupRange
    encoder: TableEncoder
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
        groups = EncodedGroups(self._own_groups(), self.encoder)
        window = min(MOST_GROUPS, max(1, WINDOW_ROWS // max(groups.sizes)))

        def to_batch(rows: pa.Table) -> ClickBatch:
            return self.encoder.pack(rows, each)

        source = BatchSource(groups, each, to_batch, self.seed, epochs=epoch + 1, window=window)
        own = source.batches_per_epoch
        yield from source.from_batch(epoch * own + min(first, own))
        for _ in range(max(first, own), self.num_batches(batch_size)):
            yield to_batch(groups.read(0)[:0])

    def _own_groups(self) -> GroupRange:
        if self.shard.count == 1:
            return self.groups
        if len(self) < self.shard.count:
            raise DataError(f"{len(self)} rows are too few for {self.shard.count} processes")
        return GroupRange(self.groups, *self.shard.stretch(len(self)))

    def probabilities(self) -> None:
        """Nobody knows them."""


def split_rows(
    config: TrainConfig, shard: Shard = _ALONE, encoder: TableEncoder | None = None
) -> tuple[Rows | ParquetRows, Rows | ParquetRows]:
    """The rows to train on and those that are held out: the last ones, as they come later.

    Args:
        config: Where they are.
        shard: Which process this is, of how many.
        encoder: What becomes of the columns of Parquet files; None: it is learned.

    Raises:
        OSError, DataError, SchemaError: A file cannot be read, does not fit its schema, or has too
            few rows.
    """
    data = config.data
    if is_parquet(data.path):
        encoder = learn_features(data) if encoder is None else encoder
        training, held_out = split_groups(data, encoder.schema)
        return (
            ParquetRows(training, encoder, config.seed, shard),
            ParquetRows(held_out, encoder, None, shard),
        )
    rows, rest = _split(config)
    return dataclasses.replace(rows, shard=shard), dataclasses.replace(rest, shard=shard)


def _split(config: TrainConfig) -> tuple[Rows, Rows]:
    data, tables = config.data, table_rows(config)
    if data.path is None:
        rows = data.generated_rows
        log = GeneratedLog(rows + data.generated_eval_rows, config.seed, tables)
        return Rows(log, 0, rows), Rows(log, rows, log.num_rows)
    if data.schema is not None or data.label is not None:
        raise DataError(f"{data.path} is no Parquet file; a schema is for the columns of one")
    whole = _text(data.path, tables, data)
    if data.eval_path is not None:
        return whole, _text(data.eval_path, tables, data)
    middle = len(whole) - held_out_rows(data, len(whole))
    return dataclasses.replace(whole, stop=middle), dataclasses.replace(whole, start=middle)


def bad_lines(*parts: Rows | ParquetRows) -> dict[pathlib.Path, int]:
    """The number of lines that are left out, of each text file that has any."""
    logs = {rows.log for rows in parts if isinstance(rows, Rows)}
    files = [log for log in logs if isinstance(log, CriteoFile)]
    return {pathlib.Path(file.path): file.bad_lines for file in files if file.bad_lines}


def _text(path: pathlib.Path, tables: tuple[int, ...], data: DataConfig) -> Rows:
    file = CriteoFile(path, tables, data.bad_rows)
    return Rows(file, 0, file.num_rows)
