"""Rows dealt to devices so that all have equal work: for sequences, whose lengths differ much."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike


def sequence_work(
    lengths: ArrayLike,
    *,
    attention_dim: int,
    dense_flops: float,
    num_targets: ArrayLike | None = None,
) -> Float[np.ndarray, " rows"]:
    """Return the floating-point operations of each row in a layer of causal attention.

    A row of ``n`` tokens has ``n * (n + 1) / 2`` visible pairs of query and key. Each pair takes
    ``4 * attention_dim`` operations: a product of query and key, and one with the value. The dense
    part takes ``dense_flops`` a token. Forward and backward differ by a factor alone, which does
    not change what is balanced.

    Args:
        lengths: ``[rows]`` number of tokens of each row, 0 or more.
        attention_dim: Columns of the queries of all heads together.
        dense_flops: Operations of the layer's matrix products for one token, such as
            ``2 * parameters``.
        num_targets: ``[rows]`` number of targets among the tokens, which do not see each other;
            None: none.

    Raises:
        ValueError: A length is negative, or a row has more targets than tokens.

    Example:
        >>> sequence_work([0, 1, 10], attention_dim=2, dense_flops=100).tolist()
        [0.0, 108.0, 1440.0]
    """
    tokens = np.asarray(lengths, np.float64)
    if tokens.size and tokens.min() < 0:
        raise ValueError(f"a row has {int(tokens.min())} tokens; lengths are 0 or more")
    pairs = tokens * (tokens + 1) / 2
    if num_targets is not None:
        targets = np.asarray(num_targets, np.float64)
        if targets.shape != tokens.shape or (targets < 0).any() or (targets > tokens).any():
            raise ValueError("num_targets are a number for each row, from 0 to the row's tokens")
        pairs = pairs - targets * (targets - 1) / 2
    return pairs * 4 * attention_dim + tokens * dense_flops


def balanced_order(
    work: ArrayLike, devices: int, *, steps: int = 1
) -> Int[np.ndarray, "steps devices rows_each"]:
    """Deal the rows of one or several global batches to devices, so that all have equal work.

    All devices wait for the slowest one at the end of each step. With lengths as users have them
    (a power law), the slowest of eight devices has much more work than the mean; dealt by this
    function it has a few percent more. Each device gets equally many rows, since shapes are static.

    The rows are dealt in rounds. A round gives each part one row, the longest rows first, and the
    longest row of a round to the part with the least work so far. With several steps the parts
    with the most work come together in one step, so that a row too long to be balanced delays one
    step alone.

    Args:
        work: ``[rows]`` work of each row, in any unit, such as `sequence_work`.
        devices: Number of devices.
        steps: Number of steps whose rows are dealt together. More rows balance better. The samples
            of a step are then other ones, so use it where the order of samples is random anyway.

    Returns:
        ``[steps, devices, rows / (steps * devices)]`` int64, the row numbers of each device in each
        step: each row number once. ``order[step].ravel()`` is the order in which
        `jaxrec.mesh.shard_batch` expects the rows of a step. The order depends on ``work`` alone.

    Raises:
        ValueError: ``work`` is not one finite number of 0 or more for each row, or the rows do not
            divide evenly among devices and steps.

    Example:
        >>> balanced_order([9, 1, 2, 8, 7, 3], devices=3).tolist()
        [[[0, 1], [3, 2], [4, 5]]]
    """
    amounts = np.asarray(work, np.float64)
    if devices < 1 or steps < 1:
        raise ValueError(f"devices and steps are 1 or more, got {devices} and {steps}")
    if amounts.ndim != 1 or not np.isfinite(amounts).all() or (amounts < 0).any():
        raise ValueError(
            f"work has one finite number of 0 or more for each row, got shape {amounts.shape}"
            + (f" with numbers from {amounts.min()} to {amounts.max()}" if amounts.size else "")
        )
    parts = devices * steps
    if amounts.size % parts:
        raise ValueError(
            f"{amounts.size} rows do not divide evenly among {devices} devices in {steps} steps; "
            f"take a multiple of {parts} rows"
        )
    # Stable sorts, so that all processes and a resumed run deal equal rows the same way.
    rounds = np.argsort(-amounts, kind="stable").reshape(-1, parts)
    totals = np.zeros(parts)
    dealt = np.empty_like(rounds)
    for number, rows in enumerate(rounds):
        lightest_first = np.argsort(totals, kind="stable")
        dealt[number, lightest_first] = rows
        totals[lightest_first] += amounts[rows]
    heaviest_first = np.argsort(-totals, kind="stable")
    return dealt.T[heaviest_first].reshape(steps, devices, len(rounds))


def imbalance(work: ArrayLike, order: Int[np.ndarray, "steps devices rows_each"]) -> float:
    """Return the time that devices take, as a multiple of that with equal work; 1 is the best.

    The work of the slowest device of each step, summed over steps, divided by the mean work of a
    device. NumPy's ``np.arange(rows).reshape(1, devices, -1)`` is the order of rows as they come.

    Example:
        >>> order = np.arange(4).reshape(1, 2, 2)
        >>> imbalance([3, 3, 1, 1], order), imbalance([3, 3, 1, 1], order.swapaxes(1, 2))
        (1.5, 1.0)
    """
    totals = np.asarray(work, np.float64)[order].sum(axis=-1)
    mean = totals.mean(axis=-1).sum()
    return float(totals.max(axis=-1).sum() / mean) if mean else 1.0
