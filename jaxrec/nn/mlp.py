"""Stacks of dense layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.nn.arithmetic import dot_general
from jaxrec.nn.dice import Dice
from jaxrec.nn.swish import SwishLayerNorm
from jaxrec.ragged.arrays import AnyArray

Activation: TypeAlias = (
    Callable[[Array], Array] | Literal["relu", "sigmoid", "swish_layernorm", "dice"]
)

_BY_NAME: dict[str, Callable[[Array], Array]] = {"relu": nnx.relu, "sigmoid": nnx.sigmoid}


def make_activation(
    activation: Activation,
    size: int,
    *,
    dtype: DTypeLike | None,
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> Callable[[Array], Array]:
    """Return the activation behind a layer of ``size`` columns.

    Raises:
        ValueError: No activation has that name.
    """
    if activation == "swish_layernorm":
        return SwishLayerNorm(size, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    if activation == "dice":
        return Dice(size, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    if isinstance(activation, str):
        if activation not in _BY_NAME:
            raise ValueError(
                f"activation={activation!r} is not one of relu, sigmoid, swish_layernorm, dice; "
                "give one of these or an elementwise function"
            )
        return _BY_NAME[activation]
    return activation


def check_logit_layer(name: str, layer_sizes: Sequence[int]) -> None:
    """Check the layer sizes of a network that ends with a logit.

    Args:
        name: Name of the argument.
        layer_sizes: Columns of each layer's output.

    Raises:
        ValueError: The last layer has another size than 1.
    """
    if not layer_sizes or layer_sizes[-1] != 1:
        raise ValueError(f"{name} ends with 1, the column of the logit; got {tuple(layer_sizes)}")


class Perceptron(nnx.Module):
    """A dense layer and its activation; TorchRec's module of that name.

    Args:
        in_features: Columns of the input.
        out_features: Columns of the output.
        activation: As for `MLP`.
        bias: Whether it adds a bias.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random key of the kernel's first values (LeCun's normal).

    Example:
        >>> import jax.numpy as jnp
        >>> Perceptron(13, 4, rngs=nnx.Rngs(0))(jnp.ones((2, 13))).shape
        (2, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation = nnx.relu,
        bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.linear = nnx.Linear(
            in_features,
            out_features,
            use_bias=bias,
            dtype=dtype,
            param_dtype=param_dtype,
            dot_general=dot_general,
            rngs=rngs,
        )
        self.activation = make_activation(
            activation, out_features, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )

    def __call__(
        self, x: Float[AnyArray, "*batch in_features"]
    ) -> Float[Array, "*batch out_features"]:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        return self.activation(self.linear(jnp.asarray(x)))


class MLP(nnx.Module):
    """Dense layers one after the other, each followed by an activation.

    TorchRec's MLP, a stack of `Perceptron`.

    Args:
        in_features: Columns of the input.
        layer_sizes: Columns of each layer's output.
        activation: Activation of each layer: an elementwise function, or "relu", "sigmoid",
            "swish_layernorm" or "dice" (each layer has its own `SwishLayerNorm` or `Dice`).
        activation_on_last: Whether the last layer has an activation too. A model's head leaves it
            out to return logits.
        bias: Whether layers add a bias.
        dtype: Type that the layers compute in; None: the wider of the input's and ``param_dtype``.
        output_dtype: Type that the last layer computes in; None: ``dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of the kernels' first values (LeCun's normal).

    Raises:
        ValueError: A size is below 1, there are no layers, or no activation has that name.

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
        activation: Activation = nnx.relu,
        activation_on_last: bool = True,
        bias: bool = True,
        dtype: DTypeLike | None = None,
        output_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = (in_features, *layer_sizes)
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(
                "an MLP has at least one layer, and each a size of 1 or more; "
                f"got in_features={in_features}, layer_sizes={tuple(layer_sizes)}"
            )
        dtypes = [dtype] * (len(layer_sizes) - 1) + [
            dtype if output_dtype is None else output_dtype
        ]
        self.layers = nnx.List(
            nnx.Linear(
                sizes[i],
                sizes[i + 1],
                use_bias=bias,
                dtype=dtypes[i],
                param_dtype=param_dtype,
                dot_general=dot_general,
                rngs=rngs,
            )
            for i in range(len(layer_sizes))
        )
        activated = sizes[1:] if activation_on_last else sizes[1:-1]
        self.activations = nnx.List(
            make_activation(activation, size, dtype=dtypes[i], param_dtype=param_dtype, rngs=rngs)
            for i, size in enumerate(activated)
        )

    def __call__(
        self, x: Float[AnyArray, "*batch in_features"]
    ) -> Float[Array, "*batch out_features"]:
        """Map ``[..., in_features]`` to ``[..., layer_sizes[-1]]``."""
        hidden = jnp.asarray(x)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if i < len(self.activations):
                hidden = self.activations[i](hidden)
        return hidden
