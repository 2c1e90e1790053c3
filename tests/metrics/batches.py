"""Batches of samples for metrics: of two tasks, with ties, and with padding of weight 0."""

from __future__ import annotations

import numpy as np

TASKS = 2


def make(kind, batches, batch, seed=0):
    """``predictions, labels, weights, sessions`` of ``[batches, tasks, batch]``.

    Padding holds NaN, which no metric may see.
    """
    rng = np.random.default_rng(seed)
    shape = (batches, TASKS, batch)
    predictions = (rng.integers(1, 20, shape) / 20).astype(np.float32)
    labels = (rng.random(shape) < 0.2 + 0.5 * predictions).astype(np.float32)
    if kind == "numbers":
        labels = rng.integers(0, 6, shape).astype(np.float32) / 4
    weights = rng.integers(0, 4, shape).astype(np.float32) / 2
    predictions[weights == 0] = np.nan
    labels[weights == 0] = np.nan
    sessions = rng.integers(-1, 5, shape).astype(np.int32)
    return predictions, labels, weights, sessions


def real(columns, task, start, stop):
    """The samples of a task that have a weight, batch by batch, in float64."""
    weights = columns[2]
    batches = []
    for i in range(start, stop):
        kept = weights[i, task] > 0
        batches.append(tuple(x[i, task][kept].astype(np.float64) for x in columns))
    return batches
