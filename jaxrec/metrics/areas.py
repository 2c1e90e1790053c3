"""Exact areas under curves, computed on the host from arrays or from a window of samples."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Shaped

from jaxrec.metrics.domain import LABEL, NUMBER, WEIGHT, Domain, Domains, as_numbers, check_domain
from jaxrec.metrics.metric import Compat
from jaxrec.metrics.pairs import concordance, count_pairs
from jaxrec.metrics.samples import SampleMetric, Samples


def auc(
    scores: Shaped[np.ndarray, " samples"],
    labels: Shaped[np.ndarray, " samples"],
    weights: Shaped[np.ndarray, " samples"] | None = None,
    *,
    compat: Compat = None,
) -> float:
    """Compute the exact area under the ROC curve, on the host.

    It is the probability that a positive sample scores above a negative one, where equal scores
    count one half (Mann and Whitney 1947, "On a test of whether one of two random variables is
    stochastically larger than the other"; Fawcett 2006, "An introduction to ROC analysis", section
    7).

    Args:
        scores: ``[samples]``, probabilities or logits: only their order matters.
        labels: ``[samples]``, from 0 to 1. A label of 0.3 counts as 0.3 of a positive sample and
            0.7 of a negative one.
        weights: ``[samples]``, 0 or above; None: all 1. A pair weighs the product of its two
            weights.
        compat: ``"torchrec"`` ranks equal scores by the order of the samples. It also leaves out
            the part of the curve before the highest score, which matters if the label there is
            between 0 and 1.

    Returns:
        The area, computed in float64; 0.5 if all samples are of one class, as in TorchRec.

    Raises:
        TypeError: An array does not hold real numbers.
        ValueError: A score is NaN, a label is not between 0 and 1, a weight is negative or not
            finite, or the arrays differ in length.

    Example:
        >>> import numpy as np
        >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1]))
        0.875
    """
    samples = _checked("auc", scores, labels, weights, LABEL)
    true, false = _steps(*samples, merge_ties=compat is None)
    pairs = true.sum() * false.sum()
    if pairs == 0:
        return 0.5
    # For the negative samples of each score: the positive ones above, and half of those beside.
    before = np.cumsum(true) - true
    below = false * (before + 0.5 * true)
    return float((below if compat is None else below[1:]).sum() / pairs)


def average_precision(
    scores: Shaped[np.ndarray, " samples"],
    labels: Shaped[np.ndarray, " samples"],
    weights: Shaped[np.ndarray, " samples"] | None = None,
) -> float:
    """Compute the area under the precision-recall curve, without interpolation, on the host.

    It is the sum over thresholds of the gain in recall times the precision; equal scores share a
    threshold. Davis and Goadrich 2006, "The relationship between precision-recall and ROC curves",
    explain why interpolation is wrong.

    Args:
        scores, labels, weights: As for `auc`.

    Returns:
        The area, computed in float64; 0 without positive samples, as in TorchRec.

    Raises:
        TypeError, ValueError: As for `auc`.

    Example:
        >>> import numpy as np
        >>> average_precision(np.array([0.1, 0.4, 0.6, 0.8]), np.array([0, 1, 0, 1])).__round__(3)
        0.833
    """
    samples = _checked("average_precision", scores, labels, weights, LABEL)
    true, false = _steps(*samples, merge_ties=True)
    if true.sum() == 0:
        return 0.0
    true_positives = np.cumsum(true)
    predicted = true_positives + np.cumsum(false)
    precision = true_positives / np.where(predicted > 0, predicted, 1)
    return float((true * precision).sum() / true.sum())


def regression_auc(
    scores: Shaped[np.ndarray, " samples"],
    labels: Shaped[np.ndarray, " samples"],
    weights: Shaped[np.ndarray, " samples"] | None = None,
    *,
    compat: Compat = None,
) -> float:
    """Compute the share of pairs with different labels in which the higher label scores higher.

    Equal scores count one half, and a pair weighs the product of its two weights. With labels 0 and
    1 it is `auc`. It is also known as concordance (Harrell et al. 1996, "Multivariable prognostic
    models", section 5.5).

    Args:
        scores, weights: As for `auc`.
        labels: ``[samples]``, any numbers.
        compat: ``"torchrec"``: one minus the share of all pairs that are in the wrong order. Pairs
            of equal labels or equal scores are never wrong, and weights do not matter.

    Returns:
        The share, computed in float64 in time ``samples log samples``. Without pairs it is 0.5, or
        1 under ``compat="torchrec"``.

    Raises:
        TypeError, ValueError: As for `auc`, except that labels may be any numbers but NaN.

    Example:
        >>> import numpy as np
        >>> regression_auc(np.array([1.0, 2.0, 3.0]), np.array([5.0, 30.0, 20.0])).__round__(3)
        0.667
    """
    scores, labels, weights = _checked("regression_auc", scores, labels, weights, NUMBER)
    if compat is not None:
        weights = np.ones(scores.size)
    pairs = count_pairs(scores, labels, weights, np)
    if compat is not None:
        return float(1 - pairs.discordant / pairs.total) if pairs.total else 1.0
    ordered, total = concordance(pairs)
    return float(ordered / total) if total > 0 else 0.5


def _steps(
    scores: Float[np.ndarray, " samples"],
    labels: Float[np.ndarray, " samples"],
    weights: Float[np.ndarray, " samples"],
    *,
    merge_ties: bool,
) -> tuple[Float[np.ndarray, " steps"], Float[np.ndarray, " steps"]]:
    """Return the total weight of positives and of negatives at each step, highest score first.

    With ``merge_ties`` a step has the samples of one score, otherwise one sample.
    """
    # Stable, since TorchRec ranks equal scores by the order of the samples.
    order = np.argsort(-scores, kind="stable")
    positives = (weights * labels)[order]
    negatives = weights[order] - positives
    if not merge_ties or scores.size == 0:
        return positives, negatives
    ranked = scores[order]
    # Samples of equal score are adjacent now: they share one step of the curve.
    firsts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
    return np.add.reduceat(positives, firsts), np.add.reduceat(negatives, firsts)


def _checked(
    who: str,
    scores: Shaped[np.ndarray, " samples"],
    labels: Shaped[np.ndarray, " samples"],
    weights: Shaped[np.ndarray, " samples"] | None,
    of_labels: Domain,
) -> tuple[Float[np.ndarray, " samples"], ...]:
    """Check scores, labels and weights, and return them in float64; weights None are all 1.

    Errors begin with ``who``; ``of_labels`` says which labels are valid.
    """
    given = {"scores": scores, "labels": labels}
    if weights is not None:
        given["weights"] = weights
    arrays = {name: np.asarray(as_numbers(who, name, array)) for name, array in given.items()}
    shapes = [array.shape for array in arrays.values()]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        names = ", ".join(f"{name} of {array.shape}" for name, array in arrays.items())
        raise ValueError(f"{who} takes arrays of one length, [samples]; got {names}")
    columns = {name: array.astype(np.float64) for name, array in arrays.items()}
    # NaN has no place in the order, and NumPy would give it one.
    missing = np.isnan(columns["scores"]).sum()
    if missing:
        raise ValueError(f"{who}: {missing} of {shapes[0][0]} scores are NaN")
    check_domain(who, "labels", columns["labels"], of_labels)
    columns.setdefault("weights", np.ones(shapes[0]))
    check_domain(who, "weights", columns["weights"], WEIGHT)
    return columns["scores"], columns["labels"], columns["weights"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AUC(SampleMetric):
    """The area under the ROC curve of the last samples (``window_auc``), computed by `auc`.

    With groups, the means over groups (``window_grouped_auc``, ``window_weighted_grouped_auc``)
    take the groups with samples of both labels. Under ``compat="torchrec"`` they take all groups,
    and a group of a single label counts 0.5. The value is 0.5 if all labels are equal, and NaN if a
    prediction is NaN. `BinnedAUC` computes the area over all samples.

    Attributes:
        label_threshold: Labels of this value or more count as 1, others as 0 (0.039 in TorchRec's
            ``apply_bin``). None: labels are used as they are, from 0 to 1.

    Example:
        >>> import jax.numpy as jnp
        >>> metric = AUC(window=4)
        >>> state = metric.update(
        ...     metric.init(), jnp.array([0.1, 0.4, 0.4, 0.8]), jnp.array([0.0, 0.0, 1.0, 1.0])
        ... )
        >>> metric.compute(state)["window_auc"].tolist()
        [0.875]
    """

    label_threshold: float | None = None

    name: ClassVar[str] = "auc"

    @property
    def domains(self) -> Domains:
        return NUMBER, LABEL if self.label_threshold is None else NUMBER

    def value(self, samples: Samples) -> float:
        return auc(samples.predictions, self._labels(samples), samples.weights, compat=self.compat)

    def counts(self, samples: Samples) -> bool:
        positives = (samples.weights * self._labels(samples)).sum()
        return self.compat is not None or bool(0 < positives < samples.weights.sum())

    def _labels(self, samples: Samples) -> Float[np.ndarray, " samples"]:
        if self.label_threshold is None:
            return samples.labels
        return (samples.labels >= self.label_threshold).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AUPRC(SampleMetric):
    """The area under the precision-recall curve of the last samples (``window_auprc``).

    `average_precision` computes it. With groups, the means over groups take the groups with
    positive samples, and all groups under ``compat="torchrec"``. NaN if a prediction is NaN.

    TorchRec also reports a lifetime value: the mean of the values computed so far, each weighted by
    the weight of the samples in the window. To get it, update a `WeightedAverage` with the value
    and with `weight`.
    """

    name: ClassVar[str] = "auprc"
    domains: ClassVar[Domains] = (NUMBER, LABEL)

    def value(self, samples: Samples) -> float:
        return average_precision(samples.predictions, samples.labels, samples.weights)

    def counts(self, samples: Samples) -> bool:
        return self.compat is not None or bool((samples.weights * samples.labels).sum() > 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RAUC(SampleMetric):
    """Share of pairs with different labels that predictions put in order (``window_rauc``).

    `regression_auc` computes it from the last samples: in a pair in order, the higher label has the
    higher prediction. With groups, the means over groups take the groups with two or more different
    labels, and all groups under ``compat="torchrec"``. NaN if a prediction is NaN.
    """

    name: ClassVar[str] = "rauc"

    def value(self, samples: Samples) -> float:
        return regression_auc(
            samples.predictions, samples.labels, samples.weights, compat=self.compat
        )

    def counts(self, samples: Samples) -> bool:
        return self.compat is not None or bool(np.ptp(samples.labels) > 0)
