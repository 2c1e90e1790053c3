"""Cross networks, which multiply features explicitly, and the model DCN V2.

All networks map ``x_0``, ``[batch, in_features]``, to the same shape. In their formulas ``x_l`` is
the input of layer ``l`` and ``*`` the elementwise product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.arithmetic import dot_general, promote
from jaxrec.nn.click_model import ClickModel, num_columns, with_dense
from jaxrec.nn.mlp import MLP
from jaxrec.ragged.arrays import AnyArray

_glorot = nnx.initializers.glorot_normal()


def _check_sizes(**sizes: int) -> None:
    if min(sizes.values()) < 1:
        listing = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"a cross network's sizes are 1 or more; got {listing}")


class CrossNet(nnx.Module):
    """Cross layers of full rank: ``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l``.

    Wang et al. 2021, "DCN V2: Improved deep & cross network and practical lessons for web-scale
    learning to rank systems" (arXiv:2008.13535), equation 1.

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
        >>> CrossNet(6, num_layers=3, rngs=nnx.Rngs(0))(jnp.ones((2, 6))).shape
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
        _check_sizes(in_features=in_features, num_layers=num_layers)
        self.layers = nnx.List(
            nnx.Linear(in_features, in_features, kernel_init=_glorot, **types)
            for _ in range(num_layers)
        )

    def __call__(self, x: Float[AnyArray, "batch columns"]) -> Float[Array, "batch columns"]:
        """Map ``[batch, in_features]`` to the same shape."""
        first = x = jnp.asarray(x)
        # Each layer multiplies by the input once more and adds its own input. So after l layers
        # there are products of up to l + 1 features.
        for layer in self.layers:
            out = layer(x)
            x = first.astype(out.dtype) * out + x.astype(out.dtype)
        return x


class LowRankCrossNet(nnx.Module):
    """Cross layers of low rank: ``x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l``.

    Wang et al. 2021 (arXiv:2008.13535), equation 2; the interaction of MLPerf's DLRM-DCNv2.

    Args:
        in_features: Columns of the input.
        num_layers: Number of layers.
        low_rank: Number of rows of ``V_l`` and of columns of ``W_l``.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of the kernels' first values (Glorot's normal).

    Raises:
        ValueError: A size is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> LowRankCrossNet(6, num_layers=3, low_rank=2, rngs=nnx.Rngs(0))(jnp.ones((2, 6))).shape
        (2, 6)
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        low_rank: int = 1,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        _check_sizes(in_features=in_features, num_layers=num_layers, low_rank=low_rank)

        def linear(columns: int, out: int, *, use_bias: bool) -> nnx.Linear:
            return nnx.Linear(
                columns,
                out,
                use_bias=use_bias,
                kernel_init=_glorot,
                dot_general=dot_general,
                **types,
            )

        # Equation 2 has one bias, after the second product.
        self.down = nnx.List(
            linear(in_features, low_rank, use_bias=False) for _ in range(num_layers)
        )
        self.up = nnx.List(linear(low_rank, in_features, use_bias=True) for _ in range(num_layers))

    def __call__(self, x: Float[AnyArray, "batch columns"]) -> Float[Array, "batch columns"]:
        """Map ``[batch, in_features]`` to the same shape."""
        first = x = jnp.asarray(x)
        for down, up in zip(self.down, self.up, strict=True):
            out = up(down(x))
            x = first.astype(out.dtype) * out + x.astype(out.dtype)
        return x


class VectorCrossNet(nnx.Module):
    """Cross layers of rank one: ``x_{l+1} = x_0 * (w_l . x_l + b_l) + x_l``.

    A `CrossNet` whose matrices have equal rows ``w_l``: Wang et al. 2021 (arXiv:2008.13535),
    equation 1 with ``W_l = 1 w_l^T``, as in TorchRec's documentation. TorchRec's code computes
    another layer, that of Wang et al. 2017, "Deep & cross network for ad click predictions"
    (arXiv:1708.05123), equation 3: ``x_{l+1} = x_0 (w_l . x_l) + b_l + x_l``.

    Args:
        in_features: Columns of the input.
        num_layers: Number of layers.
        compat: "torchrec" computes the layer of TorchRec's code.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of the kernels' first values (Glorot's normal).

    Raises:
        ValueError: A size is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> VectorCrossNet(6, num_layers=3, rngs=nnx.Rngs(0))(jnp.ones((2, 6))).shape
        (2, 6)
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        *,
        compat: Literal["torchrec"] | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        _check_sizes(in_features=in_features, num_layers=num_layers)
        self.compat = compat
        self.dtype = dtype
        # Glorot's initializer needs fans, so a vector is drawn as a matrix of one column.
        self.kernels = nnx.List(
            nnx.Param(_glorot(rngs.params(), (in_features, 1), param_dtype)[:, 0])
            for _ in range(num_layers)
        )
        self.biases = nnx.List(
            nnx.Param(jnp.zeros(in_features, param_dtype)) for _ in range(num_layers)
        )

    def __call__(self, x: Float[AnyArray, "batch columns"]) -> Float[Array, "batch columns"]:
        """Map ``[batch, in_features]`` to the same shape."""
        first = x = jnp.asarray(x)
        for kernel, bias in zip(self.kernels, self.biases, strict=True):
            first, x, w, b = promote(self.dtype, first, x, kernel[...], bias[...])
            dots = (x @ w)[:, None]
            if self.compat == "torchrec":
                x = first * dots + b[None] + x
            else:
                x = first * (dots + b[None]) + x
        return x


class LowRankMixtureCrossNet(nnx.Module):
    """Cross layers that mix low-rank experts, with a nonlinearity in the low-rank space.

    ``x_{l+1} = sum_i G_i(x_l) E_i(x_l) + x_l`` with the experts
    ``E_i(x_l) = x_0 * (U_i g(C_i g(V_i x_l)) + b_l)``. Each expert has a gate vector, the same in
    all layers. The gates ``G`` are a softmax over the experts of its dot products with ``x_l``. A
    single expert has no gate. Wang et al. 2021 (arXiv:2008.13535), equations 3 and 4.

    Args:
        in_features: Columns of the input.
        num_layers: Number of layers.
        num_experts: Number of experts of each layer.
        low_rank: Number of columns of ``U_i``, of rows of ``V_i``, and of both of ``C_i``.
        activation: The function ``g``.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of the kernels' first values (Glorot's normal).

    Raises:
        ValueError: A size is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> net = LowRankMixtureCrossNet(
        ...     6, num_layers=3, num_experts=4, low_rank=2, rngs=nnx.Rngs(0))
        >>> net(jnp.ones((2, 6))).shape
        (2, 6)
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        num_experts: int = 1,
        low_rank: int = 1,
        *,
        activation: Callable[[Array], Array] = nnx.relu,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        _check_sizes(
            in_features=in_features,
            num_layers=num_layers,
            num_experts=num_experts,
            low_rank=low_rank,
        )
        self.activation = activation
        self.dtype = dtype
        # The expert axis is a batch axis for the initializer: fans are those of one expert's
        # matrix.
        draw = nnx.initializers.glorot_normal(in_axis=2, out_axis=1, batch_axis=0)

        def draw_layers(*shape: int) -> list[nnx.Param]:
            return [nnx.Param(draw(rngs.params(), shape, param_dtype)) for _ in range(num_layers)]

        self.up = nnx.List(draw_layers(num_experts, in_features, low_rank))
        self.inner = nnx.List(draw_layers(num_experts, low_rank, low_rank))
        self.down = nnx.List(draw_layers(num_experts, low_rank, in_features))
        self.biases = nnx.List(
            nnx.Param(jnp.zeros(in_features, param_dtype)) for _ in range(num_layers)
        )
        self.gates = nnx.data(
            nnx.Param(_glorot(rngs.params(), (num_experts, in_features), param_dtype))
            if num_experts > 1
            else None
        )

    def __call__(self, x: Float[AnyArray, "batch columns"]) -> Float[Array, "batch columns"]:
        """Map ``[batch, in_features]`` to the same shape."""
        first = x = jnp.asarray(x)
        for layer in zip(self.up, self.inner, self.down, self.biases, strict=True):
            first, x, up, inner, down, bias = promote(
                self.dtype, first, x, *(parameter[...] for parameter in layer)
            )
            # One product for all experts. A loop over experts would make many small products.
            low = self.activation(jnp.einsum("bn,ern->ber", x, down))
            low = self.activation(jnp.einsum("ber,esr->bes", low, inner))
            experts = first[:, None] * (jnp.einsum("ber,enr->ben", low, up) + bias[None, None])
            x = jnp.einsum("be,ben->bn", self._gates(x), experts) + x
        return x

    def _gates(self, x: Float[Array, "batch columns"]) -> Float[Array, "batch experts"]:
        if self.gates is None:
            return jnp.ones((x.shape[0], 1), x.dtype)
        return nnx.softmax(x @ self.gates[...].astype(x.dtype).T, axis=1)


class CrossModel(ClickModel):
    """Base of models of a cross network, ``make_cross(columns, ...)``, and a deep network."""

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        make_cross: Callable[..., Callable[[Array], Array]],
        *,
        num_dense: int,
        deep_layer_sizes: Sequence[int],
        structure: Literal["stacked", "parallel"],
        dtype: DTypeLike | None,
        logit_dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        if structure not in ("stacked", "parallel"):
            raise ValueError(f"structure is 'stacked' or 'parallel', got {structure!r}")
        columns = num_columns(embeddings) + num_dense
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.embeddings = embeddings
        self.num_dense = num_dense
        self.dtype = dtype
        self.structure = structure
        self.cross = make_cross(columns, rngs=rngs, **types)
        self.deep = MLP(columns, deep_layer_sizes, rngs=rngs, **types)
        last = deep_layer_sizes[-1] + (columns if structure == "parallel" else 0)
        of_head = types if logit_dtype is None else types | {"dtype": logit_dtype}
        self.head = nnx.Linear(last, 1, rngs=rngs, **of_head)

    def logits(
        self,
        dense: Float[AnyArray, "batch num_dense"] | None,
        embedded: Float[Array, "batch columns"],
    ) -> Float[Array, " batch"]:
        inputs = with_dense(embedded, dense, self.num_dense, self.dtype)
        crossed = self.cross(inputs)
        if self.structure == "stacked":
            return self.head(self.deep(crossed))[:, 0]
        return self.head(jnp.concatenate([crossed, self.deep(inputs)], axis=1))[:, 0]


class DCNv2(CrossModel):
    """Predicts clicks with a cross network and a deep network, one after the other or in parallel.

    Wang et al. 2021, "DCN V2: Improved deep & cross network and practical lessons for web-scale
    learning to rank systems" (arXiv:2008.13535), figure 1. Embeddings may differ in width.

    Args:
        embeddings: The tables.
        num_dense: Number of dense features, the first columns of the input.
        cross_layers: Layers of the cross network.
        low_rank: Rank of its matrices; None: full (equation 1). With a rank the layers are
            mixtures of ``num_experts`` low-rank experts (equation 4).
        num_experts: Experts of a low-rank layer.
        deep_layer_sizes: Layers of the deep network; a linear head reads the last.
        structure: "stacked": the deep network sees the cross network's output. "parallel": both see
            the input, and the logit is a linear function of both outputs.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        logit_dtype: Type of the last layer's arithmetic and of the logits; None: ``dtype``.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: A size is below 1, ``structure`` is unknown, or ``num_experts`` is given without
            ``low_rank``.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> tables = [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in ("user", "item")]
        >>> model = DCNv2(jaxrec.EmbeddingBagCollection(tables, rngs=rngs), num_dense=3,
        ...               cross_layers=2, low_rank=4, num_experts=2, deep_layer_sizes=(16,),
        ...               rngs=rngs)
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
        low_rank: int | None = None,
        num_experts: int = 1,
        deep_layer_sizes: Sequence[int],
        structure: Literal["stacked", "parallel"] = "stacked",
        dtype: DTypeLike | None = None,
        logit_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if low_rank is None and num_experts != 1:
            raise ValueError(f"num_experts={num_experts} needs low_rank=; give both or neither")
        make: Callable[..., Any] = functools.partial(CrossNet, num_layers=cross_layers)
        if low_rank is not None:
            make = functools.partial(
                LowRankMixtureCrossNet,
                num_layers=cross_layers,
                num_experts=num_experts,
                low_rank=low_rank,
            )
        super().__init__(
            embeddings,
            make,
            num_dense=num_dense,
            deep_layer_sizes=deep_layer_sizes,
            structure=structure,
            dtype=dtype,
            logit_dtype=logit_dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
