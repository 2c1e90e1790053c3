"""Gated cross networks, whose layers keep only the products that matter, and the model GDCN."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.crossnet import CrossModel, CrossNet
from jaxrec.ragged.arrays import AnyArray


class GatedCrossNet(nnx.Module):
    """Cross layers with gates: ``x_{l+1} = x_0 * (W_l x_l + b_l) * sigmoid(G_l x_l) + x_l``.

    Wang et al. 2023, "Towards deeper, lighter and interpretable cross network for CTR prediction"
    (arXiv:2311.04635), equation 3: layers of `CrossNet` whose products a gate weighs, so that deep
    stacks do not fill with noise.

    For ``n`` columns a layer has ``2 * n^2 + n`` parameters and ``4 * n^2`` FLOPs per sample in its
    products.

    Args:
        in_features: Columns of the input.
        num_layers: Number of layers.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of the kernels' first values (Glorot's normal).

    Raises:
        ValueError: A size is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> GatedCrossNet(6, num_layers=3, rngs=nnx.Rngs(0))(jnp.ones((2, 6))).shape
        (2, 6)
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.cross = CrossNet(in_features, num_layers, **types)
        glorot = nnx.initializers.glorot_normal()
        self.gates = nnx.List(
            nnx.Linear(in_features, in_features, use_bias=False, kernel_init=glorot, **types)
            for _ in range(num_layers)
        )

    def __call__(self, x: Float[AnyArray, "batch columns"]) -> Float[Array, "batch columns"]:
        """Map ``[batch, in_features]`` to the same shape."""
        first = x = jnp.asarray(x)
        for layer, gate in zip(self.cross.layers, self.gates, strict=True):
            out = layer(x) * nnx.sigmoid(gate(x))
            x = first.astype(out.dtype) * out + x.astype(out.dtype)
        return x


class GDCN(CrossModel):
    """Predicts clicks with a gated cross network and a deep network.

    Wang et al. 2023 (arXiv:2311.04635), figure 2: `DCNv2` with a `GatedCrossNet`. Embeddings may
    differ in width.

    Args:
        embeddings: The tables.
        num_dense: Number of dense features, the first columns of the input.
        cross_layers: Layers of the gated cross network.
        deep_layer_sizes: Layers of the deep network; a linear head reads the last.
        structure: "stacked" (the paper's GDCN-S): the deep network sees the cross network's output.
            "parallel" (GDCN-P): both see the input, and the logit is a linear function of both
            outputs.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        logit_dtype: Type of the last layer's arithmetic and of the logits; None: ``dtype``.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: A size is below 1, or ``structure`` is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> tables = [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in ("user", "item")]
        >>> model = GDCN(jaxrec.EmbeddingBagCollection(tables, rngs=rngs), num_dense=3,
        ...              cross_layers=2, deep_layer_sizes=(16,), rngs=rngs)
        >>> ids = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2]], "item": [[3, 4], []]})
        >>> model(jnp.ones((2, 3)), ids).shape
        (2,)
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        *,
        num_dense: int = 0,
        cross_layers: int,
        deep_layer_sizes: Sequence[int],
        structure: Literal["stacked", "parallel"] = "parallel",
        dtype: DTypeLike | None = None,
        logit_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            embeddings,
            functools.partial(GatedCrossNet, num_layers=cross_layers),
            num_dense=num_dense,
            deep_layer_sizes=deep_layer_sizes,
            structure=structure,
            dtype=dtype,
            logit_dtype=logit_dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
