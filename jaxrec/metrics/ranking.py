"""Metrics of the order of samples: within a batch (XAUC) and within sessions (NDCG)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrec.metrics.domain import AMOUNT, LABEL, NUMBER, Domain
from jaxrec.metrics.metric import Batch, SumMetric, Sums, Values, ratio
from jaxrec.metrics.pairs import concordance, count_pairs
from jaxrec.metrics.sessions import Sorted, sort_sessions


@dataclasses.dataclass(frozen=True, kw_only=True)
class XAUC(SumMetric):
    """The share of pairs of a batch that predictions put in the order of their labels (``xauc``).

    Pairs of samples of one batch with different labels count, with the product of their weights; a
    pair of equal predictions counts one half. With labels 0 and 1 it is AUC. Zhan et al.
    2022, "Deconfounding duration bias in watch-time prediction for video recommendation", section
    5.1. A batch takes ``n log n``.

    Under ``compat="torchrec"`` all pairs count: a pair of equal labels is in order if its
    predictions are equal too, and a pair of equal predictions only then.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = XAUC(window=None)
        >>> predictions, labels = jnp.array([1.0, 2.0, 3.0]), jnp.array([10.0, 30.0, 20.0])
        >>> state = metric.update(metric.init(), predictions, labels)
        >>> round(metric.compute(state)["lifetime_xauc"].item(), 3)
        0.667
    """

    name: ClassVar[str] = "xauc"

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        pairs = jax.vmap(lambda p, y, w: _shares(p, y, w, self.compat is not None))(
            batch.predictions, batch.labels, batch.weights
        )
        return {"ordered": pairs[0], "pairs": pairs[1]}

    def values(self, sums: Sums) -> Values:
        return {self.name: ratio(sums["ordered"], sums["pairs"])}


def _shares(
    predictions: Float[Array, " batch"],
    labels: Float[Array, " batch"],
    weights: Float[Array, " batch"],
    torchrec: bool,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    pairs = count_pairs(predictions, labels, weights, jnp)
    if torchrec:
        return pairs.concordant + pairs.tied_both, pairs.total
    return concordance(pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NDCG(SumMetric):
    """Normalized discounted cumulative gain, the mean over sessions (``ndcg``).

    ``DCG = sum gain(y) / log2(rank + 1)``, ranks by prediction from the highest down, over the DCG
    of the best order. Järvelin and Kekäläinen 2002, "Cumulated gain-based evaluation of IR
    techniques", section 2. Equal predictions share the mean of their gains (McSherry and Najork
    2008, "Computing information retrieval performance measures efficiently in the presence of tied
    scores"). A session, within one batch, weighs as its heaviest sample; one without gain has no
    NDCG and is left out.

    ``compat="torchrec"``: equal predictions keep the batch's order, a session without gain has an
    NDCG of 0, samples of weight 0 take ranks, and the mean divides by the number of sessions, not
    by their weights.

    Attributes:
        k: Ranks that count; None: all.
        exponential_gain: Gain ``2^y - 1`` instead of ``y``.
        decreasing: Reports ``1 - NDCG``, TorchRec's default.
        drop_single: Whether sessions of one sample are left out.
        scale_by_weights: Whether weights multiply labels and predictions instead of sessions.
        negative_tasks: For each task whether good samples should rank low: the metric then takes
            ``1 - p`` and ``1 - y``. None: no task.
        sessions: Name under which `update` gets the session of each sample, ``[batch]`` or
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
    sessions: str = "session"

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
    def required(self) -> tuple[str, ...]:
        return (self.sessions,)

    @property
    def domains(self) -> tuple[Domain | None, Domain | None]:
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
        ndcg = dcg / jnp.where(ideal == 0, 1e-6, ideal)
        reported = 1 - ndcg if self.decreasing else ndcg
        size = jnp.ones(samples) if self.compat else weight
        return jnp.where(counts, weight * reported, 0).sum(), jnp.where(counts, size, 0).sum()

    def _discount(self, ranked: Sorted) -> Float[Array, " batch"]:
        rank = jnp.arange(len(ranked.order)) - ranked.start + 1
        discount = 1 / jnp.log2(rank.astype(jnp.float32) + 1)
        return discount if self.k is None else jnp.where(rank <= self.k, discount, 0)
