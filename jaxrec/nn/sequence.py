"""The base of sequence models: from items and positions to a state for each position."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Required, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingCollection
from jaxrec.nn.arithmetic import promote
from jaxrec.nn.positions import positions_in_rows
from jaxrec.nn.tiled_attention import BLOCK, jagged_attention
from jaxrec.ragged import JaggedArray, KeyedJaggedArray, complete_cumsum
from jaxrec.ragged.arrays import AnyArray, each_device, take
from jaxrec.ragged.offsets import without_padding

_glorot = nnx.initializers.glorot_uniform()


class PositionEmbedding(nnx.Module):
    """A learned vector for each position of a sequence, added to its element.

    Args:
        max_length: Number of places.
        dim: Columns.
        dtype: Type of the result; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the vectors.
        rngs: Gives the random key of their first values (normal, standard deviation 0.02).

    Example:
        >>> import jax.numpy as jnp
        >>> column = JaggedArray(jnp.zeros((4, 8)), jnp.array([1, 2]))
        >>> PositionEmbedding(5, 8, rngs=nnx.Rngs(0))(column).values.shape
        (4, 8)
    """

    def __init__(
        self,
        max_length: int,
        dim: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if max_length < 1:
            raise ValueError(f"max_length is 1 or more, got {max_length}")
        draw = nnx.initializers.normal(0.02)
        self.vectors = nnx.Param(draw(rngs.params(), (max_length, dim), param_dtype))
        self.dtype = dtype

    def __call__(self, column: JaggedArray) -> JaggedArray:
        """Add the vectors of positions to a column.

        Raises:
            ValueError: A sequence is longer than ``max_length`` (seen outside of `jax.jit`; inside,
                the states past it become NaN).
        """
        # Compiled code knows no lengths: a position past the last gets NaN, which reaches the loss.
        most = self.vectors.shape[0]
        if not isinstance(column.lengths, jax.core.Tracer):
            longest = int(np.max(np.asarray(column.lengths), initial=0))
            if longest > most:
                raise ValueError(
                    f"a sequence has {longest} elements, but the model max_length={most}; cut "
                    "sequences to their last elements or make the model longer"
                )
        values = without_padding(column.values, complete_cumsum(column.lengths))
        values, vectors = promote(self.dtype, values, self.vectors[...])
        places = take(vectors, positions_in_rows(column), fill_value=jnp.nan)
        return dataclasses.replace(column, values=values + places)


class JaggedSelfAttention(nnx.Module):
    """Multi-head attention of the elements of each row of a ragged array to each other.

    Vaswani et al. 2017, "Attention is all you need" (arXiv:1706.03762), section 3.2.2, through
    `jagged_attention`: rows are not padded, and memory is linear in their length.

    Args:
        dim: Columns of input and output.
        num_heads: Number of heads, a divisor of ``dim``.
        causal: Whether an element sees itself and those before it only.
        block_size: See `jagged_attention`.
        kernel_init: Initializer of the projections' kernels.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values.

    Raises:
        ValueError: ``num_heads`` does not divide ``dim``.

    Example:
        >>> import jax.numpy as jnp
        >>> attention = JaggedSelfAttention(8, 2, causal=True, rngs=nnx.Rngs(0))
        >>> attention(jnp.ones((4, 8)), jnp.array([1, 2])).shape
        (4, 8)
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        causal: bool,
        block_size: int = BLOCK,
        kernel_init: Callable[..., Array] = _glorot,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide dim={dim}")

        def project() -> nnx.Linear:
            return nnx.Linear(
                dim, dim, kernel_init=kernel_init, dtype=dtype, param_dtype=param_dtype, rngs=rngs
            )

        self.query, self.key, self.value, self.out = (project() for _ in range(4))
        self.num_heads = num_heads
        self.causal = causal
        self.block_size = block_size

    def __call__(
        self, states: Float[AnyArray, "*devices capacity dim"], lengths: AnyArray
    ) -> Float[Array, "*devices capacity dim"]:
        """Map ``[capacity, dim]`` states, of rows of the given lengths, to the same shape."""
        states = without_padding(states, complete_cumsum(lengths))
        heads = (*states.shape[:-1], self.num_heads, -1)
        query, key, value = (
            layer(states).reshape(heads) for layer in (self.query, self.key, self.value)
        )
        attended = jagged_attention(
            query, key, value, lengths, causal=self.causal, block_size=self.block_size
        )
        return self.out(attended.reshape(states.shape))


class SequenceOptions(TypedDict, total=False):
    """Options that `SASRec`, `BERT4Rec` and `HSTU` share.

    Attributes:
        history: The feature with the sequences; "history" if not given.
        max_length: Length of the longest sequence; must be given.
        num_blocks: Number of blocks; 2 if not given.
        dropout_rate: Share that is dropped in training, of embeddings and of layers' outputs; 0.2
            if not given.
        block_size: See `jagged_attention`.
        dtype: Type that the model computes in; if not given or None, the wider of the embeddings'
            and ``param_dtype``.
        param_dtype: Type of the dense parameters; float32 if not given.
        rngs: Gives the random keys of first values, and of dropout; must be given.
    """

    history: str
    max_length: Required[int]
    num_blocks: int
    dropout_rate: float
    block_size: int
    dtype: DTypeLike | None
    param_dtype: DTypeLike
    rngs: Required[nnx.Rngs]


class SequenceModel(nnx.Module):
    """Items and positions, a stack of blocks and a layer norm.

    Args:
        items: Tables; one reads the history.
        make_block: Function from a number of columns to a block: a module of states and lengths.
        history, max_length, num_blocks, dropout_rate, block_size, dtype, param_dtype, rngs: See
            `SequenceOptions`.

    Raises:
        ValueError: No table reads the history, or several do.
    """

    def __init__(
        self,
        items: EmbeddingCollection,
        make_block: Callable[..., nnx.Module],
        *,
        history: str = "history",
        max_length: int,
        num_blocks: int = 2,
        dropout_rate: float = 0.2,
        block_size: int = BLOCK,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        dim = _item_width(type(self).__name__, items, history)
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.items = items
        self.history = history
        self.positions = PositionEmbedding(max_length, dim, **types)
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)
        self.blocks = nnx.List(
            make_block(dim, dropout_rate=dropout_rate, block_size=block_size, **types)
            for _ in range(num_blocks)
        )
        self.norm = nnx.LayerNorm(dim, **types)

    def __call__(self, features: KeyedJaggedArray) -> dict[str, JaggedArray]:
        """Return the state at each position of each sequence, beside other features' embeddings.

        Args:
            features: The batch.

        Returns:
            The result of the collection, with the states in place of the history's embeddings:
            ``[capacity, dim]`` values. In a causal model the state of position ``i`` knows the
            items up to it.

        Raises:
            ValueError: A sequence is longer than ``max_length`` (seen outside of `jax.jit`; inside,
                the states past it become NaN).
        """
        return self.embed(features, self._encode)

    def _encode(self, history: JaggedArray) -> Array:
        """Return the states of the history's embeddings, ``[capacity, dim]``."""
        raise NotImplementedError

    def embed(
        self, features: KeyedJaggedArray, encode: Callable[[JaggedArray], Array]
    ) -> dict[str, JaggedArray]:
        """Return all embeddings of a batch, those of the history replaced by ``encode`` of them."""
        # One lookup for all features: the items that follow, negatives and candidates are rows of
        # the same table, and each row is then updated once a step.
        embedded = self.items(features)
        history = embedded[self.history]
        return embedded | {self.history: dataclasses.replace(history, values=encode(history))}


def _item_width(model: str, items: EmbeddingCollection, history: str) -> int:
    """Return the width of the table that reads the history."""
    widths = [t.embedding_dim for t in items.configs if history in t.feature_names]
    if len(widths) != 1:
        features = sorted(f for table in items.configs for f in table.feature_names)
        raise ValueError(
            f"{model} reads the feature {history!r}, which {len(widths)} tables have among "
            f"their features, of {features}; one must"
        )
    return widths[0]


def scaled(column: JaggedArray) -> JaggedArray:
    """Scale embeddings by the square root of their width, before positions are added.

    Vaswani et al. 2017 (arXiv:1706.03762), section 3.4, and SASRec's own code.
    """
    return dataclasses.replace(column, values=column.values * column.values.shape[-1] ** 0.5)


def last_states(column: JaggedArray) -> Float[Array, "*devices rows dim"]:
    """Return the state of each row's last element; zeros for empty rows.

    Example:
        >>> import jax.numpy as jnp
        >>> column = JaggedArray(jnp.array([[1.0], [2.0], [3.0], [0.0]]), jnp.array([2, 0, 1]))
        >>> last_states(column).tolist()
        [[2.0], [0.0], [3.0]]
    """

    def last(lengths: Array, values: Array) -> Array:
        # Empty rows in front have the end -1. They read some element, and are zeros in the end.
        ends = jnp.cumsum(lengths, dtype=jnp.int32) - 1
        states = jnp.take(values, ends, axis=0, mode="clip")
        return jnp.where(lengths[:, None] > 0, states, 0)

    return each_device(last, jnp.asarray(column.lengths), jnp.asarray(column.values))


def candidate_scores(
    column: JaggedArray, candidates: Float[AnyArray, "*devices capacity dim"]
) -> Float[Array, "*devices rows candidates"]:
    """Return the dot product of each row's last state and each of the row's candidates.

    Args:
        column: The states, ``[capacity, dim]`` values.
        candidates: Their embeddings, row by row, equally many for each and without padding.

    Raises:
        ValueError: Candidates do not divide among the rows.

    Example:
        >>> import jax.numpy as jnp
        >>> column = JaggedArray(jnp.array([[1.0], [2.0], [3.0]]), jnp.array([2, 1]))
        >>> candidate_scores(column, jnp.array([[1.0], [10.0], [1.0], [10.0]])).tolist()
        [[2.0, 20.0], [3.0, 30.0]]
    """
    last = last_states(column)
    if candidates.shape[-2] % last.shape[-2]:
        raise ValueError(
            f"{candidates.shape[-2]} candidates do not divide among {last.shape[-2]} rows; give "
            "each row equally many, in a feature without padding"
        )
    of_rows = jnp.asarray(candidates).reshape(*last.shape[:-1], -1, last.shape[-1])
    return jnp.einsum("...d,...cd->...c", last, of_rows)
