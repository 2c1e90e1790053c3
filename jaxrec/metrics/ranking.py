"""Metrics of ranks: NDCG within sessions, and the rank of a wanted item among candidates."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrec.metrics.domain import AMOUNT, LABEL, NUMBER, Domains, as_numbers
from jaxrec.metrics.metric import Batch, Sums, Values, ratio
from jaxrec.metrics.sessions import SessionMetric, Sorted, sort_sessions


@dataclasses.dataclass(frozen=True, kw_only=True)
class NDCG(SessionMetric):
    """Normalized discounted cumulative gain, the mean over sessions (``ndcg``).

    NDCG is ``DCG = sum gain(y) / log2(rank + 1)``, with ranks from the highest prediction down,
    over the DCG of the best order. Järvelin and Kekäläinen 2002, "Cumulated gain-based evaluation
    of IR techniques", section 2. Samples of equal prediction get the mean of their gains (McSherry
    and Najork 2008, "Computing information retrieval performance measures efficiently in the
    presence of tied scores"). The samples of a session are in one batch. A session's weight is the
    largest weight of its samples; a session without gain has no NDCG and is left out.

    Under ``compat="torchrec"`` samples of equal prediction rank in the order of the batch, a
    session without gain has an NDCG of 0, samples of weight 0 take ranks, and the mean divides by
    the number of sessions, not by their weights.

    Attributes:
        k: Number of ranks that count, from the top; None: all.
        exponential_gain: Whether the gain is ``2^y - 1`` instead of ``y``.
        decreasing: Whether to report ``1 - NDCG``, TorchRec's default.
        drop_single: Whether to leave out sessions of one sample.
        scale_by_weights: Whether weights multiply labels and predictions instead of sessions.
        negative_tasks: For each task, whether good samples should rank low: the metric then uses
            ``1 - p`` and ``1 - y``. None: no task.
        sessions: Name of the session numbers among the inputs of `update`, ``[batch]`` or
            ``[tasks, batch]`` int32.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = NDCG(window=None)
        >>> predictions, labels = jnp.array([0.9, 0.1, 0.5]), jnp.array([0.0, 0.0, 1.0])
        >>> state = metric.update(metric.init(), predictions, labels, session=jnp.array([1, 1, 1]))
        >>> round(metric.compute(state)["lifetime_ndcg"].item(), 3)
        0.631
    """

    k: int | None = None
    exponential_gain: bool = False
    decreasing: bool = False
    drop_single: bool = False
    scale_by_weights: bool = False
    negative_tasks: tuple[bool, ...] | None = None

    name: ClassVar[str] = "ndcg"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k is not None and self.k < 1:
            raise ValueError(f"NDCG: k={self.k} must be 1 or more, or None for all ranks")
        if self.negative_tasks is not None and len(self.negative_tasks) != self.tasks:
            raise ValueError(
                f"NDCG of {self.tasks} task(s): negative_tasks={self.negative_tasks} must have "
                "an entry for each task"
            )

    @property
    def domains(self) -> Domains:
        return NUMBER, AMOUNT if self.negative_tasks is None else LABEL

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        predictions, labels = batch.predictions, batch.labels
        if self.negative_tasks is not None:
            negative = jnp.array(self.negative_tasks)[:, None]
            predictions = jnp.where(negative, 1 - predictions, predictions)
            labels = jnp.where(negative, 1 - labels, labels)
        sessions = batch.inputs[self.sessions].astype(jnp.int32)
        kept = jnp.ones_like(batch.real) if self.compat else batch.real
        total, count = jax.vmap(self._of_task)(predictions, labels, batch.weights, sessions, kept)
        return {"ndcg": total, "sessions": count}

    def values(self, sums: Sums) -> Values:
        return {self.name: ratio(sums["ndcg"], sums["sessions"])}

    def _of_task(
        self,
        predictions: Float[Array, " batch"],
        labels: Float[Array, " batch"],
        weights: Float[Array, " batch"],
        sessions: Int[Array, " batch"],
        kept: Bool[Array, " batch"],
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        samples = len(labels)
        if self.scale_by_weights:
            predictions, labels = predictions * weights, labels * weights
        gain = jnp.exp2(labels) - 1 if self.exponential_gain else labels
        by_prediction = sort_sessions(-predictions, sessions, kept)
        by_label = sort_sessions(-labels, sessions, kept)

        def of_sessions(x: Array, ranked: Sorted) -> Float[Array, " sessions"]:
            return jax.ops.segment_sum(x, ranked.session, samples)

        gained = gain[by_prediction.order]
        if self.compat is None:
            # The mean over each run of equal predictions: the value must not depend on the order of
            # the batch.
            tie = by_prediction.tie
            shared = jax.ops.segment_sum(gained, tie, samples)
            sharers = jax.ops.segment_sum(jnp.ones(samples), tie, samples)
            gained = shared[tie] / sharers[tie]
        dcg = of_sessions(gained * self._discount(by_prediction), by_prediction)
        ideal = of_sessions(gain[by_label.order] * self._discount(by_label), by_label)
        length = of_sessions(jnp.ones(samples), by_label)
        weight = jax.ops.segment_max(weights[by_label.order], by_label.session, samples)
        if self.scale_by_weights:
            weight = jnp.ones(samples)
        counts = length > (1 if self.drop_single else 0)
        if self.compat is None:
            counts &= ideal > 0
        # A session without gain must not be 0 / 0: it is left out below, or has an NDCG of 0 under
        # compat.
        ndcg = dcg / jnp.where(ideal == 0, 1e-6, ideal)
        reported = 1 - ndcg if self.decreasing else ndcg
        size = jnp.ones(samples) if self.compat else weight
        return jnp.where(counts, weight * reported, 0).sum(), jnp.where(counts, size, 0).sum()

    def _discount(self, ranked: Sorted) -> Float[Array, " batch"]:
        """Return the discount of each sorted sample's rank; 0 beyond rank ``k``."""
        rank = jnp.arange(len(ranked.order)) - ranked.start + 1
        discount = 1 / jnp.log2(rank.astype(jnp.float32) + 1)
        return discount if self.k is None else jnp.where(rank <= self.k, discount, 0)


def rank_metrics(scores: Float[np.ndarray, "samples candidates"], k: int = 10) -> dict[str, float]:
    """Compute the hit rate, NDCG and reciprocal rank of one wanted item among candidates.

    Let ``r`` be the item's rank, from 1. ``HR@k`` is the share of samples with ``r <= k``.
    ``NDCG@k`` is the mean of ``1 / log2(r + 1)`` where ``r <= k``, and of 0 elsewhere. ``MRR`` is
    the mean of ``1 / r`` (Sun et al. 2019, arXiv:1904.06690, section 4.2). Candidates with an equal
    score or NaN rank before the item.

    Args:
        scores: ``[samples, candidates]``; the first candidate is the wanted item.
        k: Number of ranks that count as a hit.

    Returns:
        ``HR@k``, ``NDCG@k`` and ``MRR``.

    Raises:
        TypeError: The scores are not real numbers.
        ValueError: The batch has no samples, the samples have one candidate, or ``k`` is below 1.

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
    # "Not lower" and not ">=", which is false for NaN: a model that scores NaN must not look good.
    rank = 1 + (~(scores[:, 1:] < scores[:, :1])).sum(axis=1)
    hit = rank <= k
    return {
        f"HR@{k}": float(hit.mean()),
        f"NDCG@{k}": float((hit / np.log2(rank + 1)).mean()),
        "MRR": float((1 / rank).mean()),
    }
