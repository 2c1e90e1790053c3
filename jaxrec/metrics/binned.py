"""AUC, AUPRC and RAUC over all samples, computed from histograms with a bound on the error."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrec.metrics.domain import LABEL, NUMBER, PROBABILITY, Domain, Domains
from jaxrec.metrics.metric import Batch, SumMetric, Sums, SumState, Values, ratio
from jaxrec.metrics.sums import sum_by_place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bins:
    """Equal intervals of a number, or of the log-odds of a probability.

    Attributes:
        count: Number of intervals.
        low, high: Lower end of the first interval and upper end of the last. Numbers beyond fall
            into these two intervals.
        spacing: ``"logit"``: intervals of ``log p - log(1 - p)``, which keeps small probabilities
            apart. ``"linear"``: intervals of the number itself.
    """

    count: int = 8192
    low: float = -16.0
    high: float = 16.0
    spacing: Literal["logit", "linear"] = "logit"

    def __post_init__(self) -> None:
        if self.count < 1 or not self.low < self.high:
            raise ValueError(
                f"Bins: count={self.count} must be 1 or more and low={self.low} below "
                f"high={self.high}"
            )
        if self.spacing not in ("logit", "linear"):
            raise ValueError(f"Bins: spacing={self.spacing!r} must be 'logit' or 'linear'")

    @property
    def domain(self) -> Domain:
        """Domain of the numbers that have an interval."""
        return PROBABILITY if self.spacing == "logit" else NUMBER

    def of(self, x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Return the int32 interval of each number, from 0 to ``count - 1``."""
        if self.spacing == "logit":
            x = jnp.log(x) - jnp.log1p(-x)
        # NaN has no interval: any will do, since `add` makes the sums of a broken sample NaN.
        place = (x - self.low) * (self.count / (self.high - self.low))
        return jnp.nan_to_num(jnp.clip(place, 0, self.count - 1)).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinnedAUC(SumMetric):
    """The area under the ROC curve over all samples, from histograms of the predictions.

    A pair of a positive and a negative sample is compared exactly if the predictions fall into
    different bins, and counts one half otherwise. The exact area lies within ``auc_error`` of
    ``auc``; ``auc_error = sum_b pos_b neg_b / (2 pos neg)`` is reported, too. With predictions that
    are spread evenly over ``B`` bins it is ``1 / 2B``.

    The state takes 16 bytes for each task, group and bin. A window takes 8 more for each of
    ``max_batches`` batches, so that there is no window by default.

    With groups, the mean over the groups that have samples of both labels is also reported
    (``grouped_auc``, ``grouped_auc_error``).

    Attributes:
        bins: ``jaxrec.metrics.binned.Bins`` of the predictions; 8,192 of the log-odds by default.
        groups: Name of the group numbers among the inputs of `update`, ``[batch]`` or
            ``[tasks, batch]`` int32; None: no groups.
        num_groups: Number of groups. Group numbers are below it.

    Raises:
        ValueError: From `compute`: a sample had a group number outside of ``[0, num_groups)``.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = BinnedAUC()
        >>> state = metric.update(
        ...     metric.init(), jnp.array([0.1, 0.4, 0.4, 0.8]), jnp.array([0.0, 0.0, 1.0, 1.0])
        ... )
        >>> values = metric.compute(state)
        >>> values["lifetime_auc"].tolist(), values["lifetime_auc_error"].tolist()
        ([0.875], [0.125])
    """

    window: int | None = None
    bins: Bins = Bins()
    groups: str | None = None
    num_groups: int = 1

    name: ClassVar[str] = "auc"

    def __post_init__(self) -> None:
        super().__post_init__()
        _no_compat(self)
        if self.num_groups < 1 or (self.groups is None and self.num_groups > 1):
            raise ValueError(
                f"{type(self).__name__}: num_groups={self.num_groups} must be 1 or more, and "
                "groups must name them"
            )

    @property
    def required(self) -> tuple[str, ...]:
        return () if self.groups is None else (self.groups,)

    @property
    def domains(self) -> Domains:
        return self.bins.domain, LABEL

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        if self.groups is None:
            groups = jnp.zeros_like(batch.real, jnp.int32)
        else:
            groups = batch.inputs[self.groups].astype(jnp.int32)
        inside = (groups >= 0) & (groups < self.num_groups)
        count = self.num_groups * self.bins.count
        # One histogram for all groups: samples with other group numbers fall behind its end, and
        # `segment_sum` drops them.
        place = jnp.where(inside, groups * self.bins.count + self.bins.of(batch.predictions), count)
        positives = batch.weights * batch.labels

        def histogram(x: Float[Array, "tasks batch"]) -> Float[Array, "tasks groups bins"]:
            flat = sum_by_place(x, place, count)
            return flat.reshape(self.tasks, self.num_groups, self.bins.count)

        return {
            "positives": histogram(positives),
            "negatives": histogram(batch.weights - positives),
            "outside": (batch.real & ~inside).sum(axis=1).astype(jnp.float32),
        }

    def values(self, sums: Sums) -> Values:
        positives, negatives = sums["positives"], sums["negatives"]
        area, error, _ = self.area(positives.sum(axis=1), negatives.sum(axis=1))
        values = {self.name: area, f"{self.name}_error": error}
        if self.groups is None:
            return values
        area, error, counts = self.area(positives, negatives)
        number = counts.sum(axis=1).astype(np.float64)
        return values | {
            f"grouped_{self.name}": ratio(np.where(counts, area, 0).sum(axis=1), number),
            f"grouped_{self.name}_error": ratio(np.where(counts, error, 0).sum(axis=1), number),
        }

    def area(
        self, positives: Float[np.ndarray, "*rows bins"], negatives: Float[np.ndarray, "*rows bins"]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the area of histograms, its error, and whether it is defined, ``[*rows]`` each."""
        pairs = positives.sum(axis=-1) * negatives.sum(axis=-1)
        below = np.cumsum(negatives, axis=-1) - negatives
        tied = (positives * negatives).sum(axis=-1) / 2
        won = (positives * below).sum(axis=-1) + tied
        area = np.where(pairs == 0, 0.5, won / np.where(pairs == 0, 1, pairs))
        return area, np.where(pairs == 0, 0, tied / np.where(pairs == 0, 1, pairs)), pairs > 0

    def compute(self, state: SumState) -> Values:
        self.check_groups(state, self.groups, self.num_groups)
        return super().compute(state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinnedAUPRC(BinnedAUC):
    """The area under the precision-recall curve over all samples, from histograms (`BinnedAUC`).

    Each bin counts as one threshold. Let ``F`` and ``N`` be the numbers of positives and negatives
    of higher bins, and ``F'`` and ``N'`` these numbers with this bin's samples. The precision at a
    positive sample of the bin is between ``F / (F + N')`` and ``F' / (F' + N)``, whatever the order
    within the bin. The two ends give two areas; ``auprc_error`` is the distance to the farther one.
    Options are as in `BinnedAUC`.
    """

    name: ClassVar[str] = "auprc"

    def area(
        self, positives: Float[np.ndarray, "*rows bins"], negatives: Float[np.ndarray, "*rows bins"]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        total = positives.sum(axis=-1)
        # From the highest bin down: a threshold takes all bins above it.
        positives, negatives = positives[..., ::-1], negatives[..., ::-1]
        true_positives, false = np.cumsum(positives, axis=-1), np.cumsum(negatives, axis=-1)

        def mean(true_positives: np.ndarray, false: np.ndarray) -> np.ndarray:
            predicted = true_positives + false
            precision = true_positives / np.where(predicted > 0, predicted, 1)
            return (positives * precision).sum(axis=-1) / np.where(total > 0, total, 1)

        area = mean(true_positives, false)
        best = mean(true_positives, false - negatives)
        worst = mean(true_positives - positives, false)
        return area, np.maximum(best - area, area - worst), total > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinnedRAUC(SumMetric):
    """Share of pairs with different labels that predictions put in order, over all samples.

    It is `regression_auc` from a histogram over predictions and labels. Pairs that differ in both
    bins are compared exactly. Other pairs of different label bins count one half. Pairs within a
    label bin do not count. Let ``M`` be the weight of the pairs of different label bins, ``C`` the
    weight of those in the right order, ``P`` the weight of those within a prediction bin, and ``L``
    the weight of the pairs within a label bin. The exact value lies in
    ``[C / (M + L), (C + P + L) / (M + L)]``; ``rauc_error`` is the distance to the farther end.

    Attributes:
        bins: ``jaxrec.metrics.binned.Bins`` of the predictions.
        label_bins: ``Bins`` of the labels.
        one_label_a_bin: Whether each label bin has a single label, as with ratings. Pairs within a
            label bin are then ties, and ``L`` is 0.

    Example:
        >>> import jax.numpy as jnp
        >>> stars = Bins(count=5, low=0.5, high=5.5, spacing="linear")
        >>> metric = BinnedRAUC(bins=stars, label_bins=stars, one_label_a_bin=True)
        >>> predictions, labels = jnp.array([1.0, 2.0, 4.0]), jnp.array([2.0, 5.0, 3.0])
        >>> state = metric.update(metric.init(), predictions, labels)
        >>> round(metric.compute(state)["lifetime_rauc"].item(), 3)
        0.667
    """

    window: int | None = None
    bins: Bins = Bins(count=256)
    label_bins: Bins = Bins(count=256, low=0.0, high=1.0, spacing="linear")
    one_label_a_bin: bool = False

    name: ClassVar[str] = "rauc"

    def __post_init__(self) -> None:
        super().__post_init__()
        _no_compat(self)

    @property
    def domains(self) -> Domains:
        return self.bins.domain, self.label_bins.domain

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        shape = (self.bins.count, self.label_bins.count)
        place = self.bins.of(batch.predictions) * shape[1] + self.label_bins.of(batch.labels)
        flat = sum_by_place(batch.weights, place, shape[0] * shape[1])
        return {"weights": flat.reshape(self.tasks, *shape)}

    def values(self, sums: Sums) -> Values:
        cells = sums["weights"]
        # For each cell the weight of the samples that are lower in both, by cumulative sums over
        # both axes.
        lower = np.cumsum(np.cumsum(cells, axis=1), axis=2)
        both_lower = np.zeros_like(cells)
        both_lower[:, 1:, 1:] = lower[:, :-1, :-1]
        ordered = (cells * both_lower).sum(axis=(1, 2))
        by_label = cells.sum(axis=1)
        compared = _pairs(by_label, axis=1)
        tied = _pairs(cells, axis=2).sum(axis=1)
        unknown = np.zeros_like(compared)
        if not self.one_label_a_bin:
            # A bound on L: the histogram does not know the single weights, so that each sample
            # counts as a pair with itself, too.
            unknown = (by_label**2).sum(axis=1) / 2
        value = ratio(ordered + tied / 2, compared)
        best = ratio(ordered + tied + unknown, compared + unknown)
        worst = ratio(ordered, compared + unknown)
        return {
            "rauc": np.where(compared > 0, value, 0.5),
            "rauc_error": np.where(compared > 0, np.maximum(best - value, value - worst), 0.0),
        }


def _pairs(x: Float[np.ndarray, "..."], axis: int) -> Float[np.ndarray, "..."]:
    """Return the sum of ``x[i] * x[j]`` over all ``i > j`` along an axis: the weight of pairs."""
    return (x * (np.cumsum(x, axis=axis) - x)).sum(axis=axis)


def _no_compat(metric: SumMetric) -> None:
    if metric.compat is not None:
        raise ValueError(
            f"{type(metric).__name__}: TorchRec has no binned metrics; leave compat out, or take "
            f"{type(metric).__name__.removeprefix('Binned')}"
        )
