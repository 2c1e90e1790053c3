"""Batches of rows in random order, each found by its number: an order that needs no memory."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrec.data.groups import RowGroups
from jaxrec.data.prefetch import ordered_map
from jaxrec.data.text import DataError

Batch = TypeVar("Batch")

# Windows of rows in memory: the one that batches are cut from, and its neighbours.
KEPT_WINDOWS = 3


@dataclasses.dataclass(frozen=True)
class Shard:
    """Which part of the rows a process reads.

    Attributes:
        index: Number of the process.
        count: How many there are.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"a shard is one of 0 to count - 1, got {self.index} of {self.count}")

    def stretch(self, rows: int) -> tuple[int, int]:
        """First row and the row after the last of an equal part; first processes have one more.

        Example:
            >>> [Shard(index, 3).stretch(50) for index in range(3)]
            [(0, 17), (17, 34), (34, 50)]
        """
        return -(-self.index * rows // self.count), -(-(self.index + 1) * rows // self.count)


@dataclasses.dataclass(frozen=True, eq=False)
class BatchSource(Generic[Batch]):
    """All batches of a run, by number: to iterate over, to index, or a source for Grain.

    With a seed, each epoch goes through the row groups in an order of its own, ``window`` of them
    are in memory at once, and all their rows are shuffled together. Batch ``i`` depends on the
    arguments and on ``i`` alone, so a run goes on exactly where it was by the number of its step.

    Each process reads row groups of its own, dealt out so that all have about equally many rows,
    and every process has the same number of batches.

    Attributes:
        groups: Where the rows are.
        batch_size: Rows of a batch, of this process.
        transform: What becomes of a batch's rows.
        seed: Of the order; None: as they are stored.
        epochs: How often every row comes.
        shard: This process's part.
        window: Row groups that are shuffled together.
        drop_remainder: Whether each batch has ``batch_size`` rows, and the rows left over at the
            end of an epoch are left out. False: every row comes; the last batches are smaller, with
            one row or more on each process, and `pad_batch` makes them equal again. None: False on
            one process, True on several.

    Raises:
        ValueError: A number is below 1.
        DataError: From `len` and on: a process has too few rows for its batches.

    Example:
        >>> import numpy as np, pathlib, tempfile
        >>> from jaxrec.data import NpyGroups, to_numpy
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
    _windows: _WindowCache = dataclasses.field(
        default_factory=lambda: _WindowCache(), init=False, repr=False
    )

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is 1 or more, got {getattr(self, name)}")

    def __len__(self) -> int:
        return self.batches_per_epoch * self.epochs

    @functools.cached_property
    def batches_per_epoch(self) -> int:
        """Batches of each process."""
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
        """The row that a batch of an epoch begins with; each later batch has one at least."""
        return min(batch * self.batch_size, rows - (self.batches_per_epoch - batch))

    @functools.cached_property
    def _dealt(self) -> tuple[tuple[int, ...], ...]:
        """The row groups of each process: the largest first, each to who has fewest rows."""
        if self.shard.count == 1:
            return (tuple(range(len(self.groups.sizes))),)
        dealt: list[list[int]] = [[] for _ in range(self.shard.count)]
        rows = [0] * self.shard.count
        for group in sorted(range(len(self.groups.sizes)), key=lambda g: -self.groups.sizes[g]):
            receiver = rows.index(min(rows))
            dealt[receiver].append(group)
            rows[receiver] += self.groups.sizes[group]
        return tuple(tuple(sorted(groups)) for groups in dealt)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - as long-lived as a run
    def _order(self, epoch: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """The row groups of each window of an epoch, and the row that each window ends before."""
        groups = np.array(self._dealt[self.shard.index])
        if self.seed is not None:
            groups = np.random.default_rng([self.seed, epoch]).permutation(groups)
        windows = tuple(
            tuple(groups[start : start + self.window].tolist())
            for start in range(0, len(groups), self.window)
        )
        sizes = [sum(self.groups.sizes[g] for g in window) for window in windows]
        return windows, tuple(np.cumsum(sizes).tolist())

    def __getitem__(self, index: int) -> Batch:
        """Batch ``index`` of the run.

        Raises:
            IndexError: There are not so many.
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
        order = np.random.default_rng([self.seed, epoch, window]).permutation(len(rows))
        return pc.take(rows, pa.array(order), boundscheck=False)

    def from_batch(self, start: int = 0, *, threads: int = 2, prefetch: int = 4) -> Iterator[Batch]:
        """The batches from ``start`` on, made ahead by threads.

        Args:
            start: The first batch: the number of steps made before.
            threads: Batches that are made at once.
            prefetch: Batches that are ready and wait.
        """
        with concurrent.futures.ThreadPoolExecutor(threads, "batches") as pool:
            numbers = range(start, len(self))
            yield from ordered_map(self.__getitem__, numbers, pool, ahead=prefetch)

    def dataset(self, start: int = 0, *, threads: int = 2, prefetch: int = 4) -> Any:
        """The same as a Grain dataset, whose iterators know and set their position.

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


class _WindowCache:
    """The windows used last; each is read once, however many threads ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: collections.OrderedDict[
            tuple[int, int], concurrent.futures.Future[pa.Table]
        ] = collections.OrderedDict()

    def get(self, key: tuple[int, int], read: Callable[[], pa.Table]) -> pa.Table:
        with self._lock:
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
                with self._lock:
                    self._windows.pop(key, None)
                future.set_exception(error)
        return future.result()

    def __reduce__(self) -> tuple[type[_WindowCache], tuple[()]]:
        return _WindowCache, ()  # another process reads for itself
