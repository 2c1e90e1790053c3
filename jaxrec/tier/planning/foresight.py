"""Batches with their ids, and those of the next batches for eviction policies that look ahead."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxrec.data.pipeline import each_batch
from jaxrec.tier.ids.batch_ops import distinct
from jaxrec.tier.planning.batch_ids import BatchIds


@dataclasses.dataclass(frozen=True)
class ForeseenBatch:
    """A batch and the ids of the batches after it.

    Attributes:
        batch: The host batch.
        ids: Its ids.
        coming: The distinct ids of each of the next batches, nearest first; for each of them an
            int64 array for each vocabulary.
    """

    batch: Any
    ids: BatchIds
    coming: Sequence[Sequence[np.ndarray]] = ()


def foresee(
    batches: Iterable[Any], read_ids: Callable[[Any], BatchIds], num_ahead: int
) -> Generator[ForeseenBatch, None, None]:
    """Yield batches, each when a number of batches after it were read.

    The last batches have fewer after them. An error of a batch is raised when all batches before it
    were yielded.

    Args:
        batches: The batches.
        read_ids: Returns the ids of a batch.
        num_ahead: Number of batches that are read beyond the yielded one.
    """
    waiting: collections.deque[tuple[Any, BatchIds, list[np.ndarray]]] = collections.deque()
    with contextlib.closing(_read(batches, read_ids, is_coming=num_ahead > 0)) as source:
        error: Exception | None = None
        while True:
            try:
                waiting.extend(itertools.islice(source, num_ahead + 1 - len(waiting)))
            except Exception as raised:  # raised again after the batches before it
                error = raised
            if not waiting:
                break
            batch, ids, _ = waiting.popleft()
            yield ForeseenBatch(batch, ids, [each for _, _, each in waiting])
        if error is not None:
            raise error


def _read(
    batches: Iterable[Any], read_ids: Callable[[Any], BatchIds], *, is_coming: bool
) -> Generator[tuple[Any, BatchIds, list[np.ndarray]], None, None]:
    """Yield each batch, its ids, and, if it is a coming one of others, its distinct ids."""
    source: Iterator[Any] = each_batch(batches)
    try:
        for batch in source:
            ids = read_ids(batch)
            yield batch, ids, [distinct(each)[0] for each in ids.ids] if is_coming else []
    finally:
        if (close := getattr(source, "close", None)) is not None:
            close()
