"""Sequential recommendation with a bidirectional transformer."""

from __future__ import annotations

import functools
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingCollection
from jaxrec.nn.sequence import JaggedSelfAttention, SequenceModel, SequenceOptions
from jaxrec.nn.tiled_attention import BLOCK
from jaxrec.ragged import JaggedArray, KeyedJaggedArray, complete_cumsum
from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.offsets import without_padding

_init = nnx.initializers.truncated_normal(0.02)


class BERT4RecBlock(nnx.Module):
    """Attention in both directions and two dense layers, each followed by a layer norm.

    Sun et al. 2019 (arXiv:1904.06690), section 3.3: ``layer_norm(x + dropout(f(x)))``, with GELU
    and ``4 * dim`` hidden columns in the dense layers.

    Args:
        dim: Number of columns.
        num_heads: Number of heads.
        dropout_rate: Share of a layer's output that is dropped in training.
        block_size: See `jagged_attention`.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values (normal, standard deviation 0.02, cut at two),
            and of dropout.

    Example:
        >>> import jax.numpy as jnp
        >>> block = BERT4RecBlock(8, 2, rngs=nnx.Rngs(0))
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
        def dense(columns: int, out: int) -> nnx.Linear:
            return nnx.Linear(
                columns, out, kernel_init=_init, dtype=dtype, param_dtype=param_dtype, rngs=rngs
            )

        def norm() -> nnx.LayerNorm:
            return nnx.LayerNorm(dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        self.attention = JaggedSelfAttention(
            dim,
            num_heads,
            causal=False,
            block_size=block_size,
            kernel_init=_init,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.attention_norm, self.dense_norm = norm(), norm()
        self.hidden, self.out = dense(dim, 4 * dim), dense(4 * dim, dim)
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)

    def __call__(
        self, states: Float[AnyArray, "*devices capacity dim"], lengths: AnyArray
    ) -> Float[Array, "*devices capacity dim"]:
        """Map ``[capacity, dim]`` states, of rows of the given lengths, to the same shape."""
        states = without_padding(states, complete_cumsum(lengths))
        attended = self.attention(states, lengths)
        between = self.attention_norm(states + self.dropout(attended))
        changed = self.out(nnx.gelu(self.hidden(between)))
        return self.dense_norm(between + self.dropout(changed))


class BERT4Rec(SequenceModel):
    """Predicts masked items of a sequence from the items on both sides.

    Sun et al. 2019, "BERT4Rec: Sequential recommendation with bidirectional encoder representations
    from transformer" (arXiv:1904.06690). Batches come with some items replaced by a mask, an id of
    its own in the item table; the loss is between the states at the masks and the items that they
    replace. To predict the next item, append the mask. The score of an item is the dot product of
    its embedding and the state (equation 7, without its bias for each item).

    Args:
        items: Tables; one reads the history, and the other items that the loss and the evaluation
            need: masked items, negatives, candidates.
        num_heads: Heads of each `BERT4RecBlock`.
        options: See `SequenceOptions`.

    Raises:
        ValueError: No table reads the history, or several do.

    Example:
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> table = jaxrec.EmbeddingConfig("item", 101, 8, feature_names=("history", "hidden"))
        >>> model = BERT4Rec(
        ...     jaxrec.EmbeddingCollection([table], rngs=rngs), max_length=5, rngs=rngs)
        >>> mask = 100
        >>> batch = KeyedJaggedArray.from_lists(
        ...     {"history": [[1, mask, 3], [mask]], "hidden": [[1, 2, 3], [9]]})
        >>> model(batch)["history"].values.shape
        (8, 8)
    """

    def __init__(
        self,
        items: EmbeddingCollection,
        *,
        num_heads: int = 2,
        **options: Unpack[SequenceOptions],
    ):
        super().__init__(items, functools.partial(BERT4RecBlock, num_heads=num_heads), **options)
        dim, rngs = self.positions.vectors.shape[1], options["rngs"]
        types: dict[str, Any] = {
            "dtype": options.get("dtype"),
            "param_dtype": options.get("param_dtype", jnp.float32),
        }
        self.embedding_norm = nnx.LayerNorm(dim, **types, rngs=rngs)
        self.head = nnx.Linear(dim, dim, kernel_init=_init, **types, rngs=rngs)

    def __call__(self, features: KeyedJaggedArray) -> dict[str, JaggedArray]:
        """Return the state at each position of each sequence, beside other features' embeddings.

        Args:
            features: The batch.

        Returns:
            The result of the collection, with the states in place of the history's embeddings:
            ``[capacity, dim]`` values.

        Raises:
            ValueError: A sequence is longer than ``max_length`` (seen outside of `jax.jit`; inside,
                the states past it become NaN).
        """
        return self.embed(features, self._encode)

    def _encode(self, history: JaggedArray) -> Array:
        states = self.dropout(self.embedding_norm(self.positions(history).values))
        for block in self.blocks:
            states = block(states, history.lengths)
        return self.norm(nnx.gelu(self.head(states)))
