"""Metrics of the rank of a sample within its session."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrec.metrics.domain import LABEL, NUMBER, Domain
from jaxrec.metrics.metric import Batch, SumMetric, Sums, Values, ratio


def sessions_of(lengths: Int[Array | np.ndarray, " sessions"], batch: int) -> Int[Array, " batch"]:
    """Return the session of each sample, where sessions follow each other.

    Args:
        lengths: Samples of each session; 0 is allowed.
        batch: Samples of the batch; those past the last session get a session of their own.

    Example:
        >>> import jax.numpy as jnp
        >>> sessions_of(jnp.array([2, 1]), batch=4).tolist()
        [0, 0, 1, 2]
    """
    ends = jnp.cumsum(jnp.asarray(lengths))
    return jnp.searchsorted(ends, jnp.arange(batch), side="right").astype(jnp.int32)


def run_starts(first: Array) -> Int[Array, " batch"]:
    """Return the start of the run that each position belongs to.

    Args:
        first: ``[batch]`` bool, where a run starts; true at position 0.
    """
    return jax.lax.cummax(jnp.where(first, jnp.arange(len(first)), 0))


def differs_from_previous(x: Array) -> Array:
    """Return ``[batch]`` bool: where a value differs from the one before; true at position 0."""
    return jnp.concatenate([jnp.ones(1, bool), x[1:] != x[:-1]])


@dataclasses.dataclass(frozen=True, eq=False)
class Sorted:
    """The samples of a batch, sorted by session and within it by a key.

    Attributes:
        order: ``[batch]`` positions in the batch.
        session: ``[batch]`` number of the session, counted from 0; ``batch`` where left out.
        start: ``[batch]`` start of the session.
        tie: ``[batch]`` number of the run of equal keys.
        tie_start: ``[batch]`` start of that run.
    """

    order: Int[Array, " batch"]
    session: Int[Array, " batch"]
    start: Int[Array, " batch"]
    tie: Int[Array, " batch"]
    tie_start: Int[Array, " batch"]


def sort_sessions(
    key: Float[Array, " batch"], sessions: Int[Array, " batch"], kept: Bool[Array, " batch"]
) -> Sorted:
    """Sort the samples that are kept by session and key; the others come last."""
    order = jnp.lexsort((key, sessions, ~kept))
    kept, ids, key = kept[order], sessions[order], key[order]
    new_session = differs_from_previous(ids) | differs_from_previous(kept)
    new_key = new_session | differs_from_previous(key)
    return Sorted(
        order,
        jnp.where(kept, jnp.cumsum(new_session) - 1, len(key)),
        run_starts(new_session),
        jnp.cumsum(new_key) - 1,
        run_starts(new_key),
    )


def rank_in_session(
    scores: Float[Array, " batch"], sessions: Int[Array, " batch"]
) -> Int[Array, " batch"]:
    """Count the samples of the same session with a higher score; equal scores share a rank."""
    order = jnp.lexsort((-scores, sessions))
    new_session = differs_from_previous(sessions[order])
    new_score = new_session | differs_from_previous(scores[order])
    ranks = run_starts(new_score) - run_starts(new_session)
    return jnp.zeros_like(ranks).at[order].set(ranks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionRecall(SumMetric):
    """The share of the positive samples ranked high in their session (``recall_session_level``).

    A sample is taken for positive if fewer than ``top`` samples of its session, within the batch,
    have a higher prediction. No value without positives. Under ``compat="torchrec"`` samples of
    weight 0 take a rank too.

    Attributes:
        top: How many ranks count.
        rank_labels: Whether samples are positive whose label ranks below ``top``, instead of the
            samples of label 1.
        sessions: Name under which `update` gets the session of each sample, ``[batch]`` or
            ``[tasks, batch]`` int32.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = SessionRecall(top=1, window=None)
        >>> predictions, labels = jnp.array([0.9, 0.1, 0.2, 0.3]), jnp.array([1.0, 0.0, 1.0, 0.0])
        >>> state = metric.update(
        ...     metric.init(), predictions, labels, session=jnp.array([7, 7, 8, 8])
        ... )
        >>> metric.compute(state)["lifetime_recall_session_level"].tolist()
        [0.5]
    """

    top: int
    rank_labels: bool = False
    sessions: str = "session"

    name: ClassVar[str] = "recall_session_level"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top < 1:
            raise ValueError(f"{type(self).__name__}: top={self.top} must be 1 or more")

    @property
    def required(self) -> tuple[str, ...]:
        return (self.sessions,)

    @property
    def domains(self) -> tuple[Domain | None, Domain | None]:
        return NUMBER, NUMBER if self.rank_labels else LABEL

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        sessions = batch.inputs[self.sessions]

        def on_top(scores: Float[Array, "tasks batch"]) -> Float[Array, "tasks batch"]:
            if self.compat is None:
                scores = jnp.where(batch.real, scores, -jnp.inf)
            return (jax.vmap(rank_in_session)(scores, sessions) < self.top).astype(jnp.float32)

        predicted = on_top(batch.predictions)
        labels = on_top(batch.labels) if self.rank_labels else batch.labels
        weights = batch.weights
        return {
            "true_positives": (weights * predicted * labels).sum(axis=1),
            "false_positives": (weights * predicted * (1 - labels)).sum(axis=1),
            "false_negatives": (weights * (1 - predicted) * labels).sum(axis=1),
        }

    def values(self, sums: Sums) -> Values:
        positives = sums["true_positives"] + sums["false_negatives"]
        return {self.name: ratio(sums["true_positives"], positives)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionPrecision(SessionRecall):
    """The share of positive samples among those ranked high in their session.

    Reported as ``precision_session_level``; ranks and options as in `SessionRecall`.
    """

    name: ClassVar[str] = "precision_session_level"

    def values(self, sums: Sums) -> Values:
        predicted = sums["true_positives"] + sums["false_positives"]
        return {self.name: ratio(sums["true_positives"], predicted)}
