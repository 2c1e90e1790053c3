"""Dense layers with a kernel of its own for each of a sample's tokens."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.nn.arithmetic import promote

_lecun = nnx.initializers.lecun_normal(batch_axis=(0,))


class TokenLinear(nnx.Module):
    """``y_t = x_t W_t + b_t`` for each token ``t``."""

    def __init__(
        self,
        num_tokens: int,
        in_features: int,
        out_features: int,
        *,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        shape = (num_tokens, in_features, out_features)
        self.kernel = nnx.Param(_lecun(rngs.params(), shape, param_dtype))
        self.bias = nnx.Param(jnp.zeros((num_tokens, out_features), param_dtype))
        self.dtype = dtype

    def __call__(self, x: Float[Array, "batch tokens _"]) -> Float[Array, "batch tokens out"]:
        """Map ``[batch, tokens, in_features]`` to ``[batch, tokens, out_features]``."""
        x, kernel, bias = promote(self.dtype, x, self.kernel[...], self.bias[...])
        # Tokens first: XLA's CPU products of a batch axis in the middle are half as fast.
        return jnp.matmul(x.swapaxes(0, 1), kernel).swapaxes(0, 1) + bias[None]
