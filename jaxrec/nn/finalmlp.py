"""FinalMLP: two MLPs over gated features, whose outputs meet in a bilinear form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.arithmetic import promote
from jaxrec.nn.click_model import ClickModel, num_columns, with_dense
from jaxrec.nn.input_vectors import FeatureColumns
from jaxrec.nn.mlp import MLP, Activation
from jaxrec.ragged.arrays import AnyArray


class BilinearFusion(nnx.Module):
    """Fuses two vectors to a number: ``b + w_1 . x + w_2 . y + sum_h x_h^T W_h y_h``.

    ``x_h`` and ``y_h`` are equal parts of the vectors, one for each head. Mao et al. 2023,
    "FinalMLP: An enhanced two-stream MLP model for CTR prediction" (arXiv:2304.00902), equations 7
    to 10.

    For ``p`` and ``q`` columns it has ``p + q + 1 + p * q / num_heads`` parameters and
    ``2 * (p + q + p * q / num_heads + q)`` FLOPs per sample in its products.

    Args:
        first_features: Columns of the first vector.
        second_features: Columns of the second vector.
        num_heads: Number of parts, a divisor of both.
        dtype: Type that it computes in; None: the wider of the inputs' and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: ``num_heads`` does not divide both numbers of columns.

    Example:
        >>> import jax.numpy as jnp
        >>> fusion = BilinearFusion(6, 4, num_heads=2, rngs=nnx.Rngs(0))
        >>> fusion(jnp.ones((3, 6)), jnp.ones((3, 4))).shape
        (3,)
    """

    def __init__(
        self,
        first_features: int,
        second_features: int,
        *,
        num_heads: int = 1,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if num_heads < 1 or first_features % num_heads or second_features % num_heads:
            raise ValueError(
                f"num_heads={num_heads} does not divide the columns of both vectors, "
                f"{first_features} and {second_features}"
            )
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.first = nnx.Linear(first_features, 1, **types)
        self.second = nnx.Linear(second_features, 1, use_bias=False, **types)
        shape = (num_heads, first_features // num_heads, second_features // num_heads)
        draw = nnx.initializers.glorot_normal(batch_axis=(0,))
        self.kernel = nnx.Param(draw(rngs.params(), shape, param_dtype))
        self.dtype = dtype

    def __call__(
        self, first: Float[Array, "batch p"], second: Float[Array, "batch q"]
    ) -> Float[Array, " batch"]:
        """Fuse ``[batch, first_features]`` and ``[batch, second_features]`` to ``[batch]``."""
        linear = (self.first(first) + self.second(second))[:, 0]
        x, y, kernel = promote(self.dtype, first, second, self.kernel[...])
        x, y = (each.reshape(each.shape[0], kernel.shape[0], -1) for each in (x, y))
        return linear + jnp.einsum("bhq,bhq->b", jnp.einsum("bhp,hpq->bhq", x, kernel), y)


class FinalMLP(ClickModel):
    """Predicts clicks by two MLPs, each over features that a gate of its own weighs.

    Mao et al. 2023 (arXiv:2304.00902), figure 1::

        h_s = 2 sigmoid(gate_s(context_s)) * e      for the streams s = 1, 2
        logit = fuse(MLP_1(h_1), MLP_2(h_2))        `BilinearFusion`

    ``e`` are the dense features and all embeddings. The context of a gate is embeddings of some
    features, such as those of the user for one stream and those of the item for the other, or a
    learned vector. Embeddings may differ in width.

    Args:
        embeddings: The tables.
        num_dense: Number of dense features.
        contexts: Names of the features that each gate reads; an empty one: a learned vector of
            ``gate_hidden_size`` columns. None: no gates.
        gate_hidden_size: Hidden columns of a gate.
        first_layer_sizes: Layers of the first MLP.
        second_layer_sizes: Layers of the second MLP; the paper's may be shallower than the first.
        num_heads: Heads of the fusion.
        activation: Activation of the MLPs, on the last layer too.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        logit_dtype: Type of the fusion's arithmetic and of the logits; None: ``dtype``.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: No table reads a feature of ``contexts``, it is not for two gates, or
            ``num_heads`` does not divide the last sizes of both MLPs.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> tables = [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in ("user", "item")]
        >>> model = FinalMLP(jaxrec.EmbeddingBagCollection(tables, rngs=rngs), num_dense=3,
        ...                  contexts=(("user",), ("item",)), gate_hidden_size=8,
        ...                  first_layer_sizes=(16, 8), second_layer_sizes=(8,), num_heads=2,
        ...                  rngs=rngs)
        >>> ids = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2]], "item": [[3, 4], []]})
        >>> model(jnp.ones((2, 3)), ids).shape
        (2,)
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        *,
        num_dense: int = 0,
        contexts: tuple[Sequence[str], Sequence[str]] | None = ((), ()),
        gate_hidden_size: int = 64,
        first_layer_sizes: Sequence[int],
        second_layer_sizes: Sequence[int],
        num_heads: int = 1,
        activation: Activation = nnx.relu,
        dtype: DTypeLike | None = None,
        logit_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if contexts is not None and len(contexts) != 2:
            raise ValueError(
                f"contexts has features for {len(contexts)} gates; give them for both, as in "
                "(('user',), ('item',)), or None for no gates"
            )
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        columns = num_columns(embeddings) + num_dense
        self.embeddings = embeddings
        self.num_dense = num_dense
        self.dtype = dtype
        self.gates = nnx.List(
            _FeatureGate(embeddings, names, columns, gate_hidden_size, **types)
            for names in contexts or ()
        )
        self.streams = nnx.List(
            MLP(columns, sizes, activation=activation, **types)
            for sizes in (first_layer_sizes, second_layer_sizes)
        )
        self.fusion = BilinearFusion(
            first_layer_sizes[-1],
            second_layer_sizes[-1],
            num_heads=num_heads,
            **types | ({} if logit_dtype is None else {"dtype": logit_dtype}),
        )

    def logits(
        self,
        dense: Float[AnyArray, "batch num_dense"] | None,
        embedded: Float[Array, "batch columns"],
    ) -> Float[Array, " batch"]:
        inputs = with_dense(embedded, dense, self.num_dense, self.dtype)
        gated = [gate(embedded) * inputs for gate in self.gates] or [inputs, inputs]
        return self.fusion(*(mlp(x) for mlp, x in zip(self.streams, gated, strict=True)))


class _FeatureGate(nnx.Module):
    """Weights of a sample's columns, between 0 and 2, from the embeddings of some features."""

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        names: Sequence[str],
        columns: int,
        hidden_size: int,
        **types: Any,
    ):
        self.context = FeatureColumns.of("contexts", embeddings, names)
        # Zeros would stay: behind a ReLU of 0 there is no gradient.
        draw, shape = nnx.initializers.normal(0.02), (1, hidden_size)
        self.learned = (
            None if names else nnx.Param(draw(types["rngs"].params(), shape, types["param_dtype"]))
        )
        self.mlp = MLP(
            self.context.size or hidden_size,
            (hidden_size, columns),
            activation_on_last=False,
            **types,
        )

    def __call__(self, embedded: Float[Array, "batch _"]) -> Float[Array, "_ columns"]:
        context = self.context(embedded) if self.learned is None else self.learned[...]
        return 2 * nnx.sigmoid(self.mlp(context))
