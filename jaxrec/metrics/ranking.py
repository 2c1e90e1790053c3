"""How well predictions order the samples: of a batch (XAUC), and of each session (NDCG, GAUC)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrec.metrics.metric import Batch, SumMetric, Values, ratio
from jaxrec.metrics.pairs import concordance, count_pairs
from jaxrec.metrics.sessions import differs_from_previous, run_starts

Sums = Mapping[str, Float[np.ndarray, "tasks ..."]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class XAUC(SumMetric):
    """The share of pairs of a batch that predictions put in the order of their labels (``xauc``).

    Over the pairs of samples of one batch whose labels differ, weighed by the product of their
    weights; a pair of equal predictions counts one half. With labels 0 and 1 it is AUC. Zhan et al.
    2022, "Deconfounding duration bias in watch-time prediction for video recommendation", section
    5.1. A batch takes ``n log n``.

    ``compat="torchrec"``: over all pairs; one of equal labels counts if predictions are equal too,
    and one of equal predictions only then.

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


@dataclasses.dataclass(frozen=True, eq=False)
class _Sorted:
    """The samples of a batch, sorted by session and within it by a key.

    Attributes:
        order: ``[batch]`` positions in the batch.
        session: ``[batch]`` number of the session, counted from 0; ``batch`` where left out.
        start: ``[batch]`` where the session starts.
        tie: ``[batch]`` number of the run of equal keys.
        tie_start: ``[batch]`` where that run starts.
    """

    order: Int[Array, " batch"]
    session: Int[Array, " batch"]
    start: Int[Array, " batch"]
    tie: Int[Array, " batch"]
    tie_start: Int[Array, " batch"]


def _sort(
    key: Float[Array, " batch"], sessions: Int[Array, " batch"], kept: Bool[Array, " batch"]
) -> _Sorted:
    order = jnp.lexsort((key, sessions, ~kept))
    kept, ids, key = kept[order], sessions[order], key[order]
    new_session = differs_from_previous(ids) | differs_from_previous(kept)
    new_key = new_session | differs_from_previous(key)
    return _Sorted(
        order,
        jnp.where(kept, jnp.cumsum(new_session) - 1, len(key)),
        run_starts(new_session),
        jnp.cumsum(new_key) - 1,
        run_starts(new_key),
    )


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
        negative_tasks: For each task whether it is to rank low what is good: ``1 - p`` and
            ``1 - y`` are taken. None: no task.
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
                f"NDCG of {self.tasks} task(s): negative_tasks={self.negative_tasks} must say it "
                "for each of them"
            )

    @property
    def required(self) -> tuple[str, ...]:
        return (self.sessions,)

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
        by_prediction = _sort(-predictions, sessions, kept)
        by_label = _sort(-labels, sessions, kept)

        def of_sessions(x: Array, ranked: _Sorted) -> Float[Array, " sessions"]:
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

    def _discount(self, ranked: _Sorted) -> Float[Array, " batch"]:
        rank = jnp.arange(len(ranked.order)) - ranked.start + 1
        discount = 1 / jnp.log2(rank.astype(jnp.float32) + 1)
        return discount if self.k is None else jnp.where(rank <= self.k, discount, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedAUC(SumMetric):
    """The mean over sessions of the area under the ROC curve (``gauc``).

    Of each session, within one batch, that has samples of both labels; pairs weigh the product of
    their weights and equal predictions count one half. Zhou et al. 2018, "Deep interest network for
    click-through rate prediction", section 6.2. ``gauc_num_samples`` is the number of sessions.

    ``compat="torchrec"``: a positive does not rank above a negative of equal prediction that comes
    later in the batch; sessions are left out if all predictions are equal, or if all are equal but
    some are 0; and the mean is ``(sum + 1e-9) / (sessions + 2e-9)``, one half of no sessions.

    Attributes:
        weighted_by: What a session weighs in the mean: each the same, or the weight of its samples,
            as Zhou et al. have it.
        sessions: Name under which `update` gets the session of each sample, ``[batch]`` or
            ``[tasks, batch]`` int32; `sessions_of` makes it of TorchRec's ``num_candidates``.
    """

    weighted_by: Literal["sessions", "samples"] = "sessions"
    sessions: str = "session"

    name: ClassVar[str] = "gauc"

    @property
    def required(self) -> tuple[str, ...]:
        return (self.sessions,)

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        sessions = batch.inputs[self.sessions].astype(jnp.int32)
        total, size, count = jax.vmap(self._of_task)(
            batch.predictions, batch.labels, batch.weights, sessions, batch.real
        )
        return {"auc": total, "size": size, "sessions": count}

    def values(self, sums: Sums) -> Values:
        mean = ratio(sums["auc"], sums["size"])
        if self.compat is not None:
            mean = (sums["auc"] + 1e-9) / (sums["size"] + 2e-9)
        return {"gauc": mean, "gauc_num_samples": sums["sessions"]}

    def _of_task(
        self,
        predictions: Float[Array, " batch"],
        labels: Float[Array, " batch"],
        weights: Float[Array, " batch"],
        sessions: Int[Array, " batch"],
        real: Bool[Array, " batch"],
    ) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
        samples = len(labels)
        kept = jnp.ones_like(real) if self.compat else real
        ranked = _sort(predictions, sessions, kept)
        positive = (weights * labels)[ranked.order]
        negative = (weights * (1 - labels))[ranked.order]

        def of_sessions(x: Array) -> Float[Array, " sessions"]:
            return jax.ops.segment_sum(x, ranked.session, samples)

        before = jnp.cumsum(negative) - negative
        if self.compat is None:
            tied = jax.ops.segment_sum(negative, ranked.tie, samples)[ranked.tie]
            below = before[ranked.tie_start] - before[ranked.start] + tied / 2
        else:
            below = before - before[ranked.start] + negative
        positives, negatives = of_sessions(positive), of_sessions(negative)
        counts = (positives > 0) & (negatives > 0)
        pairs = positives * negatives
        won = of_sessions(positive * below)
        if self.compat is None:
            area = won / jnp.where(counts, pairs, 1)
        else:
            area = won / (pairs + 1e-10)
            counts &= ~_all_alike(predictions, ranked)
        size = of_sessions(positive + negative) if self.weighted_by == "samples" else 1.0
        return (
            jnp.where(counts, size * area, 0).sum(),
            jnp.where(counts, size, 0.0).sum(),
            counts.sum().astype(jnp.float32),
        )


def _all_alike(predictions: Float[Array, " batch"], ranked: _Sorted) -> Bool[Array, " sessions"]:
    """Sessions in which each prediction is that of the first sample, or 0."""
    samples = len(predictions)
    first = jax.ops.segment_min(ranked.order, ranked.session, samples)
    of_first = predictions[jnp.clip(first, 0, samples - 1)][
        jnp.clip(ranked.session, 0, samples - 1)
    ]
    own = predictions[ranked.order]
    other = ((own != of_first) & (own != 0)).astype(jnp.int32)
    return jax.ops.segment_max(other, ranked.session, samples) <= 0
