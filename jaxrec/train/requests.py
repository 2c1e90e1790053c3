"""Data of a run of a ranker: its files or log, its windows of time, and its batches."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Generator

import jax
import numpy as np
import pyarrow as pa

from jaxrec.arguments import ConfigError
from jaxrec.data import (
    BatchShape,
    DataError,
    EventGroups,
    GeneratedEvents,
    ParquetGroups,
    Pipeline,
    RequestGroups,
    RequestLimits,
    Schema,
    SequenceBatches,
    TableGroups,
    TimeWindow,
    group_events,
    movielens_ratings,
)
from jaxrec.data.column_types import is_list
from jaxrec.data.common_types import common_columns
from jaxrec.data.event_tables import request_rows
from jaxrec.data.groups import ColumnGroups
from jaxrec.data.later_rows import LaterRows
from jaxrec.data.movielens import has_ratings
from jaxrec.data.sequences.batches import SequenceGroups
from jaxrec.data.sequences.events import ACTION, CANDIDATE
from jaxrec.data.split import LastRows
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.train.config import DataConfig, TrainConfig
from jaxrec.train.features import parquet_data
from jaxrec.train.hold_out import split_of
from jaxrec.train.request_columns import TIME, Columns, event_schema, sequence_schema

# Events of a log with a row for each that are grouped by user in memory.
MOST_EVENTS = 50_000_000

# Batches whose requests are dealt to several devices together.
DEALT_STEPS = 4

# Row groups from which the mean lengths of requests are taken, and what a batch has space for
# beyond the mean: batches are then nearly always full in rows.
_SAMPLED_GROUPS, _SPARE = 8, 1.1


@dataclasses.dataclass(frozen=True, eq=False)
class RequestData:
    """A ranker's data: its rows, and the names and types of their columns.

    Attributes:
        rows: The rows: requests with their candidates, or users with all their events.
        columns: Names and types of the columns.
        log: The generated log that the rows are; None: they are not generated.
    """

    rows: ColumnGroups
    columns: pa.Schema
    log: GeneratedEvents | None = None

    @classmethod
    def open(cls, config: TrainConfig, path: pathlib.Path | None) -> RequestData:
        """Open files of columns or ratings of MovieLens, or generate a log.

        Raises:
            ConfigError: A column is missing.
            DataError: The files cannot be read, or have more events than memory should hold.
        """
        data = config.data
        if path is None:
            users = data.generated_rows + data.generated_eval_rows
            log = GeneratedEvents(users, config.seed)
            table = request_rows(log.requests(0, users))
            return cls(_in_memory(table), table.schema, log)
        if has_ratings(path):
            return cls._grouped(movielens_ratings(path), data)
        found = parquet_data(path, data)
        files = ParquetGroups.of_files(found)
        shared = set.intersection(*({*each.names} for each in files.schemas_of_rows.values()))
        columns = common_columns(files.schemas_of_rows.items(), shared)
        names = Columns.find(data, columns.names)
        if is_list(columns.field(names.time).type):
            return cls(files, columns)
        if (events := sum(files.sizes)) > MOST_EVENTS:
            raise DataError(
                f"{path} has a row for each of {events:,} events, and up to {MOST_EVENTS:,} are "
                "grouped by user in memory; `jaxrec data histories LOG OUTPUT` does it in files"
            )
        parts = [files.read(group) for group in range(len(files.sizes))]
        return cls._grouped(pa.concat_tables(parts, promote_options="permissive"), data)

    @classmethod
    def _grouped(cls, log: pa.Table, data: DataConfig) -> RequestData:
        names = Columns.find(data, log.column_names)
        if names.user is None:
            raise ConfigError(f"{data.path}: name the column of users with --user")
        table = group_events(log, user=names.user, time=names.time)
        return cls(_in_memory(table), table.schema)

    def groups(
        self, data: DataConfig, names: Columns, schema: Schema, limits: RequestLimits
    ) -> SequenceGroups:
        """Return the requests of the rows; ``schema`` has the encodings of the ids.

        Raises:
            ConfigError: No column says what to predict, or ``--label`` names one beside requests.
        """
        if CANDIDATE + names.items[0] in self.columns.names:
            if data.label:
                raise ConfigError(
                    f"{data.path} has requests, which the column {CANDIDATE + ACTION!r} labels; "
                    "leave --label out"
                )
            return RequestGroups(self.rows, sequence_schema(names, schema), limits)
        events = event_schema(data, self.columns.names, names, schema)
        return EventGroups(self.rows, events, limits)


def _in_memory(table: pa.Table) -> TableGroups:
    """Return a table in as many groups as processes shuffle together."""
    groups = SequenceBatches.window * jax.process_count()
    return TableGroups(table, max(1, -(-len(table) // groups)))


def split_windows(
    groups: SequenceGroups, config: TrainConfig, time: str = TIME
) -> tuple[TimeWindow, ...]:
    """Return the windows of time of a run; the last one is held out.

    Without ``config.windows`` there are two. The last has the newest candidates, by default a
    tenth, or those from a time on of the column ``time``.
    """
    data = config.data
    times = np.concatenate([groups.times(group) for group in range(len(groups.sizes))])
    if not len(times):
        raise DataError("there are no candidates to train on")
    first, last = int(times.min()), int(times.max())
    if config.windows:
        return TimeWindow.split(first, last, config.windows)
    split = split_of(data)
    if isinstance(split, LastRows):
        cut = int(np.quantile(times, 1 - split.fraction, method="lower"))
    elif isinstance(split, LaterRows) and split.name == time:
        values = TableGroups(pa.table({time: times}), len(times))
        held_out = split.mask(len(times), str(data.path or "generated log"), values)
        cut = int(times[held_out.part(0, len(times))].min())
    else:
        raise ConfigError(
            "model.name hstu_ranker holds out the newest candidates: give --hold-out a fraction, "
            f"or --hold-out-from {time}=TIME"
        )
    if cut <= first:
        raise DataError("all candidates have one time, and held-out ones must be later")
    return TimeWindow(stop=cut), TimeWindow(start=cut)


def batch_shape(groups: SequenceGroups, config: TrainConfig) -> BatchShape:
    """Return the sizes of a process's batches, of rows of the mean length."""
    rows = config.data.batch_size // (config.devices * jax.process_count())
    sampled = np.linspace(0, len(groups.sizes) - 1, _SAMPLED_GROUPS).astype(int)
    counts = [groups.requests(group).counts for group in dict.fromkeys(sampled.tolist())]
    requests = max(1, sum(each.requests for each in counts))

    def capacity(total: int, most: int) -> int:
        # Multiples of 8, as the ladder of capacities has them.
        return max(most, -(-int(_SPARE * rows * total / requests) // 8) * 8)

    return BatchShape(
        rows,
        capacity(sum(each.events for each in counts), groups.limits.history),
        capacity(sum(each.candidates for each in counts), groups.limits.candidates),
        devices=config.devices,
        steps=DEALT_STEPS if config.devices > 1 else 1,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RequestBatch:
    """A batch of requests.

    Attributes:
        features: The features of context, histories and candidates.
    """

    features: KeyedJaggedArray

    def capacities_of(self, devices: int) -> dict[str, int]:
        """Return each feature's capacity on one of some devices."""
        return {name: n // devices for name, n in self.features.capacity_per_key.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class RequestDataset:
    """Requests in windows of time, one window after the other.

    Attributes:
        windows: The batches of each window.
    """

    windows: tuple[SequenceBatches, ...]

    def __len__(self) -> int:
        return sum(window.counts.candidates for window in self.windows)

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """Number of batches of an epoch up to the end of each window."""
        # Epochs differ by a few batches; the longest one counts, and padding fills up the others.
        longest = [max(map(x.batches_of_epoch, range(x.epochs))) for x in self.windows]
        return tuple(np.cumsum(longest).tolist())

    def num_batches(self, batch_size: int) -> int:
        return self.ends[-1]

    def batches(
        self, batch_size: int, first: int = 0, epoch: int = 0
    ) -> Generator[RequestBatch, None, None]:
        start = 0
        for window, stop in zip(self.windows, self.ends, strict=True):
            made = max(first - start, 0)
            if start + made < stop:
                yield from self._window(window, made, stop - start, epoch)
            start = stop

    def _window(
        self, window: SequenceBatches, made: int, count: int, epoch: int
    ) -> Generator[RequestBatch, None, None]:
        """Yield the batches ``[made, count)`` of a window's epoch, which ends with padding."""
        before = sum(map(window.batches_of_epoch, range(epoch)))
        own = window.batches_of_epoch(epoch)
        numbers = range(min(made, own), own)
        with Pipeline((window[before + number] for number in numbers), RequestBatch) as ready:
            yield from ready
        for _ in range(max(made, own), count):
            yield RequestBatch(window.padding())
