"""Pairs of samples within sessions that predictions put in the order of their labels."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrec.metrics.metric import Batch, SumMetric, Sums, Values, ratio
from jaxrec.metrics.sessions import sort_sessions

# Distance of the samples of a pair, weight of the pairs in order and of all, number of pairs.
Carry: TypeAlias = tuple[Array, Array, Array, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionPairwiseAUC(SumMetric):
    """The share of pairs within sessions that predictions put in order (``session_pairwise_auc``).

    Over the pairs of samples of one session, within one batch, whose labels differ; equal
    predictions count one half. A pair weighs the sum of its two weights. The time of a batch grows
    with its size times its longest session.

    No value without pairs; ``compat="torchrec"`` reports 0.5.

    Attributes:
        weighted: Whether pairs weigh the sum of their weights; otherwise all the same.
        labels_are_ranks: Whether a lower label is better.
        coverage: Whether to report the means over batches of the number of pairs
            (``valid_pairs_per_batch``) and of the samples that are in one
            (``effective_training_examples_per_batch``).
        sessions: Name under which `update` gets the session of each sample, ``[batch]`` or
            ``[tasks, batch]`` int32.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = SessionPairwiseAUC(window=None)
        >>> predictions, labels = jnp.array([0.9, 0.1, 0.2, 0.3]), jnp.array([3.0, 1.0, 2.0, 1.0])
        >>> state = metric.update(
        ...     metric.init(), predictions, labels, session=jnp.array([7, 7, 8, 8])
        ... )
        >>> metric.compute(state)["lifetime_session_pairwise_auc"].tolist()
        [0.5]
    """

    weighted: bool = True
    labels_are_ranks: bool = False
    coverage: bool = False
    sessions: str = "session"

    name: ClassVar[str] = "session_pairwise_auc"
    torchrec_undefined: ClassVar[float] = 0.5

    @property
    def required(self) -> tuple[str, ...]:
        return (self.sessions,)

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        labels = -batch.labels if self.labels_are_ranks else batch.labels
        sessions = batch.inputs[self.sessions].astype(jnp.int32)
        sums = jax.vmap(self._of_task)(
            batch.predictions, labels, batch.weights, sessions, batch.real
        )
        if not self.coverage:
            return {name: sums[name] for name in ("ordered", "pairs")}
        return sums | {"batches": jnp.ones(self.tasks)}

    def values(self, sums: Sums) -> Values:
        values = {self.name: ratio(sums["ordered"], sums["pairs"])}
        if self.coverage:
            values["valid_pairs_per_batch"] = ratio(sums["count"], sums["batches"])
            values["effective_training_examples_per_batch"] = ratio(
                sums["examples_in_pairs"], sums["batches"]
            )
        return values

    def _of_task(
        self,
        predictions: Float[Array, " batch"],
        labels: Float[Array, " batch"],
        weights: Float[Array, " batch"],
        sessions: Int[Array, " batch"],
        real: Bool[Array, " batch"],
    ) -> dict[str, Float[Array, ""]]:
        samples = len(labels)
        ranked = sort_sessions(labels, sessions, real)
        order, session = ranked.order, ranked.session
        predictions, labels, weights = predictions[order], labels[order], weights[order]
        positions = jnp.arange(samples)

        def in_session(distance: Int[Array, ""]) -> tuple[Int[Array, " batch"], Array]:
            """Return the sample at an offset, and whether it belongs to the same session."""
            other = jnp.minimum(positions + distance, samples - 1)
            same = (session == session[other]) & (session < samples)
            return other, same & (positions + distance < samples)

        def add(carry: Carry) -> Carry:
            distance, ordered, pairs, count = carry
            other, same = in_session(distance)
            # Samples are sorted by label: the later of two is never lower.
            valid = same & (labels < labels[other])
            pair = weights + weights[other] if self.weighted else jnp.ones(samples)
            pair = jnp.where(valid, pair, 0)
            right = (predictions < predictions[other]) + 0.5 * (predictions == predictions[other])
            return (
                distance + 1,
                ordered + (pair * right).sum(),
                pairs + pair.sum(),
                count + valid.sum(),
            )

        def more(carry: Carry) -> Bool[Array, ""]:
            return in_session(carry[0])[1].any()

        nothing = (weights * 0).sum()
        zero = session[0] * 0
        _, ordered, pairs, count = jax.lax.while_loop(more, add, (zero + 1, nothing, nothing, zero))
        lowest = jax.ops.segment_min(labels, session, samples)
        highest = jax.ops.segment_max(labels, session, samples)
        varied = (lowest < highest)[jnp.minimum(session, samples - 1)] & (session < samples)
        return {
            "ordered": ordered,
            "pairs": pairs,
            "count": count.astype(jnp.float32),
            "examples_in_pairs": varied.sum().astype(jnp.float32),
        }
