"""`SequenceBatches`: batches of requests in random order, each computed from its number."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from jaxrec.data.files import DataError
from jaxrec.data.pipeline import made_ahead
from jaxrec.data.sequences.packing import BatchShape, Stretch, Work, attention_work, deal, stretches
from jaxrec.data.sequences.requests import RequestLimits, Requests, SequenceCounts, TimeWindow
from jaxrec.data.sequences.rows import SequenceRows
from jaxrec.data.sequences.schema import SequenceSchema
from jaxrec.data.shuffled import (
    NumberedBatches,
    Shard,
    WindowCache,
    deal_groups,
    group_windows,
    row_order,
)
from jaxrec.ragged import KeyedJaggedArray

_ALONE = Shard()


@runtime_checkable
class SequenceGroups(Protocol):
    """Requests that are read group by group: `RequestGroups`, `EventGroups`.

    Attributes:
        sequences: Names of the features.
        limits: Limits of a request.
        sizes: Number of rows of each group.
    """

    @property
    def sequences(self) -> SequenceSchema: ...

    @property
    def limits(self) -> RequestLimits: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def within(self, window: TimeWindow) -> SequenceGroups:
        """Return the requests of the candidates in a window of time."""

    def times(self, group: int) -> Int[np.ndarray, " candidates"]:
        """Return the times of a group's candidates, whatever the window."""

    def requests(self, group: int) -> Requests:
        """Return a group's requests, from the columns alone that they depend on."""

    def read(self, group: int) -> SequenceRows:
        """Read a group's requests with all features."""


def time_range(groups: SequenceGroups) -> tuple[int, int]:
    """Return the first and the last time of the candidates, for `TimeWindow.split`.

    Raises:
        DataError: There are no candidates.
        ValueError: The schema has no times.
    """
    all_times = (groups.times(group) for group in range(len(groups.sizes)))
    ranges = [(int(times.min()), int(times.max())) for times in all_times if len(times)]
    if not ranges:
        raise DataError(
            "no request has a candidate, so that there is no time to split; check the schema and "
            "the limits"
        )
    return min(first for first, _ in ranges), max(last for _, last in ranges)


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceBatches(NumberedBatches[KeyedJaggedArray]):
    """The batches of a run by number: `KeyedJaggedArray`s of one shape for `jaxrec.nn.HSTURanker`.

    A batch takes requests until a device's rows, events or candidates are full, so that all batches
    have about equally many tokens, and deals them to devices so that all have equal work
    (`balanced_order`). Every candidate is in one batch of an epoch.

    With a seed, each epoch reads the row groups in a different random order. It reads ``window``
    groups at a time and shuffles their requests together. Batch ``i`` depends only on the arguments
    and on ``i``, so that a resumed run continues with the batch of its step.

    With several processes, each process reads other row groups, and deals its requests to its own
    devices. All have the same number of batches: a process with fewer requests ends with batches of
    padding.

    The first use reads the lengths of all histories and lists of candidates. They stay in memory:
    3 bytes a request with up to 65,535 events and 255 candidates.

    Attributes:
        groups: The requests.
        shape: Sizes of a batch.
        seed: Seed of the order; None: the order of the files, but for the dealing to devices.
        epochs: Number of epochs.
        shard: Number of this process and of all processes.
        window: Number of row groups that are shuffled together.
        work: Work of each request, from its numbers of events and candidates.
        threads: Number of threads that read the lengths.

    Raises:
        ValueError: ``epochs``, ``window`` or ``threads`` is below 1, or a request may exceed a
            device's events or candidates.
        DataError: There is no request; raised on first use.

    Example:
        >>> import pyarrow as pa
        >>> from jaxrec.data import CategoricalColumn, RequestGroups, TableGroups
        >>> table = pa.table({"history": [[1, 2, 3], [4]], "candidate": [[7], [8, 9]]})
        >>> ids = {"history": CategoricalColumn("ids", 10)}
        >>> schema = SequenceSchema({"history": "candidate"}, ids)
        >>> groups = RequestGroups(TableGroups(table), schema, RequestLimits(8, candidates=4))
        >>> source = SequenceBatches(groups, BatchShape(rows=2, events=8, candidates=4))
        >>> len(source), source.counts.candidates, source[0].to_lists()
        (1, 3, {'history': [[1, 2, 3], [4]], 'candidate': [[7], [8, 9]]})
    """

    groups: SequenceGroups
    shape: BatchShape
    seed: int | None = None
    epochs: int = 1
    shard: Shard = _ALONE
    window: int = 8
    work: Work = attention_work
    threads: int = 2
    _windows: WindowCache = dataclasses.field(default_factory=WindowCache, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("epochs", "window", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is 1 or more, got {getattr(self, name)}")
        limits = self.groups.limits
        for name, most in (("events", limits.history), ("candidates", limits.candidates)):
            if getattr(self.shape, name) < most:
                raise ValueError(
                    f"a device has {getattr(self.shape, name)} {name}, but a request may have "
                    f"{most}; give a larger shape or a smaller limit"
                )

    @property
    def capacities(self) -> dict[str, int]:
        """Capacity of each feature on a device, for ``shard_batch(batch, mesh, capacities=)``."""
        return self.shape.capacities(self.groups.sequences)

    @property
    def counts(self) -> SequenceCounts:
        """Requests, candidates and events of all processes, and what the limits left out."""
        return self._lengths[1]

    @functools.cached_property
    def _lengths(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], SequenceCounts]:
        """Numbers of events and of candidates of each request, by group; and the counts of all."""
        limits = self.groups.limits
        # Small types: there may be billions of requests.
        kinds = [np.min_scalar_type(most) for most in (limits.history, limits.candidates)]

        def read(group: int) -> tuple[tuple[np.ndarray, np.ndarray], SequenceCounts]:
            found = self.groups.requests(group)
            sides = (found.history.lengths, found.candidates.lengths)
            events, candidates = (x.astype(kind) for x, kind in zip(sides, kinds, strict=True))
            return (events, candidates), found.counts

        numbers = range(len(self.groups.sizes))
        lengths, counts = [], SequenceCounts()
        for each, count in made_ahead(read, numbers, self.threads, 2 * self.threads):
            lengths.append(each)
            counts += count
        if not counts.requests:
            raise DataError(
                f"{counts.rows} rows make no request: {counts.outside_window} candidates are "
                f"outside of the window of time, and {counts.short_history} follow fewer than "
                f"{limits.min_history} events"
            )
        return lengths, counts

    @functools.cached_property
    def _dealt(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of each process's row groups, with about equally many tokens."""
        sums = [sum(int(x.sum(dtype=np.int64)) for x in each) for each in self._lengths[0]]
        return deal_groups(sums, self.shard.count)

    def _stretches(self, epoch: int, window: int, groups: tuple[int, ...]) -> list[Stretch]:
        """Return the stretches of a window of row groups, over its requests in their order."""
        lengths = [self._lengths[0][group] for group in groups]
        events, candidates = (np.concatenate(each) for each in zip(*lengths, strict=True))
        order = row_order(len(events), self.seed, epoch, window)
        return list(stretches(events[order], candidates[order], self.shape, self.work))

    @functools.lru_cache(maxsize=2)  # noqa: B019 - as long-lived as a run
    def _epoch(self, epoch: int) -> _Epoch:
        """Return the windows of this process's epoch, and the number of all processes' batches."""
        ends, own = [], None
        for process, groups in enumerate(self._dealt):
            windows = group_windows(groups, self.window, self.seed, epoch)
            plans = [self._stretches(epoch, n, window) for n, window in enumerate(windows)]
            steps = [sum(stretch.steps for stretch in plan) for plan in plans]
            ends.append(np.cumsum([0, *steps]).tolist())
            if process == self.shard.index:
                own = windows, plans
        assert own is not None
        return _Epoch(*own, ends[self.shard.index], max(each[-1] for each in ends))

    def batches_of_epoch(self, epoch: int) -> int:
        """Return the number of an epoch's batches, the same in all processes.

        Epochs differ by a few batches: other requests come together.
        """
        return self._epoch(epoch).batches

    @functools.cached_property
    def _ends(self) -> list[int]:
        """Number of batches up to the end of each epoch."""
        epochs = range(1 if self.seed is None else self.epochs)
        batches = [self._epoch(epoch).batches for epoch in epochs]
        return list(itertools.accumulate(batches * (self.epochs // len(batches))))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> KeyedJaggedArray:
        """Make batch ``index`` of the run: ``shape.devices * shape.rows`` rows, device by device.

        Raises:
            IndexError: The run has fewer batches.
            OSError, DataError: The rows cannot be read.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} batches, and no batch {index}")
        epoch = int(np.searchsorted(self._ends, index, side="right"))
        batch = int(index) - (self._ends[epoch - 1] if epoch else 0)
        plan = self._epoch(epoch)
        if batch >= plan.ends[-1]:
            return self.padding()
        window = int(np.searchsorted(plan.ends, batch, side="right")) - 1
        read = functools.partial(self._read, epoch, window)
        rows, chosen = self._windows.get((epoch, window), read)
        return rows.batch(chosen[batch - plan.ends[window]], self._whole_capacities)

    @functools.cached_property
    def _whole_capacities(self) -> dict[str, int]:
        return {name: n * self.shape.devices for name, n in self.capacities.items()}

    def _read(self, epoch: int, window: int) -> tuple[SequenceRows, np.ndarray]:
        """Read a window's requests, and deal them to its batches ``[batches, rows]``."""
        plan = self._epoch(epoch)
        rows = SequenceRows.concatenate([self.groups.read(g) for g in plan.windows[window]])
        order = row_order(len(rows), self.seed, epoch, window)
        events = rows.history.ranges.lengths[order]
        candidates = rows.candidates.ranges.lengths[order]
        dealt = []
        for start, stop, steps in plan.stretches[window]:
            own = slice(start, stop)
            part, _ = deal(events[own], candidates[own], self.shape, steps, self.work)
            dealt.append(np.where(part < 0, -1, order[own][part]))
        return rows, np.concatenate(dealt)

    def padding(self) -> KeyedJaggedArray:
        """Return a batch of padding, in the shape of all."""
        rows = np.full(self.shape.devices * self.shape.rows, -1)
        nothing = SequenceRows.empty(self.groups.sequences)
        return nothing.batch(rows, self._whole_capacities)


@dataclasses.dataclass(frozen=True)
class _Epoch:
    """An epoch of one process.

    Attributes:
        windows: Row groups of each window.
        stretches: Stretches of each window.
        ends: Number of batches before each window, then that of all.
        batches: Number of batches of the process with the most.
    """

    windows: tuple[tuple[int, ...], ...]
    stretches: list[list[Stretch]]
    ends: list[int]
    batches: int
