"""Batches of rows in random order, each computed from its number."""

from __future__ import annotations

import abc
import collections
import concurrent.futures
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int

from jaxrec.data.files import DataError
from jaxrec.data.groups import RowGroups
from jaxrec.data.pipeline import made_ahead

Batch = TypeVar("Batch")

# Number of windows of rows in memory. A batch may span two windows, and threads make later batches
# ahead, which may need a third.
KEPT_WINDOWS = 3


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of the rows that one of several processes reads.

    Attributes:
        index: Number of the process, from 0.
        count: Number of processes.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"a shard is one of 0 to count - 1, got {self.index} of {self.count}")

    def stretch(self, rows: int) -> tuple[int, int]:
        """Return the process's range of rows; the ranges differ by at most one row in length.

        Example:
            >>> [Shard(index, 3).stretch(50) for index in range(3)]
            [(0, 17), (17, 34), (34, 50)]
        """
        return -(-self.index * rows // self.count), -(-(self.index + 1) * rows // self.count)


def deal_groups(sizes: Sequence[int], processes: int) -> tuple[tuple[int, ...], ...]:
    """Deal row groups to processes; return the numbers of each one's groups, ascending."""
    if processes == 1:
        return (tuple(range(len(sizes))),)
    dealt: list[list[int]] = [[] for _ in range(processes)]
    totals = [0] * processes
    # The largest group first, to the process with the least so far: small groups then even out
    # what the large ones left uneven.
    for group in sorted(range(len(sizes)), key=lambda g: -sizes[g]):
        receiver = totals.index(min(totals))
        dealt[receiver].append(group)
        totals[receiver] += sizes[group]
    return tuple(tuple(sorted(groups)) for groups in dealt)


def group_windows(
    groups: Sequence[int], window: int, seed: int | None, epoch: int
) -> tuple[tuple[int, ...], ...]:
    """Return the row groups of each window of an epoch; a seed gives each epoch a random order."""
    order = np.array(groups, np.int64)
    if seed is not None:
        order = np.random.default_rng([seed, epoch]).permutation(order)
    return tuple(
        tuple(order[start : start + window].tolist()) for start in range(0, len(order), window)
    )


def row_order(rows: int, seed: int | None, epoch: int, window: int) -> Int[np.ndarray, " rows"]:
    """Return the order of the rows of a window of row groups; without a seed they stay in order."""
    if seed is None:
        return np.arange(rows)
    # Each window seeds a generator, so that a resumed run reads its window and none before.
    return np.random.default_rng([seed, epoch, window]).permutation(rows)


class NumberedBatches(abc.ABC, Generic[Batch]):
    """Batches that are made by their numbers, in order or from a number on."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Batch: ...

    def from_batch(self, start: int = 0, *, threads: int = 2, prefetch: int = 4) -> Iterator[Batch]:
        """Yield the batches from ``start`` on, in order; threads make them ahead.

        Args:
            start: Number of the first batch, such as the number of steps made before.
            threads: Number of threads.
            prefetch: Number of batches to make ahead.
        """
        return made_ahead(self.__getitem__, range(start, len(self)), threads, prefetch)

    def dataset(self, start: int = 0, *, threads: int = 2, prefetch: int = 4) -> Any:
        """Return the batches as a Grain dataset, whose iterators save and restore their position.

        Raises:
            ImportError: Grain is not installed.
        """
        try:
            import grain
        except ImportError:
            raise ImportError("a Grain dataset needs it: pip install 'jaxrec[data]'") from None
        batches = grain.MapDataset.source(self)[start:]
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
        return batches.to_iter_dataset(options)


@dataclasses.dataclass(frozen=True, eq=False)
class BatchSource(NumberedBatches[Batch]):
    """The batches of a run by number: a sequence, and a source for Grain.

    With a seed, each epoch reads the row groups in a different random order. It reads ``window``
    groups at a time and shuffles their rows together. Batch ``i`` depends only on the arguments and
    on ``i``, so that a resumed run continues with the batch of its step.

    With several processes, each process reads other row groups. All processes have about equally
    many rows and the same number of batches.

    Attributes:
        groups: The row groups.
        batch_size: Number of rows of a batch of this process.
        transform: Function that makes a batch of a table of its rows.
        seed: Seed of the order; None: the order of the files.
        epochs: Number of epochs.
        shard: Number of this process and of all processes.
        window: Number of row groups that are shuffled together.
        drop_remainder: True: each batch has ``batch_size`` rows, and an epoch leaves out the rows
            that remain at its end. False: an epoch has all rows. Its last batches are smaller, with
            one row or more on each process, and `pad_batch` fills them up. None: False for one
            process, True for several.

    Raises:
        ValueError: ``batch_size``, ``epochs`` or ``window`` is below 1.
        DataError: A process has too few rows for its batches; raised on first use.

    Example:
        >>> import numpy as np, pathlib, tempfile
        >>> from jaxrec.data import NpyGroups
        >>> from jaxrec.data.arrays import to_numpy
        >>> path = pathlib.Path(tempfile.mkdtemp(), "x.npy")
        >>> np.save(path, np.arange(10))
        >>> groups = NpyGroups({"x": path})
        >>> source = BatchSource(groups, 4, lambda rows: to_numpy(rows["x"]), seed=0)
        >>> sorted(np.concatenate([source[i] for i in range(len(source))]).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    groups: RowGroups
    batch_size: int
    transform: Callable[[pa.Table], Batch] = lambda rows: rows
    seed: int | None = None
    epochs: int = 1
    shard: Shard = Shard()
    window: int = 8
    drop_remainder: bool | None = None
    _windows: WindowCache = dataclasses.field(
        default_factory=lambda: WindowCache(), init=False, repr=False
    )

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is 1 or more, got {getattr(self, name)}")

    def __len__(self) -> int:
        return self.batches_per_epoch * self.epochs

    @functools.cached_property
    def batches_per_epoch(self) -> int:
        """Number of batches of an epoch, the same in all processes."""
        rows = [sum(self.groups.sizes[g] for g in dealt) for dealt in self._dealt]
        drop = self.shard.count > 1 if self.drop_remainder is None else self.drop_remainder
        batches = min(rows) // self.batch_size if drop else -(-max(rows) // self.batch_size)
        if batches == 0 or min(rows) < batches:
            raise DataError(
                f"the rows make no batch of {self.batch_size}: a process of {self.shard.count} "
                f"has {min(rows)}; take smaller batches, fewer processes or smaller row groups"
                if drop
                else f"a process of {self.shard.count} has {min(rows)} rows, too few for the "
                f"{batches} batches of {self.batch_size} of the one with {max(rows)}; take larger "
                "batches, fewer processes or smaller row groups"
            )
        return batches

    def _first_row(self, batch: int, rows: int) -> int:
        """Return the first row of a batch among the ``rows`` of the process's epoch."""
        # Processes have unequally many rows and equally many batches: the last ones may be small,
        # and must not be empty. The minimum leaves at least one row for each batch that follows.
        return min(batch * self.batch_size, rows - (self.batches_per_epoch - batch))

    @functools.cached_property
    def _dealt(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of each process's row groups, ascending."""
        return deal_groups(self.groups.sizes, self.shard.count)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - as long-lived as a run
    def _order(self, epoch: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """Return the row groups of each window of an epoch, and the row at which each ends."""
        own = self._dealt[self.shard.index]
        windows = group_windows(own, self.window, self.seed, epoch)
        sizes = [sum(self.groups.sizes[g] for g in window) for window in windows]
        return windows, tuple(np.cumsum(sizes).tolist())

    def __getitem__(self, index: int) -> Batch:
        """Make batch ``index`` of the run.

        Raises:
            IndexError: The run has fewer batches.
            OSError, DataError: The rows cannot be read.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} batches, and no batch {index}")
        epoch, batch = divmod(int(index), self.batches_per_epoch)
        ends = self._order(epoch)[1]
        row, stop = (self._first_row(number, ends[-1]) for number in (batch, batch + 1))
        pieces = []
        while row < stop:
            window = int(np.searchsorted(ends, row, side="right"))
            start = ends[window - 1] if window else 0
            rows = self._windows.get((epoch, window), functools.partial(self._read, epoch, window))
            pieces.append(rows.slice(row - start, min(stop, ends[window]) - row))
            row += len(pieces[-1])
        return self.transform(pa.concat_tables(pieces))

    def _read(self, epoch: int, window: int) -> pa.Table:
        groups = self._order(epoch)[0][window]
        rows = pa.concat_tables([self.groups.read(group) for group in groups])
        if self.seed is None:
            return rows
        order = row_order(len(rows), self.seed, epoch, window)
        return pc.take(rows, pa.array(order), boundscheck=False)


class WindowCache:
    """Cache of the windows of rows that were used last; threads share one read of a window."""

    # Rows are tables here, and `SequenceRows` in jaxrec.data.sequences.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: collections.OrderedDict[tuple[int, int], concurrent.futures.Future[Any]] = (
            collections.OrderedDict()
        )

    def get(self, key: tuple[int, int], read: Callable[[], Any]) -> Any:
        with self._lock:
            # The thread that comes first reads; others wait for its future, outside of the lock.
            future = self._windows.get(key)
            is_first = future is None
            if future is None:
                future = self._windows[key] = concurrent.futures.Future()
                while len(self._windows) > KEPT_WINDOWS:
                    self._windows.popitem(last=False)
            self._windows.move_to_end(key)
        if is_first:
            try:
                future.set_result(read())
            except BaseException as error:
                # Threads that wait get the error; a later batch reads the window anew, as after a
                # network file system came back.
                with self._lock:
                    self._windows.pop(key, None)
                future.set_exception(error)
        return future.result()

    def __reduce__(self) -> tuple[type[WindowCache], tuple[()]]:
        # Grain's workers pickle the source: locks cannot be pickled, and rows need not be.
        return WindowCache, ()
