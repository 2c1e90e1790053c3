"""Metrics of predicted probabilities that are ratios of sums over samples."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

AnyArray: TypeAlias = Array | np.ndarray
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
        weights: ``[batch]``, 0 where a sample is padding; None: all 1.

    Example:
        >>> import jax.numpy as jnp
        >>> sums = binary_sums(jnp.array([0.0, 0.0]), jnp.array([0.0, 1.0]))
        >>> round(log_loss(sums), 3), round(normalized_entropy(sums), 3), calibration(sums)
        (0.693, 1.0, 1.0)
    """
    labels = jnp.asarray(labels)
    weights = jnp.ones_like(labels) if weights is None else jnp.asarray(weights)
    return BinarySums(
        (weights * optax.sigmoid_binary_cross_entropy(logits, labels)).sum(),
        (weights * jax.nn.sigmoid(logits)).sum(),
        (weights * labels).sum(),
        weights.sum(),
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
