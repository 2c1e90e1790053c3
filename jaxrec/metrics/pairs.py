"""Metrics of the pairs of samples that predictions put in the order of their labels."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrec.metrics.metric import Batch, SumMetric, Sums, Values, ratio
from jaxrec.metrics.sessions import SessionMetric, differs_from_previous, sort_sessions

# The functions take jax.numpy or NumPy as `xp`: the same code runs in a compiled step in float32,
# for batches, and on the host in float64, for the samples of a window.
AnyArray = Shaped[jax.Array | np.ndarray, " samples"]


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """Total weight of the pairs of samples of each kind.

    A pair weighs the product of its two samples' weights; it has no order.

    Attributes:
        concordant: The higher prediction has the higher label.
        tied_predictions: Predictions are equal and labels differ.
        tied_both: Predictions and labels are equal.
        tied_labels: Labels are equal, and predictions may be.
        total: All pairs.
    """

    concordant: Any
    tied_predictions: Any
    tied_both: Any
    tied_labels: Any
    total: Any

    @property
    def discordant(self) -> Any:
        """Total weight of the pairs in which the higher prediction has the lower label."""
        return self.total - self.tied_labels - self.tied_predictions - self.concordant


def count_pairs(
    predictions: AnyArray, labels: AnyArray, weights: AnyArray, xp: ModuleType
) -> Pairs:
    """Count the pairs of ``[samples]`` in time ``n log n``; ``xp`` is jax.numpy or NumPy."""
    if len(labels) < 2:
        zero = xp.zeros(())
        return Pairs(zero, zero, zero, zero, zero)
    # Sort by prediction, then count the pairs whose labels ascend. Equal predictions are sorted by
    # descending label, so that their pairs do not count as concordant.
    order = xp.lexsort((-labels, predictions))
    predictions, labels, weights = predictions[order], labels[order], weights[order]
    new_prediction = differs_from_previous(predictions, xp)
    new_label = differs_from_previous(labels, xp)
    by_label = xp.argsort(labels, stable=True)
    new_rank = differs_from_previous(labels[by_label], xp)
    ranks = _scatter(by_label, xp.cumsum(new_rank) - 1, xp)
    tied = _pairs_within(new_prediction, weights, xp)
    tied_both = _pairs_within(new_prediction | new_label, weights, xp)
    return Pairs(
        concordant=_ascending(ranks, weights, xp),
        tied_predictions=tied - tied_both,
        tied_both=tied_both,
        tied_labels=_pairs_within(new_rank, weights[by_label], xp),
        total=(weights * _before(weights, xp)).sum(),
    )


def _ascending(ranks: AnyArray, weights: AnyArray, xp: ModuleType) -> Any:
    """Return the total weight of the pairs ``i < j`` with ``ranks[i] < ranks[j]``."""
    # A merge sort would count them, but its data-dependent steps do not compile. A radix sort does:
    # the highest bit in which two ranks differ decides which is greater. Samples are sorted stably
    # by one bit after the other, from the highest down. Each bit counts the pairs that agree in
    # all bits above, and in which the first rank has a 0 and the second a 1.
    samples = len(ranks)
    positions = xp.arange(samples)
    # First position, in the sorted order, of the samples of each rank or higher.
    begins = xp.searchsorted(xp.sort(ranks), xp.arange(samples + 1))

    def split(bit: Any, ranks: AnyArray, weights: AnyArray) -> tuple[AnyArray, AnyArray, Any]:
        one = (ranks >> bit) & 1
        # Start of the samples that agree in all bits above.
        group = begins[xp.minimum((ranks >> (bit + 1)) << (bit + 1), samples)]
        lighter = _before(weights * (1 - one), xp)
        weight = (weights * one * (lighter - lighter[group])).sum()
        zeros = _before(1 - one, xp)
        zeros = zeros - zeros[group]
        begin = begins[xp.minimum((ranks >> bit) << bit, samples)]
        target = begin + xp.where(one == 1, positions - group - zeros, zeros)
        return _scatter(target, ranks, xp), _scatter(target, weights, xp), weight

    # Ranks are below the number of samples, which is static: so is the number of bits.
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
    """Return the total weight of the pairs within runs; ``new`` marks the start of each run."""
    positions = xp.arange(len(new))
    marks = xp.where(new, positions, 0)
    start = np.maximum.accumulate(marks) if xp is np else jax.lax.cummax(marks)
    before = _before(weights, xp)
    return (weights * (before - before[start])).sum()


def _before(x: AnyArray, xp: ModuleType) -> AnyArray:
    """Return for each element the sum of all elements before it."""
    return xp.cumsum(x) - x


def _scatter(positions: Int[Any, " samples"], values: AnyArray, xp: ModuleType) -> AnyArray:
    """Return an array with each value at its position."""
    if xp is np:
        result = np.empty_like(values)
        result[positions] = values
        return result
    return jnp.zeros_like(values).at[positions].set(values, unique_indices=True)


def concordance(pairs: Pairs) -> tuple[Any, Any]:
    """Return the weight of the pairs in the right order, and of all pairs that count.

    Pairs of different labels count; a pair of equal predictions is half right.
    """
    return pairs.concordant + 0.5 * pairs.tied_predictions, pairs.total - pairs.tied_labels


@dataclasses.dataclass(frozen=True, kw_only=True)
class XAUC(SumMetric):
    """Share of a batch's pairs of samples whose predictions are in the order of labels (``xauc``).

    Pairs of samples of one batch with different labels count. A pair weighs the product of its two
    weights, and a pair of equal predictions counts one half. With labels 0 and 1 it is AUC. Zhan et
    al. 2022, "Deconfounding duration bias in watch-time prediction for video recommendation",
    section 5.1. A batch of ``n`` samples takes time ``n log n``.

    Under ``compat="torchrec"`` all pairs count. A pair of equal labels, or of equal predictions, is
    then in order only if both are equal.

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


# Distance of the samples of a pair in sorted order, weight of the pairs in the right order, weight
# of all pairs, number of pairs.
Carry: TypeAlias = tuple[Array, Array, Array, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionPairwiseAUC(SessionMetric):
    """Share of pairs within sessions in the order of labels (``session_pairwise_auc``).

    Pairs of samples of one session and batch count if their labels differ; a pair of equal
    predictions counts one half. A pair weighs the sum of its two weights. The time of a batch grows
    with its size times the length of its longest session.

    Undefined without pairs; ``compat="torchrec"`` reports 0.5 there.

    Attributes:
        weighted: True: a pair weighs the sum of its weights. False: all pairs weigh the same.
        labels_are_ranks: Whether a lower label is better.
        coverage: Whether to report the mean number per batch of pairs (``valid_pairs_per_batch``),
            and of samples in pairs (``effective_training_examples_per_batch``).
        sessions: Name of the session numbers among the inputs of `update`, ``[batch]`` or
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

    name: ClassVar[str] = "session_pairwise_auc"
    torchrec_undefined: ClassVar[float] = 0.5

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
        # Compares each sample with the next one, then with the second next, and ends when no
        # session is that long: sessions are short.
        samples = len(labels)
        ranked = sort_sessions(labels, sessions, real)
        order, session = ranked.order, ranked.session
        predictions, labels, weights = predictions[order], labels[order], weights[order]
        positions = jnp.arange(samples)

        def in_session(distance: Int[Array, ""]) -> tuple[Int[Array, " batch"], Array]:
            """Return the position at a distance, and whether it is in the same session."""
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

        # Inside of `shard_map`, `while_loop` wants a carry that varies over the mesh as its results
        # do: zeros made of the inputs vary as the inputs do.
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
