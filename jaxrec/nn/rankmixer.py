"""RankMixer: tokens of features that exchange parts, each with a network of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn.click_model import ClickModel, check_logit_layer, num_columns, with_dense
from jaxrec.nn.mlp import MLP
from jaxrec.nn.token_linear import TokenLinear
from jaxrec.ragged.arrays import AnyArray


class RankMixerBlock(nnx.Module):
    """Tokens exchange parts without parameters, then each goes through a network of its own.

    For tokens ``x_t`` of ``dim`` columns, each in ``T`` parts ``x_t^h``::

        s = layer_norm(mix(x) + x)        mix(x)_h = [x_1^h, ..., x_T^h]
        y_t = layer_norm(W2_t gelu(W1_t s_t + b1_t) + b2_t + s_t)

    Zhu et al. 2025, "RankMixer: Scaling up ranking models in industrial recommenders"
    (arXiv:2507.15551), section 3.3, with as many heads as tokens, and dense networks.

    The block has ``T * (2 * dim * hidden + hidden + dim) + 4 * dim`` parameters and
    ``4 * T * dim * hidden`` FLOPs per sample in its products.

    Args:
        num_tokens: Number of tokens, ``T``, a divisor of ``dim``.
        dim: Columns of a token.
        hidden_dim: Hidden columns of each token's network.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: ``num_tokens`` does not divide ``dim``, or a size is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> RankMixerBlock(4, 8, hidden_dim=16, rngs=nnx.Rngs(0))(jnp.ones((2, 4, 8))).shape
        (2, 4, 8)
    """

    def __init__(
        self,
        num_tokens: int,
        dim: int,
        *,
        hidden_dim: int,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if min(num_tokens, dim, hidden_dim) < 1 or dim % num_tokens:
            raise ValueError(
                "tokens exchange equal parts, so num_tokens divides dim, and hidden_dim is 1 or "
                f"more; got num_tokens={num_tokens}, dim={dim}, hidden_dim={hidden_dim}"
            )
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.mixed_norm, self.norm = (nnx.LayerNorm(dim, **types) for _ in range(2))
        self.hidden = TokenLinear(num_tokens, dim, hidden_dim, **types)
        self.out = TokenLinear(num_tokens, hidden_dim, dim, **types)

    def __call__(self, x: Float[Array, "batch tokens dim"]) -> Float[Array, "batch tokens dim"]:
        """Map ``[batch, num_tokens, dim]`` to the same shape."""
        batch, tokens, dim = x.shape
        mixed = x.reshape(batch, tokens, tokens, dim // tokens).swapaxes(1, 2).reshape(x.shape)
        x = self.mixed_norm(mixed + x)
        return self.norm(self.out(nnx.gelu(self.hidden(x))) + x)


class RankMixer(ClickModel):
    """Predicts clicks from tokens of features, which blocks mix.

    Zhu et al. 2025 (arXiv:2507.15551), figure 1: all columns of a sample, dense features first, are
    cut into ``num_tokens`` pieces of one size, and each is projected to a token. `RankMixerBlock`
    follows `RankMixerBlock`, and an MLP reads the mean of the tokens. Columns of related features
    share a token if their tables stand side by side. Embeddings may differ in width.

    For ``c`` columns in all, the projections have ``T * (ceil(c / T) + 1) * dim`` parameters.

    Args:
        embeddings: The tables.
        num_dense: Number of dense features.
        num_layers: Number of blocks.
        num_tokens: Number of tokens, a divisor of ``dim``.
        dim: Columns of a token.
        hidden_dim: Hidden columns of each token's network.
        top_layer_sizes: Layers of the MLP on top; the last is 1.
        dtype: Type that the dense part computes in; None: float32, unless inputs are wider.
        logit_dtype: Type of the last layer's arithmetic and of the logits; None: ``dtype``.
        param_dtype: Type of the dense parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: ``num_tokens`` does not divide ``dim``, or a size is not as given above.

    Example:
        >>> import jax.numpy as jnp
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> tables = [jaxrec.EmbeddingBagConfig(name, 100, 8) for name in ("user", "item")]
        >>> model = RankMixer(jaxrec.EmbeddingBagCollection(tables, rngs=rngs), num_dense=3,
        ...                   num_layers=2, num_tokens=4, dim=16, hidden_dim=32,
        ...                   top_layer_sizes=(1,), rngs=rngs)
        >>> ids = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2]], "item": [[3, 4], []]})
        >>> model(jnp.ones((2, 3)), ids).shape
        (2,)
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        *,
        num_dense: int = 0,
        num_layers: int,
        num_tokens: int,
        dim: int,
        hidden_dim: int,
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
        self.num_dense = num_dense
        self.dtype = dtype
        self.num_tokens = num_tokens
        self.blocks = nnx.List(
            RankMixerBlock(num_tokens, dim, hidden_dim=hidden_dim, **types)
            for _ in range(num_layers)
        )
        self.piece = -(-(num_columns(embeddings) + num_dense) // num_tokens)
        self.tokens = TokenLinear(num_tokens, self.piece, dim, **types)
        self.top = MLP(
            dim, top_layer_sizes, activation_on_last=False, output_dtype=logit_dtype, **types
        )

    def logits(
        self,
        dense: Float[AnyArray, "batch num_dense"] | None,
        embedded: Float[Array, "batch columns"],
    ) -> Float[Array, " batch"]:
        columns = with_dense(embedded, dense, self.num_dense, self.dtype)
        missing = self.num_tokens * self.piece - columns.shape[1]
        pieces = jnp.pad(columns, ((0, 0), (0, missing)))
        x = self.tokens(pieces.reshape(-1, self.num_tokens, self.piece))
        for block in self.blocks:
            x = block(x)
        return self.top(x.mean(axis=1))[:, 0]
