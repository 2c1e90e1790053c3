"""Metrics of predicted probabilities that are ratios of sums over samples."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxrec.metrics.domain import LABEL, WEIGHT, AnyArray, as_numbers, check_domain

Scalar: TypeAlias = Float[Array, ""] | float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BinarySums:
    """Sums over samples, from which normalized entropy, log loss and calibration follow.

    Sums of several batches add up (``+``). A step returns those of its batch, in float32; the host
    adds them in float64, so that nothing is lost over millions of batches.

    Attributes:
        cross_entropy: Sum of ``-w (y log p + (1 - y) log(1 - p))``, in nats.
        predictions: Sum of ``w p``.
        positives: Sum of ``w y``.
        weights: Sum of ``w``.
    """

    cross_entropy: Scalar = 0.0
    predictions: Scalar = 0.0
    positives: Scalar = 0.0
    weights: Scalar = 0.0

    def __add__(self, other: BinarySums) -> BinarySums:
        return jax.tree.map(lambda a, b: a + b, self, other)

    def on_host(self) -> BinarySums:
        """The sums as float64 of the host; waits for the device."""
        return jax.tree.map(np.float64, jax.device_get(self))


def binary_sums(
    logits: Float[Array, " batch"],
    labels: Float[AnyArray, " batch"],
    weights: Float[AnyArray, " batch"] | None = None,
) -> BinarySums:
    """The sums of one batch.

    Args:
        logits: ``[batch]`` log-odds of label 1.
        labels: ``[batch]``, 0 or 1, or probabilities.
        weights: ``[batch]``, 0 where a sample is padding, which may hold anything; None: all 1.

    Raises:
        TypeError: An array does not hold real numbers.
        ValueError: The shapes differ, a label is not between 0 and 1, or a weight is negative or
            not finite. Inside a compiled function such numbers make all sums NaN instead.

    Example:
        >>> import jax.numpy as jnp
        >>> sums = binary_sums(jnp.array([0.0, 0.0]), jnp.array([0.0, 1.0]))
        >>> round(log_loss(sums), 3), round(normalized_entropy(sums), 3), calibration(sums)
        (0.693, 1.0, 1.0)
    """
    who = "binary_sums"
    weights = np.ones(labels.shape) if weights is None else weights
    arguments = {"logits": logits, "labels": labels, "weights": weights}
    given = {name: as_numbers(who, name, array) for name, array in arguments.items()}
    shapes = {name: array.shape for name, array in given.items()}
    if len(shapes["logits"]) != 1 or len(set(shapes.values())) > 1:
        names = ", ".join(f"{name} of {shape}" for name, shape in shapes.items())
        raise ValueError(f"{who} takes arrays of one length, [batch]; got {names}")
    check_domain(who, "weights", given["weights"], WEIGHT)
    check_domain(who, "labels", given["labels"], LABEL, given["weights"], nan=True)
    x, y, w = (jnp.asarray(array, jnp.float32) for array in given.values())
    real = w != 0
    broken = WEIGHT.excludes(w) | (real & LABEL.excludes(y))
    x, y, w = jnp.where(real, x, 0), jnp.where(real, y, 0), jnp.where(broken, jnp.nan, w)
    return BinarySums(
        (w * optax.sigmoid_binary_cross_entropy(x, y)).sum(),
        (w * jax.nn.sigmoid(x)).sum(),
        (w * y).sum(),
        w.sum(),
    )


def log_loss(sums: BinarySums) -> float:
    """The mean cross entropy in nats; NaN of no samples. TorchRec gives it in bits."""
    sums = sums.on_host()
    return _ratio(sums.cross_entropy, sums.weights)


def normalized_entropy(sums: BinarySums) -> float:
    """The mean cross entropy over that of predicting the mean label for every sample.

    1 is a model that knows the mean and nothing more; lower is better. He et al. 2014, "Practical
    lessons from predicting clicks on ads at Facebook", section 3. NaN where all labels are equal:
    there is nothing to know then.
    """
    sums = sums.on_host()
    mean = _ratio(sums.positives, sums.weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -(mean * np.log(mean) + (1 - mean) * np.log1p(-mean))
    return _ratio(_ratio(sums.cross_entropy, sums.weights), entropy)


def calibration(sums: BinarySums) -> float:
    """Predicted over actual positives; 1 is right on average, NaN is no positives."""
    sums = sums.on_host()
    return _ratio(sums.predictions, sums.positives)


def _ratio(numerator: Scalar, denominator: Scalar) -> float:
    return float(numerator / denominator) if denominator > 0 else float("nan")
