"""Metrics of the cross entropy of predicted probabilities, plain and normalized."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrec.metrics.domain import LABEL, PROBABILITY, Domains
from jaxrec.metrics.metric import ETA, Batch, SumMetric, Sums, SumState, Values, ratio
from jaxrec.metrics.sums import sum_by_place


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormalizedEntropy(SumMetric):
    """Cross entropy, divided by the cross entropy of always predicting the mean label (``ne``).

    ``NE = sum -w (y log p + (1 - y) log(1 - p)) / (-pos log m - neg log(1 - m))`` with
    ``pos = sum w y``, ``neg = sum w (1 - y)`` and ``m = pos / (pos + neg)``. Lower is better; a
    model that knows only the mean has 1. He et al. 2014, "Practical lessons from predicting clicks
    on ads at Facebook", section 3. Probabilities are clipped to ``[1e-12, 1 - 1e-12]``, as in
    TorchRec.

    NE is undefined if all labels are equal. ``compat="torchrec"`` clips ``m``, too, which gives a
    huge number there.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = NormalizedEntropy(window=None)
        >>> state = metric.update(metric.init(), jnp.array([0.5, 0.5]), jnp.array([0.0, 1.0]))
        >>> round(metric.compute(state)["lifetime_ne"].item(), 6)
        1.0
    """

    name: ClassVar[str] = "ne"
    domains: ClassVar[Domains] = (PROBABILITY, LABEL)

    def probabilities(self, batch: Batch) -> Float[Array, "tasks batch"]:
        """Return the probabilities to compare with the labels, ``[tasks, batch]``."""
        return batch.predictions

    def sample_weights(self, batch: Batch) -> Float[Array, "tasks batch"]:
        """Return the weight of each sample, ``[tasks, batch]``."""
        return batch.weights

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        weights = self.sample_weights(batch)
        loss = cross_entropy(self.probabilities(batch), batch.labels)
        return {
            "cross_entropy": (weights * loss).sum(axis=1),
            "positives": (weights * batch.labels).sum(axis=1),
            "weights": weights.sum(axis=1),
        }

    def values(self, sums: Sums) -> Values:
        return {self.name: self.normalized(sums["cross_entropy"], sums)}

    def normalized(
        self, cross_entropy: Float[np.ndarray, "tasks ..."], sums: Sums
    ) -> Float[np.ndarray, "tasks ..."]:
        """Divide total losses ``[tasks, ...]`` by the loss of always predicting the mean label."""
        norm = entropy_of_mean(sums["positives"], sums["weights"], clipped=self.compat is not None)
        return ratio(cross_entropy, norm)


def cross_entropy(
    probabilities: Float[Array, "*shape"], labels: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Return ``-y log p - (1 - y) log(1 - p)`` in nats, with p in ``[1e-12, 1 - 1e-12]``."""
    # In float32 1 - 1e-12 is 1, and clipping p would not bound log(1 - p): bound the logarithms.
    least = np.float32(np.log(ETA))
    log_p = jnp.maximum(jnp.log(probabilities), least)
    log_not_p = jnp.maximum(jnp.log1p(-probabilities), least)
    return -(labels * log_p + (1 - labels) * log_not_p)


def entropy_of_mean(
    positives: Float[np.ndarray, "*shape"],
    weights: Float[np.ndarray, "*shape"],
    *,
    clipped: bool = False,
) -> Float[np.ndarray, "*shape"]:
    """Return the total cross entropy, in nats, of predicting the mean label for every sample."""
    mean = positives / np.maximum(weights, ETA)
    if clipped:
        mean = np.clip(mean, ETA, 1 - ETA)
    negatives = weights - positives
    # 0 log 0 is 0 here, and NaN in NumPy: `where` twice, so that the logarithm never sees a 0.
    of_positives = np.where(positives > 0, positives * np.log(np.where(mean > 0, mean, 1)), 0)
    of_negatives = np.where(negatives > 0, negatives * np.log1p(-np.where(mean < 1, mean, 0)), 0)
    return -of_positives - of_negatives


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogLoss(NormalizedEntropy):
    """The mean cross entropy, in nats (``logloss``); ``compat="torchrec"`` gives it in bits."""

    name: ClassVar[str] = "logloss"

    def values(self, sums: Sums) -> Values:
        nats = ratio(sums["cross_entropy"], sums["weights"])
        return {self.name: nats / np.log(2) if self.compat else nats}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnweightedNormalizedEntropy(NormalizedEntropy):
    """`NormalizedEntropy` with all weights 1 (``unweighted_ne``).

    Padding is left out; under ``compat="torchrec"`` it counts like any sample.
    """

    name: ClassVar[str] = "unweighted_ne"

    def sample_weights(self, batch: Batch) -> Float[Array, "tasks batch"]:
        if self.compat is not None:
            return jnp.ones_like(batch.weights)
        return batch.real.astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositiveNormalizedEntropy(NormalizedEntropy):
    """The part of `NormalizedEntropy` from positive labels (``ne_positive``).

    It is ``sum -w y log p``, divided by the same norm.
    """

    name: ClassVar[str] = "ne_positive"

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        weights = self.sample_weights(batch)
        loss = cross_entropy(batch.predictions, jnp.ones_like(batch.labels))
        return super().sums(batch) | {
            "cross_entropy": (weights * batch.labels * loss).sum(axis=1),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecalibratedNormalizedEntropy(NormalizedEntropy):
    """`NormalizedEntropy` of recalibrated probabilities (reported as ``ne``, as in TorchRec).

    If training used only a share ``c`` of the negative samples, its probabilities are too high;
    ``p' = p / (p + (1 - p) / c)`` corrects them. He et al. 2014, "Practical lessons from predicting
    clicks on ads at Facebook", section 6.3.

    Attributes:
        coefficient: ``c``, above 0.
    """

    coefficient: float = 1.0

    name: ClassVar[str] = "ne"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_coefficient(self, self.coefficient)

    def probabilities(self, batch: Batch) -> Float[Array, "tasks batch"]:
        return recalibrated(batch.predictions, self.coefficient)


def recalibrated(
    probabilities: Float[Array, "*shape"], coefficient: float
) -> Float[Array, "*shape"]:
    """Return ``p / (p + (1 - p) / c)`` for probabilities ``p`` and the coefficient ``c``."""
    return probabilities / (probabilities + (1 - probabilities) / coefficient)


def check_coefficient(metric: SumMetric, coefficient: float) -> None:
    """Raise a ValueError if a coefficient is not above 0."""
    if not coefficient > 0:
        raise ValueError(f"{type(metric).__name__}: coefficient={coefficient} must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationFreeNormalizedEntropy(NormalizedEntropy):
    """Cross entropy, divided by the cross entropy of the mean prediction (``cali_free_ne``).

    It is `NormalizedEntropy` with the norm ``-pos log q - neg log(1 - q)`` and
    ``q = sum w p / sum w``. A wrong mean enlarges the norm, too, so that it does not count against
    the model. Undefined if all predictions are 0 or all are 1.

    ``compat="torchrec"`` divides NE, not the cross entropy, by this norm in bits, which gives a
    number that shrinks with the number of samples.
    """

    name: ClassVar[str] = "cali_free_ne"

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        predicted = (self.sample_weights(batch) * batch.predictions).sum(axis=1)
        return super().sums(batch) | {"predictions": predicted}

    def values(self, sums: Sums) -> Values:
        positives, weights = sums["positives"], sums["weights"]
        mean = ratio(sums["predictions"], weights)
        mean = np.where((mean > 0) & (mean < 1), mean, np.nan)
        norm = -positives * np.log(mean) - (weights - positives) * np.log1p(-mean)
        if self.compat is None:
            return {self.name: ratio(sums["cross_entropy"], norm)}
        return {self.name: self.normalized(sums["cross_entropy"], sums) / (norm / np.log(2))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountsExamples(SumMetric):
    """Mixin that also reports ``total_examples``, the number of samples with a weight above 0."""

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        # The next class in the order of inheritance has the sums.
        sums = super().sums(batch)  # type: ignore[safe-super]
        return sums | {"examples": (batch.weights > 0).sum(axis=1).astype(jnp.float32)}

    def compute(self, state: SumState) -> Values:
        return super().compute(state) | {"total_examples": state.lifetime["examples"].on_host()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingNormalizedEntropy(CountsExamples, NormalizedEntropy):
    """`NormalizedEntropy` with its number of samples (``ne``, ``total_examples``).

    ``total_examples`` counts all samples so far whose weight is above 0.
    """

    name: ClassVar[str] = "ne"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentedNormalizedEntropy(NormalizedEntropy):
    """`NormalizedEntropy` of each group of samples (``segmented_ne``, ``[tasks, groups]``).

    Attributes:
        num_groups: Number of groups. Group numbers are below it.
        groups: Name of the group numbers among the inputs of `update`, ``[batch]`` or
            ``[tasks, batch]`` int32.

    Raises:
        ValueError: From `compute`: a sample had a group number outside of ``[0, num_groups)``.
    """

    num_groups: int
    groups: str = "groups"

    name: ClassVar[str] = "segmented_ne"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_groups < 1:
            raise ValueError(f"SegmentedNormalizedEntropy: num_groups={self.num_groups} must be 1+")

    @property
    def required(self) -> tuple[str, ...]:
        return (self.groups,)

    def sums(self, batch: Batch) -> dict[str, Float[Array, "tasks ..."]]:
        weights, labels = batch.weights, batch.labels
        loss = cross_entropy(batch.predictions, labels)
        groups = batch.inputs[self.groups].astype(jnp.int32)
        inside = (groups >= 0) & (groups < self.num_groups)

        def by_group(x: Float[Array, "tasks batch"]) -> Float[Array, "tasks groups"]:
            return sum_by_group(x, groups, self.num_groups)

        return {
            "cross_entropy": by_group(weights * loss),
            "positives": by_group(weights * labels),
            "weights": by_group(weights),
            "outside": (batch.real & ~inside).sum(axis=1).astype(jnp.float32),
        }

    def compute(self, state: SumState) -> Values:
        self.check_groups(state, self.groups, self.num_groups)
        return super().compute(state)


def sum_by_group(
    x: Float[Array, "tasks batch"], groups: Array, num_groups: int
) -> Float[Array, "tasks groups"]:
    """Sum the samples of each group; leave out samples with other group numbers."""
    # JAX would count negative indices from the end.
    return sum_by_place(x, jnp.where(groups < 0, num_groups, groups), num_groups)
