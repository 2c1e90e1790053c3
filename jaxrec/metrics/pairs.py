"""Pairs of samples that predictions put in the same order as labels do, in n log n."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Shaped

# The same code runs within a compiled step (jax.numpy, float32) and on the host (NumPy, float64).
AnyArray = Shaped[jax.Array | np.ndarray, " samples"]


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """Weights of unordered pairs of samples; the weight of a pair is the product of its two.

    Attributes:
        concordant: Both differ, and the higher prediction has the higher label.
        tied_predictions: Predictions are equal and labels differ.
        tied_both: Predictions are equal and so are labels.
        tied_labels: Labels are equal.
        total: All pairs.
    """

    concordant: Any
    tied_predictions: Any
    tied_both: Any
    tied_labels: Any
    total: Any

    @property
    def discordant(self) -> Any:
        """Both differ, and the higher prediction has the lower label."""
        return self.total - self.tied_labels - self.tied_predictions - self.concordant


def count_pairs(
    predictions: AnyArray, labels: AnyArray, weights: AnyArray, xp: ModuleType
) -> Pairs:
    """Count the pairs of ``[samples]``; ``xp`` is jax.numpy or NumPy."""
    if len(labels) < 2:
        zero = xp.zeros(())
        return Pairs(zero, zero, zero, zero, zero)
    # Sort by prediction, equal ones by descending label, so that no tie counts as concordant.
    order = xp.lexsort((-labels, predictions))
    predictions, labels, weights = predictions[order], labels[order], weights[order]
    new_prediction = _new(predictions, xp)
    new_label = _new(labels, xp)
    by_label = xp.argsort(labels, stable=True)
    ranks = _scatter(by_label, xp.cumsum(_new(labels[by_label], xp)) - 1, xp)
    tied = _pairs_within(new_prediction, weights, xp)
    tied_both = _pairs_within(new_prediction | new_label, weights, xp)
    return Pairs(
        concordant=_ascending(ranks, weights, xp),
        tied_predictions=tied - tied_both,
        tied_both=tied_both,
        tied_labels=_pairs_within(_new(labels[by_label], xp), weights[by_label], xp),
        total=(weights * _before(weights, xp)).sum(),
    )


def _ascending(ranks: AnyArray, weights: AnyArray, xp: ModuleType) -> Any:
    """Return the weight of the pairs ``i < j`` with ``ranks[i] < ranks[j]``.

    The highest bit in which two numbers differ decides which is greater. The samples are sorted
    stably by one bit after the other, from the highest down. At each bit this counts the pairs that
    agree in all bits above and whose first number has a 0, the second a 1.
    """
    samples = len(ranks)
    positions = xp.arange(samples)
    # First position, in the sorted order, of the samples of a rank or higher.
    begins = xp.searchsorted(xp.sort(ranks), xp.arange(samples + 1))

    def split(bit: Any, ranks: AnyArray, weights: AnyArray) -> tuple[AnyArray, AnyArray, Any]:
        one = (ranks >> bit) & 1
        group = begins[xp.minimum((ranks >> (bit + 1)) << (bit + 1), samples)]
        lighter = _before(weights * (1 - one), xp)
        weight = (weights * one * (lighter - lighter[group])).sum()
        zeros = _before(1 - one, xp)
        zeros = zeros - zeros[group]
        begin = begins[xp.minimum((ranks >> bit) << bit, samples)]
        target = begin + xp.where(one == 1, positions - group - zeros, zeros)
        return _scatter(target, ranks, xp), _scatter(target, weights, xp), weight

    bits = max(samples - 1, 1).bit_length()
    if xp is np:
        total = 0.0
        for bit in reversed(range(bits)):
            ranks, weights, weight = split(bit, ranks, weights)
            total += weight
        return np.float64(total)

    def step(i: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        ranks, weights, total = carry
        ranks, weights, weight = split(bits - 1 - i, ranks, weights)
        return ranks, weights, total + weight

    start = (ranks, weights, jnp.zeros_like(weights[0]))
    return jax.lax.fori_loop(0, bits, step, start)[2]


def _pairs_within(new: AnyArray, weights: AnyArray, xp: ModuleType) -> Any:
    """Return the weight of the pairs within runs; ``new`` marks the start of each run."""
    positions = xp.arange(len(new))
    marks = xp.where(new, positions, 0)
    start = np.maximum.accumulate(marks) if xp is np else jax.lax.cummax(marks)
    before = _before(weights, xp)
    return (weights * (before - before[start])).sum()


def _new(x: AnyArray, xp: ModuleType) -> AnyArray:
    return xp.concatenate([xp.ones(1, bool), x[1:] != x[:-1]])


def _before(x: AnyArray, xp: ModuleType) -> AnyArray:
    """Return the sum of the elements before each element."""
    return xp.cumsum(x) - x


def _scatter(positions: Int[Any, " samples"], values: AnyArray, xp: ModuleType) -> AnyArray:
    """Return an array with each value at its position."""
    if xp is np:
        result = np.empty_like(values)
        result[positions] = values
        return result
    return jnp.zeros_like(values).at[positions].set(values, unique_indices=True)


def concordance(pairs: Pairs) -> tuple[Any, Any]:
    """Return the numerator and denominator of the share of pairs in the right order.

    Pairs of different labels count 1, or one half if their predictions are equal.
    """
    return pairs.concordant + 0.5 * pairs.tied_predictions, pairs.total - pairs.tied_labels
