"""The activation that gates its input by its own normalised value."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.nn.dtypes import promote
from jaxrec.ragged.arrays import AnyArray


class SwishLayerNorm(nnx.Module):
    """``x * sigmoid(LayerNorm(x))``.

    TorchRec's module of that name: Ramachandran et al. 2017, "Searching for activation functions"
    (arXiv:1710.05941), with a layer norm (Ba et al. 2016, arXiv:1607.06450) inside of the gate.

    Args:
        shape: Sizes of the last axes, which are normalised together; a number is one axis.
        epsilon: Added to the variance.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Not drawn from: scales start as ones and biases as zeros.

    Example:
        >>> import jax.numpy as jnp
        >>> SwishLayerNorm(2, rngs=nnx.Rngs(0))(jnp.array([[-1.0, 1.0]])).round(3).tolist()
        [[-0.269..., 0.731...]]
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        *,
        epsilon: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.epsilon = epsilon
        self.dtype = dtype
        self.scale = nnx.Param(jnp.ones(self.shape, param_dtype))
        self.bias = nnx.Param(jnp.zeros(self.shape, param_dtype))

    def __call__(self, x: Float[AnyArray, "*axes"]) -> Float[Array, "*axes"]:
        """Map ``[..., *shape]`` to the same shape.

        Raises:
            ValueError: The last axes have other sizes.
        """
        rank = len(self.shape)
        if x.shape[x.ndim - rank :] != self.shape:
            raise ValueError(f"the last axes are {self.shape}, but the input is {x.shape}")
        x, scale, bias = promote(self.dtype, x, self.scale[...], self.bias[...])
        # Moments need more than 16 bits of precision.
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        axes = tuple(range(-rank, 0))
        centred = wide - wide.mean(axes, keepdims=True)
        variance = (centred * centred).mean(axes, keepdims=True)
        normal = (centred / jnp.sqrt(variance + self.epsilon)).astype(x.dtype)
        align = (1,) * (x.ndim - rank)
        scale, bias = scale.reshape(align + self.shape), bias.reshape(align + self.shape)
        return x * nnx.sigmoid(normal * scale + bias)
