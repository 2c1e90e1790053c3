"""The heat of a table: how lookups are distributed over its rows.

`EvenHeat`, every row as likely as every other, is the guess without statistics: no other
distribution has more distinct rows in a batch. `SampledHeat` is from `jaxrec.plan.statistics`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math

import numpy as np


class Heat(abc.ABC):
    """Distribution of one feature's lookups over the rows of its table."""

    @abc.abstractmethod
    def distinct(self, lookups: float) -> float:
        """Return the expected number of distinct rows among some lookups, 0 or more."""

    @abc.abstractmethod
    def shares(self, sizes: np.ndarray, *, of_rows: bool) -> np.ndarray:
        """Return the shares of runs of rows in the lookups, ``[runs]``.

        Args:
            sizes: Relative size of each of the runs that the table is cut into, ``[runs]``.
            of_rows: Whether to count each distinct row once instead of every lookup.
        """


@dataclasses.dataclass(frozen=True)
class EvenHeat(Heat):
    """Every row is as likely as every other.

    The expected number of distinct rows among ``n`` lookups of ``R`` is ``R (1 - (1 - 1/R)^n)``.

    Attributes:
        rows: Rows of the table.
    """

    rows: int

    def distinct(self, lookups: float) -> float:
        if self.rows == 1:
            return min(lookups, 1.0)
        return -self.rows * math.expm1(lookups * math.log1p(-1 / self.rows))

    def shares(self, sizes: np.ndarray, *, of_rows: bool) -> np.ndarray:
        return sizes / sizes.sum()


@dataclasses.dataclass(frozen=True)
class SampledHeat(Heat):
    """Heat from a sample of lookups.

    With ``f_k`` rows seen ``k`` times in a sample of ``N`` lookups, a part ``x = n / N`` of it is
    expected to have ``u(x) = sum_k f_k (1 - (1 - x)^k)`` distinct rows (rarefaction: Hurlbert 1971,
    "The nonconcept of species diversity", in its binomial form). Beyond the sample, ``u(1) x^b``
    continues it with its final slope ``b = f_1 / u(1)`` (Heaps' law, joined to Good's 1953 estimate
    ``f_1 / N`` of the chance that the next row is new).

    Attributes:
        rows: Rows of the table.
        lookups: Size of the sample.
        times: Numbers of times that a row was seen, descending.
        counts: Number of rows seen that many times.
        row_bins: Distinct rows seen in each of equal runs of the table's rows.
        lookup_bins: Lookups in each.
    """

    rows: int
    lookups: int
    times: tuple[int, ...]
    counts: tuple[int, ...]
    row_bins: tuple[float, ...]
    lookup_bins: tuple[float, ...]

    @functools.cached_property
    def _times_and_counts(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.times, float), np.array(self.counts, float)

    def distinct(self, lookups: float) -> float:
        if not self.lookups:
            return EvenHeat(self.rows).distinct(lookups)
        times, counts = self._times_and_counts
        ratio = lookups / self.lookups
        distinct = float((counts * (1 - np.maximum(1 - min(ratio, 1.0), 0) ** times)).sum())
        if ratio > 1 and distinct > 0:
            once = float(counts[times == 1].sum())
            distinct *= ratio ** (once / distinct)
        return min(distinct, self.rows, lookups)

    def shares(self, sizes: np.ndarray, *, of_rows: bool) -> np.ndarray:
        bins = np.array(self.row_bins if of_rows else self.lookup_bins, float)
        if not bins.sum():
            return sizes / sizes.sum()
        cumulative = np.concatenate([[0.0], np.cumsum(bins)]) / bins.sum()
        at = np.concatenate([[0.0], np.cumsum(sizes)]) / sizes.sum()
        return np.diff(np.interp(at, np.linspace(0, 1, bins.size + 1), cumulative))
