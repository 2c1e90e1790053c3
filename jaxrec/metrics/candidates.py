"""Metrics of the rank of a wanted item among candidates, on the host."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from jaxrec.metrics.domain import as_numbers


def rank_metrics(scores: Float[np.ndarray, "samples candidates"], k: int = 10) -> dict[str, float]:
    """Return the hit rate, NDCG and reciprocal rank of one wanted item among others.

    With the item's rank ``r`` from 1: the share of samples with ``r <= k``; the mean of
    ``1 / log2(r + 1)`` where ``r <= k`` and 0 elsewhere; the mean of ``1 / r`` (Sun et al. 2019,
    arXiv:1904.06690, section 4.2). An equal score counts against the item, and so does NaN.

    Args:
        scores: ``[samples, candidates]``, the wanted item's first.
        k: Ranks that count as a hit.

    Returns:
        ``HR@k``, ``NDCG@k`` and ``MRR``.

    Raises:
        TypeError: The scores are not real numbers.
        ValueError: There are no samples, no other candidates, or ``k`` is below 1.

    Example:
        >>> rank_metrics(np.array([[0.5, 0.1, 0.9], [0.5, 0.1, 0.2]]), k=1)
        {'HR@1': 0.5, 'NDCG@1': 0.5, 'MRR': 0.75}
    """
    scores = np.asarray(as_numbers("rank_metrics", "scores", scores))
    if scores.ndim != 2 or scores.shape[0] < 1 or scores.shape[1] < 2 or k < 1:
        raise ValueError(
            "rank_metrics takes scores of [samples, candidates], of one sample or more with two or "
            f"more candidates, and k of 1 or more; got {scores.shape} and k={k}"
        )
    rank = 1 + (~(scores[:, 1:] < scores[:, :1])).sum(axis=1)
    hit = rank <= k
    return {
        f"HR@{k}": float(hit.mean()),
        f"NDCG@{k}": float((hit / np.log2(rank + 1)).mean()),
        "MRR": float((1 / rank).mean()),
    }
