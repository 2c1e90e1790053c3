"""Statistics of the features in a sample of batches: lengths, repeats, and the heat of rows."""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrec.ragged import KeyedJaggedArray


class Heat(abc.ABC):
    """Distribution of one feature's lookups over the rows of its table."""

    @abc.abstractmethod
    def distinct(self, lookups: float) -> float:
        """Return the expected number of distinct rows among ``lookups`` lookups, 0 or more."""

    @abc.abstractmethod
    def shares(self, sizes: np.ndarray, *, of_rows: bool) -> np.ndarray:
        """Return the share of the lookups in each run of rows, ``[runs]``.

        ``sizes`` are the relative sizes of the runs that the table is cut into. With ``of_rows``,
        each distinct row counts once instead of once per lookup.
        """


@dataclasses.dataclass(frozen=True)
class EvenHeat(Heat):
    """Heat where each of ``rows`` rows is as likely as every other.

    The expected number of distinct rows among ``n`` lookups is ``rows (1 - (1 - 1/rows)^n)``.
    """

    rows: int

    def distinct(self, lookups: float) -> float:
        if self.rows == 1:
            return min(lookups, 1.0)
        # With expm1 and log1p, since ``1 - 1/R`` loses the digits of ``1/R`` for large tables.
        return -self.rows * math.expm1(lookups * math.log1p(-1 / self.rows))

    def shares(self, sizes: np.ndarray, *, of_rows: bool) -> np.ndarray:
        return sizes / sizes.sum()


@dataclasses.dataclass(frozen=True)
class SampledHeat(Heat):
    """Heat from a sample of lookups.

    With ``f_k`` rows seen ``k`` times in a sample, a fraction ``x`` of the sample is expected to
    have ``u(x) = sum_k f_k (1 - (1 - x)^k)`` distinct rows (rarefaction: Hurlbert 1971, "The
    nonconcept of species diversity", in its binomial form). Beyond the sample, ``u(1) x^b``
    continues it with its final slope ``b = f_1 / u(1)``. This is Heaps' law, joined to the estimate
    by Good (1953) of the chance that the next row is new: ``f_1`` over the size of the sample.

    Attributes:
        rows: Rows of the table.
        lookups: Size of the sample.
        times: Numbers of times that a row was seen, descending.
        counts: Number of rows seen that many times.
        row_bins: Number of distinct rows in each of the equal runs that the table's rows are cut
            into.
        lookup_bins: Number of lookups in each of these runs.
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
        # A feature that the sample lacks says nothing; every row may be as likely as every other.
        if not self.lookups:
            return EvenHeat(self.rows).distinct(lookups)
        times, counts = self._times_and_counts
        ratio = lookups / self.lookups
        distinct = float((counts * (1 - np.maximum(1 - min(ratio, 1.0), 0) ** times)).sum())
        if ratio > 1 and distinct > 0:
            once = float(counts[times == 1].sum())
            distinct *= ratio ** (once / distinct)
        # The power law knows neither the size of the table nor that a lookup finds one row at most.
        return min(distinct, self.rows, lookups)

    def shares(self, sizes: np.ndarray, *, of_rows: bool) -> np.ndarray:
        bins = np.array(self.row_bins if of_rows else self.lookup_bins, float)
        if not bins.sum():
            return sizes / sizes.sum()
        cumulative = np.concatenate([[0.0], np.cumsum(bins)]) / bins.sum()
        at = np.concatenate([[0.0], np.cumsum(sizes)]) / sizes.sum()
        return np.diff(np.interp(at, np.linspace(0, 1, bins.size + 1), cumulative))


# Number of runs of rows that lookups are counted in. Shares of narrower parts are interpolated.
_BINS = 256


@dataclasses.dataclass(frozen=True)
class FeatureStatistics:
    """Statistics of one feature in a sample of batches.

    Attributes:
        bags: Number of bags.
        mean_length: Mean number of ids in a bag.
        length_deviation: Standard deviation of that number.
        lookups: Number of ids.
        largest_id: Largest id; -1 without ids.
        times: Distinct numbers of lookups of a row, descending. Four rows looked up 5, 1, 1 and 1
            times give ``(5, 1)``.
        counts: Number of rows for each of `times`; in the example ``(1, 3)``.
        row_bins: Number of distinct rows in each of equal runs of ``0 .. largest_id``.
        lookup_bins: Number of lookups in each of these runs.
    """

    bags: int
    mean_length: float
    length_deviation: float
    lookups: int
    largest_id: int
    times: tuple[int, ...]
    counts: tuple[int, ...]
    row_bins: tuple[int, ...]
    lookup_bins: tuple[int, ...]

    @property
    def distinct(self) -> int:
        """Number of distinct rows."""
        return sum(self.counts)

    def heat(self, rows: int) -> Heat:
        """Return the distribution of this feature's lookups over a table of ``rows`` rows."""
        return SampledHeat(
            rows,
            self.lookups,
            self.times,
            self.counts,
            _rebin(self.row_bins, self.largest_id + 1, rows),
            _rebin(self.lookup_bins, self.largest_id + 1, rows),
        )


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of features, by name; made by `sample_statistics`."""

    features: Mapping[str, FeatureStatistics]

    def __str__(self) -> str:
        lines = [f"{'feature':24} {'ids/bag':>8} {'ids':>12} {'distinct':>12} {'distinct/ids':>12}"]
        lines += [
            f"{name:24} {f.mean_length:8.2f} {f.lookups:12,} {f.distinct:12,} "
            f"{f.distinct / max(f.lookups, 1):12.3f}"
            for name, f in self.features.items()
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as a dictionary for JSON."""
        return {name: dataclasses.asdict(feature) for name, feature in self.features.items()}

    def save(self, path: str | os.PathLike) -> None:
        """Write a JSON file that `load` reads."""
        pathlib.Path(path).write_text(json.dumps(self.to_dict()) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Statistics:
        """Read statistics that were saved.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it holds no statistics.
        """
        try:
            features = json.loads(pathlib.Path(path).read_text())
            return cls({name: _feature(fields) for name, fields in features.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: these are not saved statistics: {error}") from None


def sample_statistics(batches: Iterable[Any]) -> Statistics:
    """Count lengths, repeats and hot rows in batches, for `Planner(topology, statistics=...)`.

    The batches should have at least the samples of a step, better several times as many: the
    number of repeats within a batch is then interpolated, not extrapolated.

    Args:
        batches: Host batches: pytrees that contain `KeyedJaggedArray`s.

    Raises:
        ValueError: If they contain none.

    Example:
        >>> import jaxrec
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[3, 5], [], [3]]})
        >>> user = sample_statistics([batch]).features["user"]
        >>> user.mean_length, user.lookups, user.distinct
        (1.0, 3, 2)
    """
    ids: dict[str, list[np.ndarray]] = {}
    lengths: dict[str, list[np.ndarray]] = {}
    for batch in batches:
        leaves = jax.tree.leaves(batch, is_leaf=lambda x: isinstance(x, KeyedJaggedArray))
        for leaf in leaves:
            if not isinstance(leaf, KeyedJaggedArray):
                continue
            for key in leaf.keys:
                column = leaf[key]
                length = np.asarray(column.lengths)
                lengths.setdefault(key, []).append(length)
                ids.setdefault(key, []).append(np.asarray(column.values)[: length.sum()])
    if not ids:
        raise ValueError("statistics are taken from batches with KeyedJaggedArrays; got none")
    return Statistics(
        {key: _count(np.concatenate(ids[key]), np.concatenate(lengths[key])) for key in ids}
    )


def _count(ids: np.ndarray, lengths: np.ndarray) -> FeatureStatistics:
    # Rows by how often they were seen, not by row: a few hundred numbers hold the whole
    # distribution, whatever the size of the table.
    rows, times = np.unique(ids, return_counts=True)
    repeats, counts = np.unique(times, return_counts=True)
    span = int(rows[-1]) + 1 if rows.size else 1
    edges = np.linspace(0, span, min(span, _BINS) + 1)
    return FeatureStatistics(
        bags=lengths.size,
        mean_length=float(lengths.mean()) if lengths.size else 0.0,
        length_deviation=float(lengths.std()) if lengths.size else 0.0,
        lookups=int(ids.size),
        largest_id=int(rows[-1]) if rows.size else -1,
        times=tuple(map(int, repeats[::-1])),
        counts=tuple(map(int, counts[::-1])),
        row_bins=tuple(map(int, np.histogram(rows, edges)[0])),
        lookup_bins=tuple(map(int, np.histogram(rows, edges, weights=times)[0])),
    )


def _feature(fields: Mapping[str, Any]) -> FeatureStatistics:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return FeatureStatistics(**{**fields, **lists})


def _rebin(bins: tuple[int, ...], span: int, rows: int) -> tuple[float, ...]:
    """Convert counts in equal runs of ``0 .. span - 1`` to counts in runs of a table's rows."""
    # The sample knows ids up to its largest only. Rows beyond it get none, and runs that straddle
    # an edge share by length.
    cumulative = np.concatenate([[0.0], np.cumsum(bins)])
    at = np.linspace(0, rows, _BINS + 1)
    edges = np.linspace(0, span, len(bins) + 1)
    return tuple(map(float, np.diff(np.interp(at, edges, cumulative))))
