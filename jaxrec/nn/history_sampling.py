"""Stochastic length: training on a random part of each long history."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrec.ragged import JaggedArray, KeyedJaggedArray
from jaxrec.ragged.capacity import capacity_for


def stochastic_length(
    features: KeyedJaggedArray,
    keys: Sequence[str],
    *,
    max_length: int,
    alpha: float,
    rng: np.random.Generator,
    capacity: int | None = None,
) -> KeyedJaggedArray:
    """Keep a random part of most long histories of a batch on the host.

    Zhai et al. 2024 (arXiv:2402.17152), equation 4. With ``N = max_length`` and
    ``short = N ** (alpha / 2)``, a history of ``n`` events stays whole if ``n <= short``, and with
    probability ``N ** alpha / n ** 2`` if it is longer. Otherwise ``short`` of its events, drawn at
    random, stay in their order. Attention's expected work then grows with ``n * N ** alpha``, not
    with ``n ** 2``.

    Args:
        features: The batch, in NumPy arrays.
        keys: The features of the history, all of one length in each row: items, times, actions.
        max_length: ``N``, the length of the longest history.
        alpha: From 1 (the shortest rows) to 2 (all rows whole).
        rng: Draws the rows that are cut, and the events that stay.
        capacity: Capacity of the cut features. None: `jaxrec.ragged` chooses from its ladder.

    Returns:
        The batch, whose other features are as they were.

    Raises:
        TypeError: The batch is not in NumPy arrays.
        ValueError: ``alpha`` is not from 1 to 2, ``max_length`` below 1, the keys differ in their
            lengths or these do not fit the batch, or the capacity is too small.
        KeyError: The batch lacks a key.

    Example:
        >>> batch = KeyedJaggedArray.from_lists({"history": [list(range(100)), [7]]})
        >>> short = stochastic_length(batch, ["history"], max_length=100, alpha=1.0,
        ...                           rng=np.random.default_rng(1))
        >>> short["history"].lengths.tolist()
        [10, 1]
    """
    if not 1 <= alpha <= 2 or max_length < 1:
        raise ValueError(
            f"alpha is from 1 to 2 and max_length 1 or more; got {alpha} and {max_length}"
        )
    if not isinstance(features.values, np.ndarray) or not isinstance(features.lengths, np.ndarray):
        raise TypeError(
            "stochastic_length works on the host, before a batch is put on a device; got "
            f"{type(features.values).__name__}"
        )
    columns = features.to_dict()
    if missing := [key for key in keys if key not in columns]:
        raise KeyError(f"the batch lacks {missing}; it has {list(features.keys)}")
    if not keys:
        raise ValueError("keys name one feature of the history or more")
    lengths = columns[keys[0]].lengths
    for key in keys:
        if not np.array_equal(columns[key].lengths, lengths):
            raise ValueError(f"{keys[0]!r} and {key!r} differ in the lengths of their rows")
    if lengths.ndim != 1 or lengths.min(initial=0) < 0 or lengths.sum() > columns[keys[0]].capacity:
        raise ValueError(
            f"the batch has one length of 0 or more for each row, and no more events than its "
            f"capacity, {columns[keys[0]].capacity}; {keys[0]!r} has the lengths {lengths}"
        )
    rows = np.repeat(np.arange(len(lengths)), lengths)
    keep = _kept_events(np.asarray(lengths), rows, max_length, alpha, rng)
    kept_lengths = np.bincount(rows[keep], minlength=len(lengths)).astype(np.int32)
    size = capacity_for(int(keep.sum())) if capacity is None else capacity
    if keep.sum() > size:
        raise ValueError(f"{int(keep.sum())} events stay, but the capacity is {size}")
    for key in dict.fromkeys(keys):
        column = columns[key]

        def cut(values: np.ndarray) -> np.ndarray:
            kept = values[: len(keep)][keep]
            return np.pad(kept, (0, size - len(kept)))

        weights = None if column.weights is None else cut(np.asarray(column.weights))
        columns[key] = JaggedArray(cut(np.asarray(column.values)), kept_lengths, weights)
    return KeyedJaggedArray.from_dict(columns)


def _kept_events(
    lengths: np.ndarray, rows: np.ndarray, max_length: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Return which events stay, ``[events]``; ``rows`` is the row of each event."""
    short = max(1, int(max_length ** (alpha / 2)))
    whole = rng.random(len(lengths)) < max_length**alpha / np.maximum(lengths, 1) ** 2.0
    # The events of a row with the smallest random numbers stay: ranked by row, then by number.
    order = np.lexsort((rng.random(len(rows)), rows))
    starts = np.cumsum([0, *lengths])[:-1]
    rank = np.empty(len(rows), np.int64)
    rank[order] = np.arange(len(rows)) - starts[rows]
    return (rank < short) | (whole | (lengths <= short))[rows]
