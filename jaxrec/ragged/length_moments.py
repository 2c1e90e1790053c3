"""Moments of a feature's lengths, and how many ids a batch is likely to have."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class LengthMoments(NamedTuple):
    """Distribution of a feature's number of ids per sample.

    Attributes:
        mean: Mean length.
        variance: Variance of the lengths.
        skew: Third central moment over the variance; large where a few samples have most ids.
    """

    mean: float
    variance: float
    skew: float

    @classmethod
    def of(cls, lengths: np.ndarray, counts: np.ndarray | None = None) -> LengthMoments:
        """Return the moments of lengths, ``[samples]``, each of which counts ``counts`` times."""
        if not np.size(lengths) or (counts is not None and not np.sum(counts)):
            return cls(0.0, 0.0, 0.0)
        mean = float(np.average(lengths, weights=counts))
        deviations = np.asarray(lengths, np.float64) - mean
        variance = float(np.average(deviations**2, weights=counts))
        third = float(np.average(deviations**3, weights=counts))
        return cls(mean, variance, third / variance if variance else 0.0)

    def likely_ids(self, samples: int, deviations: float) -> float:
        """Return a number of ids that few batches of ``samples`` samples exceed.

        It is a quantile of a normal distribution's, ``deviations`` standard deviations above the
        mean, corrected for the skew of the sum (the first term of the expansion of Cornish and
        Fisher, "Moments and cumulants in the specification of distributions", 1938).
        """
        spread = deviations * (samples * self.variance) ** 0.5
        return samples * self.mean + spread + max(0.0, (deviations**2 - 1) / 6 * self.skew)
