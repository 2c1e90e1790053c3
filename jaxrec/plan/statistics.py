"""What a sample of batches tells of its features: lengths, repeats, and where the hot rows are."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrec.plan.heat import Heat, SampledHeat
from jaxrec.ragged import KeyedJaggedArray

# Runs of rows that lookups are counted in.
_BINS = 256


@dataclasses.dataclass(frozen=True)
class FeatureStatistics:
    """What was seen of one feature.

    Attributes:
        bags: Bags seen.
        mean_length: Ids of a bag, on average.
        length_deviation: Standard deviation of that number.
        lookups: Ids seen.
        largest_id: The largest of them; -1 if there were none.
        times: How often rows were seen, descending.
        counts: How many rows were seen so often.
        row_bins: Distinct rows in equal runs of ``0 .. largest_id``.
        lookup_bins: Lookups of these.
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
        """Distinct rows seen."""
        return sum(self.counts)

    def heat(self, rows: int) -> Heat:
        """The heat of a table of so many rows under this feature."""
        return SampledHeat(
            rows,
            self.lookups,
            self.times,
            self.counts,
            _over(self.row_bins, self.largest_id + 1, rows),
            _over(self.lookup_bins, self.largest_id + 1, rows),
        )


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What was seen of features, by name; made by `statistics`."""

    features: Mapping[str, FeatureStatistics]

    def __str__(self) -> str:
        lines = [f"{'feature':24} {'ids/bag':>8} {'ids':>12} {'distinct':>12} {'distinct/ids':>12}"]
        lines += [
            f"{name:24} {seen.mean_length:8.2f} {seen.lookups:12,} {seen.distinct:12,} "
            f"{seen.distinct / max(seen.lookups, 1):12.3f}"
            for name, seen in self.features.items()
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The statistics as JSON has them."""
        return {name: dataclasses.asdict(seen) for name, seen in self.features.items()}

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file that `load` reads."""
        pathlib.Path(path).write_text(json.dumps(self.to_dict()) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Statistics:
        """Statistics that were saved.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it holds no statistics.
        """
        try:
            features = json.loads(pathlib.Path(path).read_text())
            return cls({name: _feature(fields) for name, fields in features.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: these are no saved statistics: {error}") from None


def statistics(batches: Iterable[Any]) -> Statistics:
    """What a sample of batches tells of its features, for `Planner(topology, statistics=...)`.

    Give it about as many samples as a step has, better several times as many: repeats within a
    batch are then interpolated, not extrapolated.

    Args:
        batches: Host batches: any pytrees with `KeyedJaggedArray`s in them.

    Raises:
        ValueError: If there is no `KeyedJaggedArray` in them.

    Example:
        >>> import jaxrec
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[3, 5], [], [3]]})
        >>> seen = statistics([batch]).features["user"]
        >>> seen.mean_length, seen.lookups, seen.distinct
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
        {key: _seen(np.concatenate(ids[key]), np.concatenate(lengths[key])) for key in ids}
    )


def _seen(ids: np.ndarray, lengths: np.ndarray) -> FeatureStatistics:
    rows, times = np.unique(ids, return_counts=True)
    how_often, how_many = np.unique(times, return_counts=True)
    span = int(rows[-1]) + 1 if rows.size else 1
    edges = np.linspace(0, span, min(span, _BINS) + 1)
    return FeatureStatistics(
        bags=lengths.size,
        mean_length=float(lengths.mean()) if lengths.size else 0.0,
        length_deviation=float(lengths.std()) if lengths.size else 0.0,
        lookups=int(ids.size),
        largest_id=int(rows[-1]) if rows.size else -1,
        times=tuple(map(int, how_often[::-1])),
        counts=tuple(map(int, how_many[::-1])),
        row_bins=tuple(map(int, np.histogram(rows, edges)[0])),
        lookup_bins=tuple(map(int, np.histogram(rows, edges, weights=times)[0])),
    )


def _feature(fields: Mapping[str, Any]) -> FeatureStatistics:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return FeatureStatistics(**{**fields, **lists})


def _over(bins: tuple[int, ...], span: int, rows: int) -> tuple[float, ...]:
    """Counts in equal runs of ``0 .. span - 1`` as counts in equal runs of a table's rows."""
    cumulative = np.concatenate([[0.0], np.cumsum(bins)])
    at = np.linspace(0, rows, _BINS + 1)
    seen = np.interp(at, np.linspace(0, span, len(bins) + 1), cumulative)
    return tuple(map(float, np.diff(seen)))
