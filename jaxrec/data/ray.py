"""Batches of a Ray data set, in the interface of the other readers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import pyarrow as pa

Batch = TypeVar("Batch")


@dataclasses.dataclass(frozen=True, eq=False)
class RayBatches(Generic[Batch]):
    """The batches of a run that reads a Ray data set; `ray_batches` makes them.

    They are read in order, from a batch on. Ray computes the rows of an epoch anew each time, so
    that batches in the middle of an epoch repeat only if Ray keeps the order of the rows.

    Attributes:
        dataset: A ``ray.data.Dataset``; or a ``ray.data.DataIterator``, such as one split of
            ``streaming_split``.
        batch_size: Number of rows of a batch. The last batch of an epoch may have fewer.
        transform: Function that makes a batch of a table of its rows.
        rows: Number of rows of an epoch; None: Ray counts those of a ``Dataset`` where the number
            is needed.
        seed: Seed of the order; None: the order of the data set.
        epochs: Number of epochs.
        shuffle_rows: Number of rows that are shuffled together.
    """

    dataset: Any
    batch_size: int
    transform: Callable[[pa.Table], Batch]
    rows: int | None = None
    seed: int | None = None
    epochs: int = 1
    shuffle_rows: int = 1 << 17

    def __len__(self) -> int:
        return self.batches_per_epoch * self.epochs

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of an epoch."""
        return -(-self.rows_per_epoch // self.batch_size)

    @functools.cached_property
    def rows_per_epoch(self) -> int:
        """Number of rows of an epoch; computed if ``rows`` is None, for which Ray encodes them."""
        if self.rows is not None:
            return self.rows
        if not self._is_whole:
            raise ValueError(
                "a DataIterator does not know its number of rows; give rows, such as "
                "dataset.count() // processes for a split with equal=True"
            )
        return self.dataset.count()

    def from_batch(self, start: int = 0, *, prefetch: int = 4) -> Iterator[Batch]:
        """Yield the batches from ``start`` on, in order; Ray makes them ahead.

        Args:
            start: Number of the first batch, such as the number of batches used before.
            prefetch: Number of batches to fetch ahead.

        Raises:
            ValueError: ``start`` is in the middle of an epoch, and Ray does not keep the order of
                the rows; or ``start`` is above 0, and the number of rows is not known.
            RuntimeError: An epoch has other rows than ``rows``.
        """
        # A new run need not know the number of rows.
        epoch, first = divmod(start, self.batches_per_epoch) if start else (0, 0)
        if first and not self._keeps_order:
            before = start - first
            raise ValueError(
                f"batch {start} is in the middle of an epoch of {self.batches_per_epoch} batches, "
                "whose rows come in another order each time; go on at the start of an epoch, batch "
                f"{before} or {before + self.batches_per_epoch}, or read a Dataset with "
                "dataset.context.execution_options.preserve_order = True"
            )
        return self._from(epoch, first, prefetch)

    def split(self, processes: int) -> list[RayBatches[Batch]]:
        """Return the batches of each of several training processes, which may be pickled.

        All processes have equally many rows; Ray leaves out up to ``processes - 1`` rows of an
        epoch. Each process must read each epoch, since Ray begins an epoch when all ask for it.
        """
        if not self._is_whole:
            raise TypeError("a split cannot be split again; split the Dataset")
        parts = self.dataset.streaming_split(processes, equal=True)
        rows = self.rows_per_epoch // processes
        return [dataclasses.replace(self, dataset=part, rows=rows) for part in parts]

    @property
    def _is_whole(self) -> bool:
        return hasattr(self.dataset, "streaming_split")

    @property
    def _keeps_order(self) -> bool:
        return self._is_whole and self.dataset.context.execution_options.preserve_order

    def _from(self, epoch: int, first: int, prefetch: int) -> Iterator[Batch]:
        for number in range(epoch, self.epochs):
            count = 0
            for place, table in enumerate(self._tables(number, prefetch)):
                count += len(table)
                if number > epoch or place >= first:
                    yield self.transform(table)
            # A wrong number would move the batches of all later epochs.
            if self.rows not in (None, count):
                raise RuntimeError(
                    f"epoch {number} had {count:,} rows; expected {self.rows:,}: give ray_batches "
                    "the number of rows of this process"
                )

    def _tables(self, epoch: int, prefetch: int) -> Iterator[pa.Table]:
        options: dict[str, Any] = {}
        if self.seed is not None:
            # Ray's generators take a seed of 32 bits. A prime keeps epochs of near seeds apart.
            seed = (self.seed * 1_000_003 + epoch) % 2**32
            options = {
                "local_shuffle_buffer_size": max(self.shuffle_rows, self.batch_size),
                "local_shuffle_seed": seed,
            }
        return self.dataset.iter_batches(
            batch_size=self.batch_size,
            batch_format="pyarrow",
            prefetch_batches=prefetch,
            **options,
        )


def ray_batches(
    dataset: Any,
    batch_size: int,
    transform: Callable[[pa.Table], Any] = lambda rows: rows,
    *,
    rows: int | None = None,
    seed: int | None = None,
    epochs: int = 1,
    shuffle_rows: int = 1 << 17,
) -> RayBatches[Any]:
    """Return the batches that a training process reads from a Ray data set.

    Args:
        dataset: A ``ray.data.Dataset`` of encoded rows; or a ``ray.data.DataIterator`` of one
            process's part, such as ``ray.train.get_dataset_shard("train")``.
        batch_size: Number of rows of a batch. The last batch of an epoch may have fewer.
        transform: Function that makes a batch of a table of its rows, such as
            ``lambda rows: encoder.pack(rows, batch_size)``, which fills up the last batch.
        rows: Number of rows of an epoch of this process, such as the ``count()`` of the ``Dataset``
            before it is encoded, which costs little. None: Ray counts the rows of the ``Dataset``
            where the number is needed, for which it encodes them.
        seed: Seed of the order; None: the order of the data set.
        epochs: Number of epochs.
        shuffle_rows: Number of rows that are shuffled together.

    Raises:
        TypeError: ``dataset`` is no data set of Ray.
        ValueError: A number is below 1.

    Example:
        Ray's workers encode, and the training process goes on at a batch::

            clicks = ray.data.read_parquet("clicks/")
            encoded = clicks.map_batches(encoder, batch_format="pyarrow")
            batches = ray_batches(
                encoded, 4096, lambda rows: encoder.pack(rows, 4096), rows=clicks.count(), epochs=3
            )
            trainer.train(batches.from_batch(start))
    """
    if not hasattr(dataset, "iter_batches"):
        raise TypeError(
            "dataset must be a ray.data.Dataset or a ray.data.DataIterator, got a "
            f"{type(dataset).__name__}"
        )
    numbers = {
        "batch_size": batch_size,
        "rows": 1 if rows is None else rows,
        "epochs": epochs,
        "shuffle_rows": shuffle_rows,
    }
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is 1 or more, got {number}")
    return RayBatches(dataset, batch_size, transform, rows, seed, epochs, shuffle_rows)
