"""Stacks of dense layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.ragged.arrays import AnyArray


class MLP(nnx.Module):
    """Dense layers one after the other, each followed by an activation.

    TorchRec's MLP, its Perceptron being a layer and the activation behind it.

    Args:
        in_features: Columns of the input.
        layer_sizes: Columns of each layer's output.
        activation: What follows each layer; an elementwise function.
        activation_on_last: Whether it follows the last layer too. A model's head leaves it out to
            return logits.
        bias: Whether layers add a bias.
        dtype: Type that the layers compute in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of the kernels' first values (LeCun's normal).

    Raises:
        ValueError: A size is below 1, or there are no layers.

    Example:
        >>> import jax.numpy as jnp
        >>> mlp = MLP(13, (64, 16), rngs=nnx.Rngs(0))
        >>> mlp(jnp.ones((2, 13))).shape
        (2, 16)
    """

    def __init__(
        self,
        in_features: int,
        layer_sizes: Sequence[int],
        *,
        activation: Callable[[Array], Array] = nnx.relu,
        activation_on_last: bool = True,
        bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = (in_features, *layer_sizes)
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(
                "an MLP has at least one layer, and each a size of 1 or more; "
                f"got in_features={in_features}, layer_sizes={tuple(layer_sizes)}"
            )
        self.layers = nnx.List(
            nnx.Linear(
                sizes[i],
                sizes[i + 1],
                use_bias=bias,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )
            for i in range(len(layer_sizes))
        )
        self.activation = activation
        self.activation_on_last = activation_on_last

    def __call__(
        self, x: Float[AnyArray, "*batch in_features"]
    ) -> Float[Array, "*batch out_features"]:
        """``[..., in_features]`` to ``[..., layer_sizes[-1]]``."""
        hidden = jnp.asarray(x)
        for layer in self.layers[:-1]:
            hidden = self.activation(layer(hidden))
        out = self.layers[-1](hidden)
        return self.activation(out) if self.activation_on_last else out
