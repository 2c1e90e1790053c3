"""How often a table's rows are looked up: how many are distinct, how many a cache holds, and where
in the table they lie.

`EvenHeat` is the guess without statistics, every row as likely as every other: no other
distribution has more distinct rows in a batch. `SampledHeat` is what `jaxrec.plan.statistics` saw.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math

import numpy as np


class Heat(abc.ABC):
    """How lookups fall on the rows of one feature's table."""

    @abc.abstractmethod
    def distinct(self, lookups: float, cached: float = 0.0) -> float:
        """Expected number of distinct rows among that many lookups.

        Args:
            lookups: Number of lookups, 0 or more.
            cached: Part of the rows that are left out, the hottest.
        """

    @abc.abstractmethod
    def shares(self, parts: int, *, of_rows: bool) -> np.ndarray:
        """How lookups spread over ``parts`` equal runs of rows, ``[parts]`` that add up to 1.

        Args:
            parts: Number of runs.
            of_rows: Whether to count each distinct row once, rather than every lookup.
        """


@dataclasses.dataclass(frozen=True)
class EvenHeat(Heat):
    """Every row is as likely as every other.

    Of ``n`` lookups of ``R`` rows, ``R (1 - (1 - 1/R)^n)`` are expected to be distinct.

    Attributes:
        rows: Rows of the table.

    Example:
        >>> round(EvenHeat(rows=1000).distinct(500), 1)
        393.6
    """

    rows: int

    def distinct(self, lookups: float, cached: float = 0.0) -> float:
        if self.rows == 1:
            return min(lookups, 1.0) * (1 - cached)
        return -self.rows * math.expm1(lookups * math.log1p(-1 / self.rows)) * (1 - cached)

    def shares(self, parts: int, *, of_rows: bool) -> np.ndarray:
        return np.full(parts, 1 / parts)


@dataclasses.dataclass(frozen=True)
class SampledHeat(Heat):
    """The heat of a sample of lookups.

    With ``f_k`` rows seen ``k`` times in a sample of ``N`` lookups, a part ``x = n / N`` of it is
    expected to have ``u(x) = sum_k f_k (1 - (1 - x)^k)`` distinct rows (rarefaction: Hurlbert 1971,
    "The nonconcept of species diversity", in its binomial form). Beyond the sample the number goes
    on as ``u(1) x^b`` with the slope ``b = f_1 / u(1)`` that it has at its end (Heaps' law, joined
    to Good's 1953 estimate ``f_1 / N`` of the chance that the next row is new).

    Attributes:
        rows: Rows of the table.
        lookups: Size of the sample.
        times: How often rows were seen, descending.
        counts: How many rows were seen so often.
        row_bins: Distinct rows seen in equal runs of rows, from the first to the last.
        lookup_bins: Lookups of these.

    Example:
        >>> heat = SampledHeat(100, 6, times=(4, 1), counts=(1, 2), row_bins=(3,), lookup_bins=(6,))
        >>> heat.distinct(6), round(heat.distinct(3), 3)
        (3.0, 1.938)
    """

    rows: int
    lookups: int
    times: tuple[int, ...]
    counts: tuple[int, ...]
    row_bins: tuple[float, ...]
    lookup_bins: tuple[float, ...]

    @functools.cached_property
    def _seen(self) -> int:
        return sum(self.counts)

    def distinct(self, lookups: float, cached: float = 0.0) -> float:
        if not self.lookups:
            return EvenHeat(self.rows).distinct(lookups, cached)
        times, counts = np.array(self.times, float), np.array(self.counts, float)
        # The hottest rows, by how often they were seen, are the first to be cached.
        held = cached * self.rows
        before = np.concatenate([[0.0], np.cumsum(counts)[:-1]])
        counts = np.clip(counts - np.maximum(held - before, 0), 0, counts)
        part = lookups / self.lookups
        seen = float((counts * (1 - np.maximum(1 - min(part, 1.0), 0) ** times)).sum())
        if part > 1 and seen > 0:
            once = float(counts[times == 1].sum())
            seen *= part ** (once / seen)
        unseen = max(held - self._seen, 0) / max(self.rows - self._seen, 1)
        if part > 1 and held > self._seen:
            # All that was seen is cached, and a part of what was not.
            seen = (self.distinct(lookups) - self._seen) * (1 - unseen)
        return min(seen, self.rows * (1 - cached), lookups)

    def shares(self, parts: int, *, of_rows: bool) -> np.ndarray:
        bins = np.array(self.row_bins if of_rows else self.lookup_bins, float)
        if not bins.sum():
            return np.full(parts, 1 / parts)
        cumulative = np.concatenate([[0.0], np.cumsum(bins)]) / bins.sum()
        at = np.linspace(0, 1, parts + 1)
        return np.diff(np.interp(at, np.linspace(0, 1, bins.size + 1), cumulative))
