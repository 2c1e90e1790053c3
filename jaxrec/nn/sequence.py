"""Layers and base class of sequence models, which compute a state per item of a history."""

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
from jaxrec.nn.positions import take_positions
from jaxrec.nn.tiled_attention import BLOCK, jagged_attention
from jaxrec.ragged import JaggedArray, KeyedJaggedArray, complete_cumsum
from jaxrec.ragged.arrays import AnyArray, each_device
from jaxrec.ragged.offsets import without_padding

_glorot = nnx.initializers.glorot_uniform()


class PositionEmbedding(nnx.Module):
    """A learned vector for each position of a sequence, added to its element.

    Args:
        max_length: Number of positions.
        dim: Columns.
        dtype: Type of the result; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the vectors.
        rngs: Gives the random key of the vectors' first values (normal, standard deviation 0.02).

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
            ValueError: A sequence is longer than ``max_length``. Under jit the states past it
                become NaN instead.
        """
        # Compiled code cannot raise an error: a position past the last gets NaN, which reaches the
        # loss.
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
        places = take_positions(vectors, jnp.asarray(column.lengths), column.capacity)
        return dataclasses.replace(column, values=values + places)


class JaggedSelfAttention(nnx.Module):
    """Multi-head attention within each row of a ragged array.

    Vaswani et al. 2017, "Attention is all you need" (arXiv:1706.03762), section 3.2.2, computed by
    `jagged_attention`: rows are not padded, and memory is linear in their length.

    Args:
        dim: Columns of input and output.
        num_heads: Number of heads, a divisor of ``dim``.
        causal: Whether an element sees only itself and earlier elements.
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
        """Transform ragged states ``[capacity, dim]`` with lengths ``[rows]``; keep their shape."""
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
        history: Name of the feature with the sequences; "history" by default.
        max_length: Length of the longest sequence; required.
        num_blocks: Number of blocks; 2 by default.
        dropout_rate: Share of embeddings and of layers' outputs that is dropped in training; 0.2 by
            default.
        block_size: See `jagged_attention`.
        dtype: Type that the model computes in; None, the default: the wider of the embeddings' and
            ``param_dtype``.
        param_dtype: Type of the dense parameters; float32 by default.
        rngs: Gives the random keys of first values, and of dropout; required.
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
    """Base of sequence models: item and position embeddings, a stack of blocks, a layer norm.

    ``make_block(dim, ...)`` returns a block: a module that maps ``states, lengths, ...`` to states.
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
        """Return the states of the history's items, and the embeddings of other features.

        Args:
            features: The batch.

        Returns:
            The result of the collection, with states, ``[capacity, dim]``, in place of the
            history's embeddings. In a causal model the state at position ``i`` depends on the items
            up to ``i``.

        Raises:
            ValueError: A sequence is longer than ``max_length``. Under jit the states past it
                become NaN instead.
        """
        return self.embed(features, self._encode)

    def _encode(self, history: JaggedArray) -> Array:
        """Map the history's embeddings to states, ``[capacity, dim]``."""
        raise NotImplementedError

    def embed(
        self, features: KeyedJaggedArray, encode: Callable[[JaggedArray], Array]
    ) -> dict[str, JaggedArray]:
        """Look up a batch and apply ``encode`` to the history's embeddings."""
        # One lookup for all features. Next items, negatives and candidates are rows of the same
        # table as the history, and each row must be updated once a step.
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
    """Multiply embeddings by the square root of their width (arXiv:1706.03762, section 3.4)."""
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
        # An empty row reads the last element of an earlier row (or, at the front, position -1,
        # clipped to 0). The last line replaces it by zeros.
        ends = jnp.cumsum(lengths, dtype=jnp.int32) - 1
        states = jnp.take(values, ends, axis=0, mode="clip")
        return jnp.where(lengths[:, None] > 0, states, 0)

    return each_device(last, jnp.asarray(column.lengths), jnp.asarray(column.values))


def candidate_scores(
    column: JaggedArray, candidates: Float[AnyArray, "*devices capacity dim"]
) -> Float[Array, "*devices rows candidates"]:
    """Return the dot products of each row's last state and the row's candidates.

    Args:
        column: The states, ``[capacity, dim]`` values.
        candidates: ``[rows * candidates, dim]`` embeddings, row by row, without padding.

    Raises:
        ValueError: The number of candidates is not a multiple of the number of rows.

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
