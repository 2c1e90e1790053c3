"""The area under the ROC curve."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Shaped


def auc(
    scores: Shaped[np.ndarray, " samples"],
    labels: Shaped[np.ndarray, " samples"],
    weights: Shaped[np.ndarray, " samples"] | None = None,
) -> float:
    """The area under the ROC curve, exactly, on the host.

    The probability that a positive sample scores above a negative one, equal scores counting one
    half (Mann and Whitney 1947, "On a test of whether one of two random variables is stochastically
    larger than the other"; Fawcett 2006, "An introduction to ROC analysis", section 7).

    Args:
        scores: ``[samples]``, probabilities or logits: only their order matters.
        labels: ``[samples]``, 0 or 1.
        weights: ``[samples]``, 0 or above; None: all 1. A pair weighs the product of its two.

    Returns:
        The area, computed in float64; 0.5 where all samples are of one class, as in TorchRec.

    Raises:
        ValueError: A score is NaN: it has no place in the order.

    Example:
        >>> import numpy as np
        >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1]))
        0.875
    """
    if np.isnan(scores).any():
        raise ValueError(f"{np.isnan(scores).sum()} of {scores.size} scores are NaN")
    order = np.argsort(scores, kind="stable")
    ranked = scores[order]
    weighted = np.ones(scores.size) if weights is None else np.asarray(weights, np.float64)[order]
    positives = weighted * (labels[order] > 0)
    # Samples of one score stand together: they share one step of the curve.
    firsts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
    if scores.size == 0:
        return 0.5
    true = np.add.reduceat(positives, firsts)
    false: Float[np.ndarray, " steps"] = np.add.reduceat(weighted - positives, firsts)
    pairs = true.sum() * false.sum()
    if pairs == 0:
        return 0.5
    below = np.cumsum(false) - false
    return float((true * (below + 0.5 * false)).sum() / pairs)
