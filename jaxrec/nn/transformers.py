"""Self-attentive sequential recommendation."""

from __future__ import annotations

import functools
from typing import Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingCollection
from jaxrec.nn.dtypes import promote
from jaxrec.nn.sequence import (
    JaggedSelfAttention,
    SequenceModel,
    SequenceOptions,
    scaled,
)
from jaxrec.nn.tiled_attention import BLOCK
from jaxrec.ragged import JaggedArray, KeyedJaggedArray, complete_cumsum
from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.offsets import without_padding


class SASRecBlock(nnx.Module):
    """Causal attention and two dense layers, each behind a layer norm and beside a shortcut.

    Kang and McAuley 2018 (arXiv:1808.09781), equations 4 to 7: ``x + dropout(f(layer_norm(x)))``.
    The attention has an output projection, as multi-head attention has.

    Args:
        dim: Columns.
        num_heads: Number of heads.
        dropout_rate: Share of a layer's output that is dropped in training.
        block_size: See `jagged_attention`.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values (Glorot's uniform), and of dropout.

    Example:
        >>> import jax.numpy as jnp
        >>> block = SASRecBlock(8, 1, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((4, 8)), jnp.array([1, 2])).shape
        (4, 8)
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        dropout_rate: float = 0.0,
        block_size: int = BLOCK,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        def dense() -> nnx.Linear:
            return nnx.Linear(
                dim,
                dim,
                kernel_init=nnx.initializers.glorot_uniform(),
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )

        def norm() -> nnx.LayerNorm:
            return nnx.LayerNorm(dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        self.attention = JaggedSelfAttention(
            dim,
            num_heads,
            causal=True,
            block_size=block_size,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.attention_norm, self.dense_norm = norm(), norm()
        self.hidden, self.out = dense(), dense()
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)
        self.dtype = dtype

    def __call__(
        self, states: Float[AnyArray, "*devices capacity dim"], lengths: AnyArray
    ) -> Float[Array, "*devices capacity dim"]:
        """Map ``[capacity, dim]`` states, of rows of the given lengths, to the same shape."""
        (states,) = promote(self.dtype, without_padding(states, complete_cumsum(lengths)))
        attended = self.attention(self.attention_norm(states), lengths)
        states = states + self.dropout(attended)
        hidden = self.dropout(nnx.relu(self.hidden(self.dense_norm(states))))
        return states + self.dropout(self.out(hidden))


class SASRec(SequenceModel):
    """Predicts the next item of a sequence from the items before it.

    Kang and McAuley 2018, "Self-attentive sequential recommendation" (arXiv:1808.09781). The score
    of an item is the dot product of its embedding and a sequence's last state: the item table is
    input and output. Train it with `sampled_softmax_loss` between states and the items that follow
    (the paper's binary loss has one negative; a softmax over more makes better rankings: Klenitskiy
    and Vasilev 2023, arXiv:2309.07602).

    Args:
        items: Tables; one reads the history, and with it whatever else the loss and the evaluation
            need embedded: the items that follow, negatives, candidates.
        num_heads: Heads of each `SASRecBlock`.
        options: See `SequenceOptions`.

    Raises:
        ValueError: No table reads the history, or several do.

    Example:
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> table = jaxrec.EmbeddingConfig("item", 100, 8, feature_names=("history", "next"))
        >>> model = SASRec(jaxrec.EmbeddingCollection([table], rngs=rngs), max_length=5, rngs=rngs)
        >>> batch = KeyedJaggedArray.from_lists(
        ...     {"history": [[1, 2, 3], [4]], "next": [[2, 3, 7], [9]]})
        >>> out = model(batch)
        >>> out["history"].values.shape, out["next"].values.shape
        ((8, 8), (8, 8))
    """

    def __init__(
        self,
        items: EmbeddingCollection,
        *,
        num_heads: int = 1,
        **options: Unpack[SequenceOptions],
    ):
        super().__init__(items, functools.partial(SASRecBlock, num_heads=num_heads), **options)

    def __call__(self, features: KeyedJaggedArray) -> dict[str, JaggedArray]:
        """Return the state after each item of each sequence, beside other features' embeddings.

        Args:
            features: The batch.

        Returns:
            The result of the collection, with the states in place of the history's embeddings:
            ``[capacity, dim]`` values. The state of position ``i`` knows the items up to it.

        Raises:
            ValueError: A sequence is longer than ``max_length`` (seen outside of `jax.jit`; inside,
                the states past it become NaN).
        """
        return self.embed(features, self._encode)

    def _encode(self, history: JaggedArray) -> Array:
        states = self.dropout(self.positions(scaled(history)).values)
        for block in self.blocks:
            states = block(states, history.lengths)
        return self.norm(states)
