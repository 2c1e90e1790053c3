"""Ranges of flat arrays: how requests name their events and candidates without copying them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int, Num


@dataclasses.dataclass(frozen=True, eq=False)
class Ranges:
    """Ranges of positions, one for each request.

    Attributes:
        starts: ``[requests]`` int64, first position.
        lengths: ``[requests]`` int64, number of positions.
    """

    starts: Int[np.ndarray, " requests"]
    lengths: Int[np.ndarray, " requests"]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, rows: np.ndarray | slice) -> Ranges:
        return Ranges(self.starts[rows], self.lengths[rows])

    @classmethod
    def empty(cls, requests: int) -> Ranges:
        """Return ranges without positions."""
        return cls(np.zeros(requests, np.int64), np.zeros(requests, np.int64))

    @classmethod
    def between(cls, offsets: Int[np.ndarray, " ends"]) -> Ranges:
        """Return the ranges between the offsets ``[requests + 1]``."""
        return cls(offsets[:-1], np.diff(offsets))

    @classmethod
    def concatenate(cls, parts: Sequence[Ranges], sizes: Sequence[int]) -> Ranges:
        """Return the ranges of joined flat arrays; ``sizes`` are the lengths of the arrays."""
        first = np.cumsum([0, *sizes[:-1]])
        starts = [part.starts + offset for part, offset in zip(parts, first, strict=True)]
        return cls(np.concatenate(starts), np.concatenate([part.lengths for part in parts]))

    def take(self, requests: Int[np.ndarray, " rows"]) -> Ranges:
        """Return the ranges of some requests; that of request -1 is empty."""
        if not (requests >= 0).any():
            return Ranges.empty(len(requests))
        return Ranges(self.starts[requests], np.where(requests < 0, 0, self.lengths[requests]))

    def newest(self, count: int) -> Ranges:
        """Return the last ``count`` positions of each range."""
        lengths = np.minimum(self.lengths, count)
        return Ranges(self.starts + self.lengths - lengths, lengths)

    def positions(self) -> Int[np.ndarray, " positions"]:
        """Return the positions of all ranges, one range after the other."""
        ends = np.cumsum(self.lengths)
        total = int(ends[-1]) if len(ends) else 0
        return np.repeat(self.starts - (ends - self.lengths), self.lengths) + np.arange(total)


def chunks(
    rows: Int[np.ndarray, " elements"],
    most: int,
    spans: Int[np.ndarray, " elements"] | None = None,
) -> Ranges:
    """Cut elements into ranges of one row, of one span and of at most ``most`` elements.

    Args:
        rows: ``[elements]`` row of each element, ascending.
        most: Largest length of a range.
        spans: ``[elements]``, number of the span of time of each element; elements of a row are in
            the order of spans. None: one span.

    Example:
        >>> found = chunks(np.array([0, 0, 0, 2]), 2)
        >>> found.starts.tolist(), found.lengths.tolist()
        ([0, 2, 3], [2, 1, 1])
    """
    place = np.arange(len(rows))
    is_first = changes(rows) if spans is None else changes(rows) | changes(spans)
    within = place - np.maximum.accumulate(np.where(is_first, place, 0))
    starts = np.flatnonzero(within % most == 0)
    return Ranges(starts, np.diff(starts, append=len(rows)))


def changes(values: Num[np.ndarray, " elements"]) -> Bool[np.ndarray, " elements"]:
    """Return whether each element differs from the one before it; the first one does."""
    differs = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=differs[1:])
    return differs
