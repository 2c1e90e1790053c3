"""The moving averages of gradients that Adam and LAMB share."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrec.optim.norm import root


def moving_average(
    average: Float[Array, "*shape"], value: Float[Array, "*shape"], decay: float
) -> Float[Array, "*shape"]:
    """Return ``decay average + (1 - decay) value``."""
    return decay * average + (1 - decay) * value


def adam_direction(
    first_moment: Float[Array, "rows dim"],
    second_moment: Float[Array, "rows dim"] | Float[Array, "rows 1"],
    count: Float[Array, "rows 1"] | Int[Array, ""] | int,
    *,
    b1: float,
    b2: float,
    eps: float,
) -> Float[Array, "rows dim"]:
    """Return ``m^ / (sqrt(v^) + eps)``: the averages without the bias of ``count`` steps from zero.

    Kingma and Ba 2015, "Adam: a method for stochastic optimization", Algorithm 1.
    """
    first = first_moment / _unbiased_share(b1, count)
    second = second_moment / _unbiased_share(b2, count)
    return first / (root(second) + eps)


def _unbiased_share(decay: float, count: Array | int) -> Float[Array, "*shape"]:
    """Return ``1 - decay^count``: the sum of the weights of an average of ``count`` values.

    Through expm1, since for a decay near 1 the plain form loses most of float32's digits.
    """
    if decay == 0:
        return jnp.ones((), jnp.float32)
    return -jnp.expm1(jnp.asarray(count, jnp.float32) * math.log(decay))
