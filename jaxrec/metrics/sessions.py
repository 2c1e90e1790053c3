"""Metrics of the order of samples within sessions or users, each of which is within one batch."""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrec.metrics.domain import LABEL, NUMBER, Domains
from jaxrec.metrics.metric import Batch, SumMetric, Sums, Values, ratio


def sessions_of(lengths: Int[Array | np.ndarray, " sessions"], batch: int) -> Int[Array, " batch"]:
    """Return the session number of each sample, ``[batch]`` int32, from the sessions' lengths.

    Args:
        lengths: Number of samples of each session, in the order of the batch; may be 0.
        batch: Number of samples of the batch. Samples after the last session form one more session.

    Example:
        >>> import jax.numpy as jnp
        >>> sessions_of(jnp.array([2, 1]), batch=4).tolist()
        [0, 0, 1, 2]
    """
    ends = jnp.cumsum(jnp.asarray(lengths))
    return jnp.searchsorted(ends, jnp.arange(batch), side="right").astype(jnp.int32)


def run_starts(first: Array) -> Int[Array, " batch"]:
    """Return ``[batch]`` the position where each position's run starts.

    ``first`` ``[batch]`` marks the starts of runs, among them position 0.
    """
    # A cumulative maximum carries the last marked position on.
    return jax.lax.cummax(jnp.where(first, jnp.arange(len(first)), 0))


def differs_from_previous(x: Any, xp: ModuleType = jnp) -> Any:
    """Return ``[batch]`` bool: whether a value differs from the one before; true at position 0.

    ``xp`` is jax.numpy or NumPy.
    """
    return xp.concatenate([xp.ones(1, bool), x[1:] != x[:-1]])


@dataclasses.dataclass(frozen=True, eq=False)
class Sorted:
    """The samples of a batch, sorted by session and within a session by a key.

    Attributes:
        order: Position in the batch of each sorted sample.
        session: Number of the sample's session, from 0; ``batch`` if the sample is left out.
        start: Sorted position where the sample's session starts.
        tie: Number of the run of equal keys that the sample is in, from 0.
        tie_start: Sorted position where that run starts.
    """

    order: Int[Array, " batch"]
    session: Int[Array, " batch"]
    start: Int[Array, " batch"]
    tie: Int[Array, " batch"]
    tie_start: Int[Array, " batch"]


def sort_sessions(
    key: Float[Array, " batch"], sessions: Int[Array, " batch"], kept: Bool[Array, " batch"]
) -> Sorted:
    """Sort samples by session and ascending key; samples that are not ``kept`` come last."""
    # A sort has static shapes, whatever the number and the lengths of the sessions.
    order = jnp.lexsort((key, sessions, ~kept))
    kept, ids, key = kept[order], sessions[order], key[order]
    new_session = differs_from_previous(ids) | differs_from_previous(kept)
    new_key = new_session | differs_from_previous(key)
    return Sorted(
        order,
        # JAX's segment sums drop the number `batch`, which is outside of the segments.
        jnp.where(kept, jnp.cumsum(new_session) - 1, len(key)),
        run_starts(new_session),
        jnp.cumsum(new_key) - 1,
        run_starts(new_key),
    )


def rank_in_session(
    scores: Float[Array, " batch"], sessions: Int[Array, " batch"]
) -> Int[Array, " batch"]:
    """Return for each sample how many samples of its session score higher, ``[batch]``."""
    order = jnp.lexsort((-scores, sessions))
    new_session = differs_from_previous(sessions[order])
    new_score = new_session | differs_from_previous(scores[order])
    # The rank is the distance from the session's start to the start of the run of equal scores.
    ranks = run_starts(new_score) - run_starts(new_session)
    return jnp.zeros_like(ranks).at[order].set(ranks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionMetric(SumMetric):
    """A metric of sessions; all samples of a session are in one batch.

    ``sessions`` is the name of the session numbers among the inputs of `update`.
    """

    sessions: str = "session"

    @property
    def required(self) -> tuple[str, ...]:
        return (self.sessions,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionRecall(SessionMetric):
    """The share of the positive samples that rank high in their session (``recall_session_level``).

    A sample ranks high if fewer than ``top`` samples of its session have a higher prediction.
    Without positive samples the value is undefined. Under ``compat="torchrec"`` samples of weight 0
    take a rank, too.

    Attributes:
        top: Number of high ranks.
        rank_labels: False: samples of label 1 are positive. True: a sample is positive if fewer
            than ``top`` samples of its session have a higher label.
        sessions: Name of the session numbers among the inputs of `update`, ``[batch]`` or
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

    name: ClassVar[str] = "recall_session_level"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top < 1:
            raise ValueError(f"{type(self).__name__}: top={self.top} must be 1 or more")

    @property
    def domains(self) -> Domains:
        return NUMBER, NUMBER if self.rank_labels else LABEL

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        sessions = batch.inputs[self.sessions]

        def on_top(scores: Float[Array, "tasks batch"]) -> Float[Array, "tasks batch"]:
            # Padding must take no rank of a sample.
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
    """The share of positive samples among the samples that rank high in their session.

    Reports ``precision_session_level``. Ranks and options are as in `SessionRecall`.
    """

    name: ClassVar[str] = "precision_session_level"

    def values(self, sums: Sums) -> Values:
        predicted = sums["true_positives"] + sums["false_positives"]
        return {self.name: ratio(sums["true_positives"], predicted)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedAUC(SessionMetric):
    """The mean over sessions of the area under the ROC curve (``gauc``).

    A session's samples are in one batch. Sessions with samples of both labels count. A pair weighs
    the product of its two weights, and a pair of equal predictions counts one half. Zhou et al.
    2018, "Deep interest network for click-through rate prediction", section 6.2.
    ``gauc_num_samples`` is the number of sessions.

    Three things differ under ``compat="torchrec"``. A positive sample does not rank above a
    negative sample of equal prediction that comes later in the batch. Sessions are left out if each
    prediction equals the session's first, or is 0. The mean is ``(sum + 1e-9) / (sessions +
    2e-9)``, which is one half without sessions.

    Attributes:
        weighted_by: Weight of a session in the mean. "sessions": 1. "samples": the total weight of
            its samples, as in Zhou et al.
        sessions: Name of the session numbers among the inputs of `update`, ``[batch]`` or
            ``[tasks, batch]`` int32; `sessions_of` makes them from TorchRec's ``num_candidates``.
    """

    weighted_by: Literal["sessions", "samples"] = "sessions"

    name: ClassVar[str] = "gauc"
    domains: ClassVar[Domains] = (NUMBER, LABEL)

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        kept = jnp.ones_like(batch.real) if self.compat else batch.real
        sessions = batch.inputs[self.sessions].astype(jnp.int32)
        areas, weights, counts = jax.vmap(
            functools.partial(_areas, torchrec=self.compat is not None)
        )(batch.predictions, batch.labels, batch.weights, sessions, kept)
        sizes = weights if self.weighted_by == "samples" else jnp.ones_like(weights)
        return {
            "auc": jnp.where(counts, sizes * areas, 0).sum(axis=1),
            "size": jnp.where(counts, sizes, 0).sum(axis=1),
            "sessions": counts.sum(axis=1).astype(jnp.float32),
        }

    def values(self, sums: Sums) -> Values:
        mean = ratio(sums["auc"], sums["size"])
        if self.compat is not None:
            mean = (sums["auc"] + 1e-9) / (sums["size"] + 2e-9)
        return {"gauc": mean, "gauc_num_samples": sums["sessions"]}


def _areas(
    predictions: Float[Array, " batch"],
    labels: Float[Array, " batch"],
    weights: Float[Array, " batch"],
    sessions: Int[Array, " batch"],
    kept: Bool[Array, " batch"],
    *,
    torchrec: bool = False,
) -> tuple[Float[Array, " sessions"], Float[Array, " sessions"], Bool[Array, " sessions"]]:
    """Return ``[sessions]`` areas under the ROC curve, weights, and whether each is defined."""
    # A batch has at most as many sessions as samples, a static number. Further ones are undefined.
    samples = len(labels)
    ranked = sort_sessions(predictions, sessions, kept)
    positive = (weights * labels)[ranked.order]
    negative = (weights * (1 - labels))[ranked.order]

    def of_sessions(x: Array) -> Float[Array, " sessions"]:
        return jax.ops.segment_sum(x, ranked.session, samples)

    until = _cumulate(negative, ranked.start)
    # Weight of the negative samples that rank below each sample.
    if torchrec:
        below = until
    else:
        # Negatives before the run of equal predictions count whole, those within it half.
        tied = jax.ops.segment_sum(negative, ranked.tie, samples)[ranked.tie]
        below = (until - negative)[ranked.tie_start] + tied / 2
    positives, negatives = of_sessions(positive), of_sessions(negative)
    counts = (positives > 0) & (negatives > 0)
    pairs = positives * negatives
    won = of_sessions(positive * below)
    if torchrec:
        areas = won / (pairs + 1e-10)
        counts &= ~_all_alike(predictions, ranked)
    else:
        areas = won / jnp.where(counts, pairs, 1)
    return areas, positives + negatives, counts


def _cumulate(x: Float[Array, " batch"], start: Int[Array, " batch"]) -> Float[Array, " batch"]:
    """Return cumulative sums ``[batch]`` within sessions; ``start`` is where each one starts."""

    # Not a difference of sums over the whole batch: float32 would lose the digits of a short
    # session at its end.
    def join(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return b[0], b[1] + jnp.where(a[0] == b[0], a[1], 0)

    # log(batch) passes over the batch; a scan would take the samples one by one.
    return jax.lax.associative_scan(join, (start, x))[1]


def _all_alike(predictions: Float[Array, " batch"], ranked: Sorted) -> Bool[Array, " sessions"]:
    """Return ``[sessions]`` whether all predictions equal the session's first, or are 0."""
    samples = len(predictions)
    first = jax.ops.segment_min(ranked.order, ranked.session, samples)
    of_first = predictions[jnp.clip(first, 0, samples - 1)][
        jnp.clip(ranked.session, 0, samples - 1)
    ]
    own = predictions[ranked.order]
    other = ((own != of_first) & (own != 0)).astype(jnp.int32)
    return jax.ops.segment_max(other, ranked.session, samples) <= 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserAUC(SumMetric):
    """Means over users of the area under the ROC curve (``uauc``, ``wuauc``).

    A user's samples are in one batch; if they come in several batches, take `AUC` with ``groups``.
    Users with samples of both labels count. A pair weighs the product of its two weights, and a
    pair of equal predictions counts one half. Users have equal weights in ``uauc``, and the total
    weight of their samples in ``wuauc``: Zhou et al. 2018, "Deep interest network for click-through
    rate prediction", section 6.2. ``uauc_num_users`` adds up the users of the batches.

    ``compat`` must be None: TorchRec's sort rounds predictions to 1e-4 or less.

    Attributes:
        users: Name of the user numbers among the inputs of `update`, ``[batch]`` or
            ``[tasks, batch]`` int32.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = UserAUC(window=None)
        >>> state = metric.update(
        ...     metric.init(),
        ...     predictions=jnp.array([0.9, 0.1, 0.2, 0.3, 0.4]),
        ...     labels=jnp.array([1.0, 0.0, 1.0, 0.0, 0.0]),
        ...     users=jnp.array([7, 7, 8, 8, 8]),
        ... )
        >>> values = metric.compute(state)
        >>> values["lifetime_uauc"].tolist(), round(values["lifetime_wuauc"].item(), 3)
        ([0.5], 0.4)
    """

    users: str = "users"

    name: ClassVar[str] = "uauc"
    domains: ClassVar[Domains] = (NUMBER, LABEL)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compat is not None:
            raise ValueError(
                "UserAUC: TorchRec rounds predictions as it sorts them, and its values cannot be "
                "given; leave compat out, or take GroupedAUC"
            )

    @property
    def required(self) -> tuple[str, ...]:
        return (self.users,)

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        users = batch.inputs[self.users].astype(jnp.int32)
        areas, weights, counts = jax.vmap(_areas)(
            batch.predictions, batch.labels, batch.weights, users, batch.real
        )
        areas, weights = jnp.where(counts, areas, 0), jnp.where(counts, weights, 0)
        return {
            "auc": areas.sum(axis=1),
            "users": counts.sum(axis=1).astype(jnp.float32),
            "weighted_auc": (weights * areas).sum(axis=1),
            "weights": weights.sum(axis=1),
        }

    def values(self, sums: Sums) -> Values:
        return {
            "uauc": ratio(sums["auc"], sums["users"]),
            "wuauc": ratio(sums["weighted_auc"], sums["weights"]),
            "uauc_num_users": sums["users"],
        }
