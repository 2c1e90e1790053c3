"""The activation of deep interest networks, which adapts to its input's distribution."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.nn.dtypes import promote
from jaxrec.ragged.arrays import AnyArray


class Dice(nnx.Module):
    """``p(s) s + (1 - p(s)) a s`` with ``p(s) = sigmoid((s - E[s]) / sqrt(Var[s] + epsilon))``.

    Zhou et al. 2018, "Deep interest network for click-through rate prediction" (arXiv:1706.06978),
    equation 4. Mean and variance are the batch's in training, and running averages of them after
    ``model.eval()``.

    Args:
        size: Columns.
        epsilon: Added to the variance.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the slopes ``a``, which start as zeros, and of the averages.
        rngs: Not drawn from.

    Example:
        >>> import jax.numpy as jnp
        >>> Dice(1, rngs=nnx.Rngs(0))(jnp.array([[-1.0], [1.0]])).round(3).tolist()
        [[-0.269...], [0.731...]]
    """

    def __init__(
        self,
        size: int,
        *,
        epsilon: float = 1e-8,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.slopes = nnx.Param(jnp.zeros(size, param_dtype))
        self.normal = nnx.BatchNorm(
            size,
            use_bias=False,
            use_scale=False,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.dtype = dtype

    def __call__(self, x: Float[AnyArray, "*batch columns"]) -> Float[Array, "*batch columns"]:
        """Map ``[..., size]`` to the same shape."""
        x, slopes = promote(self.dtype, x, self.slopes[...])
        gate = nnx.sigmoid(self.normal(x))
        slopes = slopes.reshape((1,) * (x.ndim - 1) + slopes.shape)
        return gate * x + (1 - gate) * slopes * x
