"""Dense layers (`MLP`, `Perceptron`) and their activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.nn.arithmetic import dot_general, promote
from jaxrec.ragged.arrays import AnyArray

Activation: TypeAlias = (
    Callable[[Array], Array] | Literal["relu", "sigmoid", "swish_layernorm", "dice"]
)
"""Elementwise function or the name of one. ``"dice"`` and ``"swish_layernorm"`` have parameters."""

_BY_NAME: dict[str, Callable[[Array], Array]] = {"relu": nnx.relu, "sigmoid": nnx.sigmoid}


def make_activation(
    activation: Activation,
    size: int,
    *,
    dtype: DTypeLike | None,
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> Callable[[Array], Array]:
    """Return the activation of a layer of ``size`` columns."""
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
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.linear = nnx.Linear(
            in_features, out_features, use_bias=bias, dot_general=dot_general, **types
        )
        self.activation = make_activation(activation, out_features, **types)

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
        # A head may compute in float32 over layers of bfloat16: 8 bits of precision hide small
        # changes of a logit.
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
        # One activation per layer, since "dice" and "swish_layernorm" have parameters.
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


class SwishLayerNorm(nnx.Module):
    """``x * sigmoid(LayerNorm(x))``.

    TorchRec's module of that name: Ramachandran et al. 2017, "Searching for activation functions"
    (arXiv:1710.05941), with a layer norm (Ba et al. 2016, arXiv:1607.06450) inside of the gate.

    Args:
        shape: Sizes of the last axes, which are normalised together; a number means one axis.
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
            ValueError: The last axes of ``x`` have other sizes.
        """
        rank = len(self.shape)
        if x.shape[x.ndim - rank :] != self.shape:
            raise ValueError(f"the last axes are {self.shape}, but the input is {x.shape}")
        x, scale, bias = promote(self.dtype, x, self.scale[...], self.bias[...])
        # Means of many numbers lose their digits in 16 bits.
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        axes = tuple(range(-rank, 0))
        centred = wide - wide.mean(axes, keepdims=True)
        variance = (centred * centred).mean(axes, keepdims=True)
        normal = (centred / jnp.sqrt(variance + self.epsilon)).astype(x.dtype)
        align = (1,) * (x.ndim - rank)
        scale, bias = scale.reshape(align + self.shape), bias.reshape(align + self.shape)
        return x * nnx.sigmoid(normal * scale + bias)


class Dice(nnx.Module):
    """``p(s) s + (1 - p(s)) a s`` with ``p(s) = sigmoid((s - E[s]) / sqrt(Var[s] + epsilon))``.

    Zhou et al. 2018, "Deep interest network for click-through rate prediction" (arXiv:1706.06978),
    equation 4. Mean and variance are those of the batch in training, and their running averages
    after ``model.eval()``.

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
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.slopes = nnx.Param(jnp.zeros(size, param_dtype))
        # The paper's gate is normalised without a scale and a bias.
        self.normal = nnx.BatchNorm(size, use_bias=False, use_scale=False, epsilon=epsilon, **types)
        self.dtype = dtype

    def __call__(self, x: Float[AnyArray, "*batch columns"]) -> Float[Array, "*batch columns"]:
        """Map ``[..., size]`` to the same shape."""
        x, slopes = promote(self.dtype, x, self.slopes[...])
        gate = nnx.sigmoid(self.normal(x))
        slopes = slopes.reshape((1,) * (x.ndim - 1) + slopes.shape)
        return gate * x + (1 - gate) * slopes * x
