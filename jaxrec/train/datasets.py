"""The training rows and the held-out rows of a run."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from jaxrec.arguments import ConfigError
from jaxrec.data import (
    BatchSource,
    ClickBatch,
    ClickLog,
    Clicks,
    CriteoFile,
    DataError,
    GeneratedLog,
    Pipeline,
    Shard,
    TableEncoder,
    batches,
)
from jaxrec.data.addresses import Address
from jaxrec.data.encoder import EncodedGroups
from jaxrec.data.foreign import foreign_format
from jaxrec.data.groups import GroupRange
from jaxrec.data.selection import RowMask
from jaxrec.data.transforms import CATEGORICAL_NAMES, NUM_CATEGORICAL
from jaxrec.train.config import DataConfig, TrainConfig
from jaxrec.train.features import (
    RowsOf,
    check_rows,
    files_of,
    is_parquet,
    learn_features,
    split_groups,
)
from jaxrec.train.hold_out import split_of
from jaxrec.train.row_memory import window_within
from jaxrec.train.row_sample import ClickSample, TableSample

_ALONE = Shard()

# Largest numbers of row groups, and of rows, that are shuffled together.
MAX_WINDOW_GROUPS = 8
MAX_WINDOW_ROWS = 1 << 20

# Number of stretches or row groups over which a sample of rows is spread.
SAMPLE_PARTS = 8


@runtime_checkable
class Dataset(Protocol):
    """The training rows or the held-out rows of a run, in batches that its model's loss takes.

    ``len(dataset)`` is the number of rows of all processes.
    """

    def __len__(self) -> int: ...

    def num_batches(self, batch_size: int) -> int:
        """Return the number of batches of an epoch, the same in all processes."""

    def batches(
        self, batch_size: int, first: int = 0, epoch: int = 0
    ) -> Generator[Any, None, None]:
        """Yield this process's batches of an epoch from batch ``first`` on.

        They depend only on the arguments, so that a resumed run goes on with the batch of its step.
        """


@dataclasses.dataclass(frozen=True)
class LogDataset:
    """The rows ``[start, stop)`` of a log, or some of them.

    Attributes:
        mask: The rows of the dataset, all in ``[start, stop)``; None: all of these.
        shard: Index of this process among all. Each process has an equal part of every batch, also
            of the last, so that together they train on the batches of a single process.
        id_bits: 64: the log's ids are raw, for `jaxrec.tier.ahead`.
    """

    log: ClickLog
    start: int
    stop: int
    shard: Shard = _ALONE
    id_bits: Literal[32, 64] = 32
    mask: RowMask | None = None

    def __len__(self) -> int:
        return self.stop - self.start if self.mask is None else self.mask.count

    def selected(self, mask: RowMask) -> LogDataset:
        """Return the dataset of some rows of the log."""
        start, stop = mask.stretch
        is_range = mask.count == stop - start
        return dataclasses.replace(self, start=start, stop=stop, mask=None if is_range else mask)

    def _chunks(self, place: int = 0) -> Iterator[Clicks]:
        """Yield the dataset's rows from its row number ``place`` on, in chunks."""
        mask = self.mask
        if mask is None:
            yield from self.log.chunks(self.start + place, self.stop)
            return
        first = mask.row(place) if place < mask.count else self.stop
        for chunk in self.log.chunks(first, self.stop):
            yield chunk[mask.part(first, first + len(chunk))]
            first += len(chunk)

    def num_batches(self, batch_size: int) -> int:
        """Return the number of batches of an epoch."""
        return -(-len(self) // batch_size)

    def batches(
        self, batch_size: int, first: int = 0, epoch: int = 0
    ) -> Generator[ClickBatch, None, None]:
        """Yield this process's batches from ``first`` on; a thread makes them ahead.

        Every ``epoch`` has the order of the log.
        """
        chunks = self._chunks(first * batch_size)
        own = _own_rows(chunks, len(self) - first * batch_size, batch_size, self.shard)
        left = self.num_batches(batch_size) - first
        # The last batch may have no rows for some process. All take part in each step, so
        # `at_least` gives that process a batch of padding.
        each = batch_size // self.shard.count
        stream = batches(own, each, CATEGORICAL_NAMES, at_least=left, id_bits=self.id_bits)
        # A chunk of rows makes many batches at once: four wait while the next chunk is made.
        with Pipeline(stream, ahead=4) as ready:
            yield from ready

    def sample(self, count: int) -> ClickSample:
        """Return about ``count`` rows of all processes, in stretches over all rows."""
        each = min(count, len(self)) // self.shard.count
        total = each * self.shard.count
        if not total:
            return ClickSample(next(self._chunks())[:0], self.id_bits, self.shard.count)
        parts = min(SAMPLE_PARTS, total)
        ends = np.linspace(0, total, parts + 1).astype(int)
        # The places of the stretches in the dataset are as far apart as they can be.
        starts = np.linspace(0, len(self) - total, parts).astype(int) + ends[:-1]
        taken = []
        for start, size in zip(starts, np.diff(ends), strict=True):
            chunks, left = self._chunks(int(start)), int(size)
            while left:
                chunk = next(chunks)[:left]
                taken.append(chunk)
                left -= len(chunk)
        rows = Clicks.concatenate(taken)[self.shard.index :: self.shard.count]
        return ClickSample(rows, self.id_bits, self.shard.count)

    def probabilities(self) -> Float[np.ndarray, " rows"] | None:
        """Return the true probability of a click in each row, ``[rows]``; None if it is unknown."""
        known = []
        for chunk in self._chunks():
            if chunk.probabilities is None:
                return None
            known.append(chunk.probabilities)
        return np.concatenate(known)


def _own_rows(
    chunks: Iterable[Clicks], total: int, batch_size: int, shard: Shard
) -> Iterator[Clicks]:
    """Yield the rows of each batch that belong to a process; all chunks have ``total`` rows."""
    if shard.count == 1:
        yield from chunks
        return
    first = 0
    for chunk in chunks:
        batch, sample = np.divmod(np.arange(first, first + len(chunk)), batch_size)
        # The last batch may be short; its size counts there, so that every process still has an
        # equal part.
        process = sample * shard.count // np.minimum(batch_size, total - batch * batch_size)
        first += len(chunk)
        yield chunk[process == shard.index]


@dataclasses.dataclass(frozen=True, eq=False)
class ParquetDataset:
    """Rows of Parquet files.

    Attributes:
        seed: Seed of the order, which differs in each epoch; None: the order of the files.
        shard: Index of this process among all. Each process reads a range of the rows, in an order
            of its own. The sizes of these ranges differ by at most 1.
        memory: Memory for the rows, such as "2GB"; None: as much as a good shuffle needs.
        besides: Bytes of this memory that the model itself needs for the rows.
    """

    groups: RowsOf
    encoder: TableEncoder
    seed: int | None = None
    shard: Shard = _ALONE
    memory: str | None = None
    besides: int = 0

    def __len__(self) -> int:
        return sum(self.groups.sizes)

    def num_batches(self, batch_size: int) -> int:
        """Return the number of batches of an epoch for the process with the most rows."""
        rows = -(-len(self) // self.shard.count)
        return -(-rows // (batch_size // self.shard.count))

    def batches(
        self, batch_size: int, first: int = 0, epoch: int = 0
    ) -> Generator[ClickBatch, None, None]:
        """Yield this process's batches of an epoch from ``first`` on; threads make them ahead."""
        each = batch_size // self.shard.count
        groups = EncodedGroups(self._own_groups(), self.encoder)
        # More row groups mix rows better, but all rows of a window are in memory at once.
        window = min(MAX_WINDOW_GROUPS, max(1, MAX_WINDOW_ROWS // max(groups.sizes)))
        if self.memory is not None:
            files, schema = files_of(self.groups), self.encoder.schema
            window = window_within(self.memory, files, schema, window, self.besides)

        def to_batch(rows: pa.Table) -> ClickBatch:
            return self.encoder.pack(rows, each)

        source = BatchSource(groups, each, to_batch, self.seed, epochs=epoch + 1, window=window)
        own = source.batches_per_epoch
        yield from source.from_batch(epoch * own + min(first, own))
        # The ranges may differ by a row, and with it the numbers of batches. All processes must
        # take part in each step, so that one with fewer batches goes on with empty ones.
        for _ in range(max(first, own), self.num_batches(batch_size)):
            yield to_batch(groups.read(0)[:0])

    def sample(self, count: int) -> TableSample:
        """Return about ``count`` rows of all processes, spread over some row groups."""
        groups = EncodedGroups(self._own_groups(), self.encoder)
        sizes = np.array(groups.sizes)
        each = min(count, len(self)) // self.shard.count
        # Some groups are enough, unless they are small.
        number = min(len(sizes), max(SAMPLE_PARTS, int(2 * each / max(sizes.mean(), 1))))
        chosen = np.unique(np.linspace(0, len(sizes) - 1, number).astype(int))
        if sizes[chosen].sum() < each:
            chosen = np.arange(len(sizes))
        ends = np.cumsum(sizes[chosen])
        places = np.linspace(0, ends[-1], each, endpoint=False).astype(int)
        parts = []
        for group, start, end in zip(chosen, ends - sizes[chosen], ends, strict=True):
            own = places[(places >= start) & (places < end)] - start
            parts.append(groups.read(int(group)).take(pa.array(own)))
        return TableSample(pa.concat_tables(parts), self.encoder, self.shard.count)

    def _own_groups(self) -> RowsOf:
        if self.shard.count == 1:
            return self.groups
        if len(self) < self.shard.count:
            raise DataError(f"{len(self)} rows are too few for {self.shard.count} processes")
        return GroupRange(self.groups, *self.shard.stretch(len(self)))

    def probabilities(self) -> None:
        """Return None: the probabilities are unknown."""


def run_batches(dataset: Dataset, batch_size: int, epochs: int, first: int = 0) -> Iterator[Any]:
    """Yield this process's batches of all epochs from batch ``first`` of the run on."""
    per_epoch = dataset.num_batches(batch_size)
    for epoch in range(first // per_epoch, epochs):
        yield from dataset.batches(batch_size, max(first - epoch * per_epoch, 0), epoch)


def split_datasets(
    config: TrainConfig, shard: Shard = _ALONE, encoder: TableEncoder | None = None
) -> tuple[LogDataset | ParquetDataset, LogDataset | ParquetDataset]:
    """Return the training rows and the held-out rows of a run.

    ``encoder`` is for Parquet files; None: it is learned.
    """
    data = config.data
    if is_parquet(data.path):
        if encoder is None:
            encoder = learn_features(
                data, is_dynamic=config.vocabulary.is_dynamic, seed=config.seed
            )
        training, held_out = split_groups(data, encoder.schema, config.seed)
        return (
            ParquetDataset(training, encoder, config.seed, shard, data.memory),
            ParquetDataset(held_out, encoder, None, shard, data.memory),
        )
    rows, rest = _split(config)
    return dataclasses.replace(rows, shard=shard), dataclasses.replace(rest, shard=shard)


def _split(config: TrainConfig) -> tuple[LogDataset, LogDataset]:
    data = config.data
    id_bits: Literal[32, 64] = 64 if config.vocabulary.is_dynamic else 32
    split = split_of(data, config.seed)
    if split.columns:
        what = "generated log" if data.path is None else "text in Criteo's format"
        raise ConfigError(
            f"the {what} has no column {split.columns[0]!r} to hold out rows by; give --hold-out a "
            "fraction or random, or files of columns with --data (`jaxrec data criteo` makes them)"
        )
    if data.path is None:
        rows = data.generated_rows
        log = GeneratedLog(rows + data.generated_eval_rows, config.seed, id_bits=id_bits)
        whole = LogDataset(log, 0, log.num_rows, id_bits=id_bits)
        if data.hold_out is None:
            return dataclasses.replace(whole, stop=rows), dataclasses.replace(whole, start=rows)
        return _parts(whole, split.mask(log.num_rows, "generated log"))
    if data.memory is not None:
        raise ConfigError(
            f"--memory is for files of columns; {data.path} is text in Criteo's format, which is "
            "read a few lines at a time: leave it out"
        )
    problem = foreign_format(data.path)
    roles = (data.label, data.weight, data.exclude, data.dense, data.categorical)
    if data.schema is not None or any(roles):
        raise DataError(
            f"{data.path} is not a Parquet file; a schema is for the columns of one"
            + (f": it {problem}" if problem else "")
        )
    whole = _text(data.path, data, id_bits)
    if data.eval_path is not None:
        return whole, _text(data.eval_path, data, id_bits)
    return _parts(whole, split.mask(len(whole), str(data.path)))


def _parts(whole: LogDataset, held_out: RowMask) -> tuple[LogDataset, LogDataset]:
    return whole.selected(held_out.inverted()), whole.selected(held_out)


def bad_lines(*parts: Dataset) -> dict[pathlib.Path, int]:
    """Return the number of malformed lines of each text file that has some."""
    logs = {rows.log for rows in parts if isinstance(rows, LogDataset)}
    files = [log for log in logs if isinstance(log, CriteoFile)]
    return {pathlib.Path(file.path): file.bad_lines for file in files if file.bad_lines}


def check_held_out(rows: LogDataset | ParquetDataset, config: TrainConfig) -> None:
    """Read held-out rows that nothing has read yet, to find bad values before training."""
    if isinstance(rows, ParquetDataset):
        # A new run has read its rows when it learned the encoder.
        if config.resume is not None and config.data.eval_path is not None:
            check_rows(rows.encoder, rows.groups)
    elif isinstance(rows.log, CriteoFile):
        rows.log.check(rows.start)


def _text(path: pathlib.Path, data: DataConfig, id_bits: Literal[32, 64]) -> LogDataset:
    if (problem := foreign_format(path)) is not None:
        raise DataError(f"{path} {problem}")
    if isinstance(path, Address):
        raise DataError(f"{path} is text in Criteo's format; copy it to this machine")
    file = CriteoFile(path, (data.table_rows,) * NUM_CATEGORICAL, data.bad_rows, id_bits)
    return LogDataset(file, 0, file.num_rows, id_bits=id_bits)
