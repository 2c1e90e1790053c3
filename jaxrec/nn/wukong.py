"""Wukong: a stack of layers of factorization machines, which grows with its data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.arithmetic import promote
from jaxrec.nn.click_model import ClickModel, check_logit_layer
from jaxrec.nn.input_vectors import InputVectors
from jaxrec.nn.mlp import MLP
from jaxrec.ragged.arrays import AnyArray

_glorot = nnx.initializers.glorot_normal()


class WukongLayer(nnx.Module):
    """A factorization machine and a linear compression of a sample's vectors, side by side.

    ``X' = layer_norm([F; L] + R)`` for vectors ``X``, ``[n, dim]``::

        F = reshape(MLP(layer_norm(flatten(X X^T Y))))   num_fm vectors
        L = W_L X                                        num_linear vectors
        R = W_R X                                        X itself if the layer has n vectors out

    ``Y``, ``[n, rank]``, is learned: it takes the place of all ``n^2`` products. Zhang et al. 2024,
    "Wukong: Towards a scaling law for large-scale recommendation" (arXiv:2403.02545), section 3;
    the paper also has a form in which ``Y`` depends on the sample.

    With ``o = num_fm + num_linear`` vectors out and the MLP's sizes ``n * rank = s_0, s_1, ...,
    num_fm * dim``, the layer has ``n * (rank + num_linear + o) + 2 * n * rank + 2 * dim +
    sum_i (s_i + 1) s_{i+1}`` parameters, and ``2 * n * dim * (2 * rank + num_linear + o) +
    2 * sum_i s_i s_{i+1}`` FLOPs per sample in its products; without ``o`` if ``o = n``.

    Args:
        num_vectors: Number of vectors of the input, ``n``.
        dim: Width of the vectors.
        num_fm: Number of vectors of the factorization machine.
        num_linear: Number of vectors of the linear compression.
        rank: Columns of ``Y``.
        hidden_sizes: Hidden layers of the MLP; one of ``num_fm * dim`` follows.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: A size is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = WukongLayer(6, 8, num_fm=2, num_linear=2, rank=3, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((4, 6, 8))).shape
        (4, 4, 8)
    """

    def __init__(
        self,
        num_vectors: int,
        dim: int,
        *,
        num_fm: int,
        num_linear: int,
        rank: int,
        hidden_sizes: Sequence[int] = (),
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        sizes = {
            "num_vectors": num_vectors,
            "dim": dim,
            "num_fm": num_fm,
            "num_linear": num_linear,
            "rank": rank,
        }
        if min(sizes.values()) < 1:
            listing = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise ValueError(f"the sizes of a Wukong layer are 1 or more; got {listing}")
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.out_vectors = num_fm + num_linear
        self.dtype = dtype

        def mixing(columns: int) -> nnx.Param:
            return nnx.Param(_glorot(rngs.params(), (num_vectors, columns), param_dtype))

        self.projection = mixing(rank)
        self.products_norm = nnx.LayerNorm(num_vectors * rank, **types)
        self.mlp = MLP(
            num_vectors * rank, (*hidden_sizes, num_fm * dim), activation_on_last=False, **types
        )
        self.compression = mixing(num_linear)
        self.residual = mixing(self.out_vectors) if self.out_vectors != num_vectors else None
        self.norm = nnx.LayerNorm(dim, **types)

    def __call__(self, x: Float[Array, "batch n dim"]) -> Float[Array, "batch out dim"]:
        """Map ``[batch, num_vectors, dim]`` to ``[batch, num_fm + num_linear, dim]``."""
        x, projection, compression = promote(
            self.dtype, x, self.projection[...], self.compression[...]
        )
        # X (X^T Y) in this order never has the [n, n] products.
        projected = jnp.einsum("bnd,nk->bdk", x, projection)
        products = jnp.einsum("bnd,bdk->bnk", x, projected)
        flat = self.mlp(self.products_norm(products.reshape(x.shape[0], -1)))
        machines = flat.reshape(x.shape[0], -1, x.shape[2])
        linear = jnp.einsum("bnd,nm->bmd", x, compression)
        shortcut = x
        if self.residual is not None:
            shortcut = jnp.einsum("bnd,nm->bmd", *promote(self.dtype, x, self.residual[...]))
        return self.norm(jnp.concatenate([machines, linear], axis=1) + shortcut)


class Wukong(ClickModel):
    """Predicts clicks by ``l`` layers of factorization machines: products of ``2^l`` vectors.

    Zhang et al. 2024 (arXiv:2403.02545), figure 2: `WukongLayer` after `WukongLayer`, then an MLP
    of all vectors side by side. Dense features become vectors by an MLP. The paper grows a model by
    its layers, ``num_fm``, ``num_linear``, ``rank`` and the MLPs, at one width of the tables.

    Args:
        embeddings: The tables, all of one width, ``dim``.
        num_dense: Number of dense features.
        bottom_layer_sizes: Layers of the MLP of the dense features; the last is a multiple of
            ``dim``. Not read without dense features.
        num_layers: Number of layers.
        num_fm: Vectors of each layer's factorization machine.
        num_linear: Vectors of each layer's linear compression.
        rank: Columns of each layer's ``Y``.
        fm_hidden_sizes: Hidden layers of each factorization machine's MLP.
        top_layer_sizes: Layers of the MLP on top; the last is 1.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        logit_dtype: Type of the last layer's arithmetic and of the logits; None: ``dtype``.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: The tables differ in width, or a size is below 1 or not as given above.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> tables = [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in ("user", "item")]
        >>> model = Wukong(jaxrec.EmbeddingBagCollection(tables, rngs=rngs), num_dense=3,
        ...                bottom_layer_sizes=(16, 8), num_layers=2, num_fm=2, num_linear=1, rank=2,
        ...                top_layer_sizes=(16, 1), rngs=rngs)
        >>> ids = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2]], "item": [[3, 4], []]})
        >>> model(jnp.ones((2, 3)), ids).shape
        (2,)
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        *,
        num_dense: int = 0,
        bottom_layer_sizes: Sequence[int] = (),
        num_layers: int,
        num_fm: int,
        num_linear: int,
        rank: int,
        fm_hidden_sizes: Sequence[int] = (),
        top_layer_sizes: Sequence[int],
        dtype: DTypeLike | None = None,
        logit_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        if num_layers < 1:
            raise ValueError(f"num_layers is 1 or more, got {num_layers}")
        check_logit_layer("top_layer_sizes", top_layer_sizes)
        self.embeddings = embeddings
        self.vectors = InputVectors(
            "Wukong",
            embeddings,
            num_dense=num_dense,
            bottom_layer_sizes=bottom_layer_sizes,
            **types,
        )
        counts = [self.vectors.count, *[num_fm + num_linear] * num_layers]
        self.layers = nnx.List(
            WukongLayer(
                count,
                self.vectors.dim,
                num_fm=num_fm,
                num_linear=num_linear,
                rank=rank,
                hidden_sizes=fm_hidden_sizes,
                **types,
            )
            for count in counts[:-1]
        )
        self.top = MLP(
            counts[-1] * self.vectors.dim,
            top_layer_sizes,
            activation_on_last=False,
            output_dtype=logit_dtype,
            **types,
        )

    def logits(
        self,
        dense: Float[AnyArray, "batch num_dense"] | None,
        embedded: Float[Array, "batch columns"],
    ) -> Float[Array, " batch"]:
        x = self.vectors(dense, embedded)
        for layer in self.layers:
            x = layer(x)
        return self.top(x.reshape(x.shape[0], -1))[:, 0]
