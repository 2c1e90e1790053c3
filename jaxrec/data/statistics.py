"""Statistics of columns: moments of numbers, lengths of lists, and capacities made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxrec.ragged.capacity import LengthMoments, capacity_for


@dataclasses.dataclass(frozen=True)
class Moments:
    """Count, mean, sum of squared differences from the mean, and smallest of a set of numbers.

    ``smallest`` is None for an empty set, and for moments that earlier versions saved.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    smallest: float | None = None

    @property
    def scale(self) -> float:
        """Standard deviation; 1 if all numbers are equal."""
        return (self.squares / self.count) ** 0.5 if self.squares > 0 else 1.0

    @classmethod
    def of(cls, values: Float[np.ndarray, " values"]) -> Moments:
        if not values.size:
            return cls()
        mean = float(values.mean())
        smallest = float(values.min())
        return cls(values.size, mean, float(np.square(values - mean).sum()), smallest)

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of the union of two sets of numbers (Chan, Golub and LeVeque 1983,
        "Algorithms for computing the sample variance", equation 2.1)."""
        # Sums of squares of large numbers, such as timestamps, would cancel to noise.
        count = self.count + other.count
        if not count:
            return self
        apart, share = other.mean - self.mean, other.count / count
        squares = self.squares + other.squares + apart**2 * self.count * share
        known = [each.smallest for each in (self, other) if each.smallest is not None]
        return Moments(count, self.mean + apart * share, squares, min(known, default=None))


@dataclasses.dataclass(frozen=True, eq=False)
class ListLengths:
    """Histogram of the lengths of a column's lists.

    Attributes:
        lengths: ``[distinct]`` int64 lengths, ascending.
        counts: ``[distinct]`` int64, number of lists of each length.

    Example:
        >>> seen = ListLengths.of(np.array([1, 3, 1, 2])) + ListLengths.of(np.array([9]))
        >>> seen.most(2), seen.usual(2)
        (12, 24)
    """

    lengths: Int[np.ndarray, " distinct"]
    counts: Int[np.ndarray, " distinct"]

    @classmethod
    def of(cls, lengths: Int[np.ndarray, " lists"]) -> ListLengths:
        """Count the lengths of lists."""
        return cls(*np.unique(lengths, return_counts=True))

    def __add__(self, other: ListLengths) -> ListLengths:
        lengths, places = np.unique(
            np.concatenate([self.lengths, other.lengths]), return_inverse=True
        )
        counts = np.bincount(places, np.concatenate([self.counts, other.counts]))
        return ListLengths(lengths, counts.astype(np.int64))

    def usual(self, samples: int) -> int:
        """Return a capacity for nearly every batch: the mean and four standard deviations."""
        # The ids of a batch are a sum over its samples, and so nearly normal: one batch in 30,000
        # has more.
        total = max(int(self.counts.sum()), 1)
        mean = float(self.lengths @ self.counts) / total
        variance = float((self.lengths - mean) ** 2 @ self.counts) / total
        return capacity_for(int(samples * mean + 4 * (samples * variance) ** 0.5))

    def most(self, samples: int) -> int:
        """Return a capacity for every batch: the total length of the ``samples`` longest lists."""
        taken = np.minimum(np.cumsum(self.counts[::-1]), samples)
        return capacity_for(int(np.diff(taken, prepend=0) @ self.lengths[::-1]))

    def moments(self) -> LengthMoments:
        """Return the moments of the lengths, as `jaxrec.Packer` takes them."""
        return LengthMoments.of(self.lengths, self.counts)


def usual_capacity(lengths: Sequence[int] | np.ndarray, batch_size: int) -> int:
    """Return a capacity for nearly every batch: the mean and four standard deviations.

    Args:
        lengths: Number of ids of each sample of the data.
        batch_size: Number of samples of a batch.

    Example:
        >>> usual_capacity([1, 1, 3, 3], batch_size=100)
        240
    """
    return int(batch_size * np.mean(lengths) + 4 * batch_size**0.5 * np.std(lengths))
