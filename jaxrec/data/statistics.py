"""Statistics of columns: moments of numbers, lengths of lists, and capacities made of them."""

from __future__ import annotations

import dataclasses
import math
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


# Sums count in units of 2**-_SHIFT, squares in units of 2**(-2 * _SHIFT); smaller parts of a number
# are rounded off.
_SHIFT = 1000

# Bits of a digit of a number, and numbers whose digits are multiplied and added at once. A digit is
# at most 2**19, so that 2**13 products stay below 2**53: float64 adds them without rounding.
_DIGIT_BITS, _BLOCK = 20, 1 << 13


@dataclasses.dataclass(frozen=True)
class NumberSums:
    """Exact sums of a set of numbers and of their squares, and the smallest number.

    Floating-point sums depend on the order of the numbers. These are integers, so that any order
    and any grouping of the numbers gives the same bits.

    Attributes:
        count: Number of numbers.
        total: Sum of the numbers, times ``2**1000``.
        squares: Sum of their squares, times ``2**2000``.
        smallest: The smallest number; None if there is none.

    Example:
        >>> values = np.array([1e16, 1.0, -1e16, 3.0])
        >>> parts = NumberSums.of(values[:1]) + NumberSums.of(values[1:])
        >>> parts == NumberSums.of(values), parts.moments().mean
        (True, 1.0)
    """

    count: int = 0
    total: int = 0
    squares: int = 0
    smallest: float | None = None

    @classmethod
    def of(cls, values: Float[np.ndarray, " values"]) -> NumberSums:
        """Add up finite numbers."""
        total = squares = 0
        for start in range(0, values.size, _BLOCK):
            digits, exponents = _digits(values[start : start + _BLOCK])
            # Row 0 holds ones: its products are the sums of the digits.
            products = (digits @ digits.T).tolist()
            for row, high in enumerate(exponents):
                total += int(products[0][row + 1]) << (high + _SHIFT)
                for column, low in enumerate(exponents):
                    squares += int(products[row + 1][column + 1]) << (high + low + 2 * _SHIFT)
        smallest = float(values.min()) if values.size else None
        return cls(values.size, total, squares, smallest)

    def __add__(self, other: NumberSums) -> NumberSums:
        known = [each.smallest for each in (self, other) if each.smallest is not None]
        return NumberSums(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            min(known, default=None),
        )

    def moments(self) -> Moments:
        """Return the mean and the sum of squared differences from it, each rounded once."""
        if not self.count:
            return Moments()
        differences = self.squares * self.count - self.total**2
        try:
            squares = differences / (self.count << 2 * _SHIFT)
        except OverflowError:  # Python's integers are larger than any float
            squares = math.inf
        return Moments(self.count, self.total / (self.count << _SHIFT), squares, self.smallest)


def _digits(values: Float[np.ndarray, " values"]) -> tuple[np.ndarray, list[int]]:
    """Cut numbers into digits of 20 bits: integers as float64, ``[1 + digits, values]``.

    Row 0 is 1. The digits times ``2**exponent`` add up to the numbers.
    """
    # Only the digits that some number has are made: mostly four or five.
    rest, digits, exponents = values.astype(np.float64), [np.ones(values.size)], []
    while (largest := float(np.abs(rest).max(initial=0))) >= 2.0 ** -(_SHIFT + 1):
        fraction, power = math.frexp(largest)
        power -= fraction == 0.5  # now largest <= 2**power
        # Exponents are multiples of 20. The largest digit is at most 2**19.
        exponent = max(-(-(power - _DIGIT_BITS + 1) // _DIGIT_BITS) * _DIGIT_BITS, -_SHIFT)
        digit = np.rint(rest * 2.0**-exponent)
        if power > 1023:
            # Halves, since the digit may round up to 2**1024, which no float64 is.
            rest = (rest / 2 - digit * 2.0 ** (exponent - 1)) * 2
        else:
            rest -= digit * 2.0**exponent
        digits.append(digit)
        exponents.append(exponent)
        if exponent == -_SHIFT:
            break
    return np.stack(digits), exponents


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
        # Counting is faster than sorting, unless there is a list beside which the others are few.
        if lengths.size and lengths.max() <= 8 * lengths.size:
            counts = np.bincount(lengths)
            distinct = np.flatnonzero(counts)
            return cls(distinct, counts[distinct])
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
