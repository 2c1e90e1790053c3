"""Calibration of a model on held-out rows, and the importance of its columns."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from jaxrec.train.row_sample import RowSample

# Number of groups of rows by their predictions.
GROUPS = 10

# Largest number of rows that are predicted for the importance of all columns together.
MAX_ROWS = 1 << 20


def sample_size(rows: int, columns: int) -> int:
    """Return how many of ``rows`` rows to sample if each of ``columns`` columns is shuffled once.

    Example:
        >>> sample_size(10_000, 40), sample_size(10_000, 1000)
        (10000, 1047)
    """
    return min(rows, MAX_ROWS // (columns + 1))


def deciles(
    predictions: Float[np.ndarray, " rows"],
    labels: Float[np.ndarray, " rows"],
    weights: Float[np.ndarray, " rows"],
) -> list[dict[str, float]]:
    """Return the mean prediction and the mean label of ten groups of rows, by their predictions.

    The groups have equal weights, as far as rows can be divided; the first has the smallest
    predictions. Groups without rows are left out.

    Example:
        >>> rows = np.arange(20.0)
        >>> deciles(rows, rows + 1, np.ones(20))[0]
        {'rows': 2, 'predicted': 0.5, 'observed': 1.5}
    """
    order = np.argsort(predictions, kind="stable")
    predictions, labels, weights = (x[order].astype(float) for x in (predictions, labels, weights))
    # The middle of each row's share of the weights says to which group it belongs.
    middles = (np.cumsum(weights) - weights / 2) / max(weights.sum(), np.finfo(float).tiny)
    group = np.minimum((GROUPS * middles).astype(int), GROUPS - 1)
    means = []
    for number in range(GROUPS):
        is_own = (group == number) & (weights > 0)
        if is_own.any():
            own = weights[is_own]
            pair = (np.average(x[is_own], weights=own) for x in (predictions, labels))
            predicted, observed = map(float, pair)
            count = int(is_own.sum())
            means.append({"rows": count, "predicted": predicted, "observed": observed})
    return means


@dataclasses.dataclass(frozen=True)
class Importance:
    """Worsening of values if the values of one column are shuffled over the rows.

    A column that the model does not use has 0. Columns with the same information share their
    importance, since the model still has the others (permutation importance: Breiman 2001, "Random
    Forests", section 10; Fisher et al. 2019, arXiv:1801.01489).

    Attributes:
        value: Name of the value by which the columns are sorted.
        rows: Number of rows of all processes.
        seed: Seed of the orders.
        seconds: Seconds that it took.
        columns: Worsening of each value by column, the most important column first: above 0 if the
            value is worse without the column.
    """

    value: str
    rows: int
    seed: int
    seconds: float
    columns: Mapping[str, Mapping[str, float]]


def column_importance(
    sample: RowSample,
    columns: Sequence[str],
    evaluate: Callable[[RowSample], Mapping[str, float]],
    best: Mapping[str, Literal["max", "min"]],
    *,
    value: str,
    rows: int,
    seed: int,
) -> Importance:
    """Evaluate a sample once for each column, with its values in a random order.

    Args:
        sample: Rows of this process.
        columns: The columns to shuffle.
        evaluate: Function that returns a model's values on rows; all processes call it together.
        best: Whether the largest or the smallest one is the best, for each value of interest.
        value: Name of the value to sort by.
        rows: Number of rows of all processes.
        seed: Seed of the orders, one for each column.
    """
    begun = time.perf_counter()
    signs = {name: 1 if end == "min" else -1 for name, end in best.items()}
    before = evaluate(sample)
    worse: dict[str, dict[str, float]] = {}
    for number, column in enumerate(columns):
        order = np.random.default_rng([seed, number]).permutation(len(sample))
        after = evaluate(sample.shuffled(column, order))
        worse[column] = {name: sign * (after[name] - before[name]) for name, sign in signs.items()}
    ordered = sorted(worse, key=lambda column: _finite(worse[column][value]), reverse=True)
    seconds = round(time.perf_counter() - begun, 3)
    return Importance(value, rows, seed, seconds, {column: worse[column] for column in ordered})


def _finite(value: float) -> float:
    return value if np.isfinite(value) else -np.inf


def as_results(
    groups: Mapping[str, list[dict[str, float]]], importance: Importance
) -> dict[str, Any]:
    """Return the entries of ``results.json``."""
    calibration = {"calibration_deciles": dict(groups)} if groups else {}
    return {**calibration, "importance": dataclasses.asdict(importance)}
