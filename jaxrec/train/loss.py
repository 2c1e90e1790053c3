"""Calls and checks of a `Trainer`'s loss function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrec.data.padding import WeightedBatch, num_samples

Outputs = Mapping[str, Array]
Loss = Callable[..., tuple[Float[Array, ""], Outputs]]


def call_loss(
    loss: Loss, model: nnx.Module, batch: Any, *, has_metrics: bool
) -> tuple[Float[Array, ""], Outputs]:
    """Call ``loss(model, batch)``, or ``loss(model, batch, weights)`` for a `WeightedBatch`.

    Args:
        loss: The loss function.
        model: The model.
        batch: A batch, or a `WeightedBatch`.
        has_metrics: Whether metrics read the outputs.

    Returns:
        The loss and the outputs.

    Raises:
        TypeError: The function takes other arguments, or returns something else.
    """
    is_weighted = isinstance(batch, WeightedBatch)
    arguments = (model, *batch) if is_weighted else (model, batch)
    try:
        inspect.signature(loss).bind(*arguments)
    except TypeError:
        wanted = "loss(model, batch, weights)" if is_weighted else "loss(model, batch)"
        raise TypeError(
            f"batches have {'' if is_weighted else 'no '}weights (see batch_size of Trainer), so "
            f"that the loss is called as {wanted}, but it takes {inspect.signature(loss)}"
        ) from None
    returned = loss(*arguments)
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise TypeError(
            "the loss must return a pair, the loss and the outputs for metrics by name, such as "
            f"(loss, {{}}), got {_shown(returned)}"
        )
    value, outputs = returned
    if jnp.shape(value) != ():
        raise TypeError(f"the loss must be one number, the mean over samples, got {_shown(value)}")
    if has_metrics and not isinstance(outputs, Mapping):
        raise TypeError(
            "the loss must return the outputs for metrics by name, such as (loss, {'p': p, 'y': y})"
            f", got {_shown(outputs)}"
        )
    return jnp.asarray(value), outputs


def sample_count(batch: Any) -> Float[Array, ""] | int:
    """Return the weight of a batch's loss: the sum of sample weights, or the number of samples."""
    return batch.weights.sum() if isinstance(batch, WeightedBatch) else num_samples(batch)


def _shown(value: Any) -> str:
    if isinstance(value, jax.Array):
        return f"an array {jax.typeof(value)}"
    return f"a {type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else repr(value)
