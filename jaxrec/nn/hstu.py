"""HSTU: hierarchical sequential transduction units, and the model made of them."""

from __future__ import annotations

import functools
from typing import Any, Literal, TypeAlias, Unpack, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from jaxrec.embed import EmbeddingCollection
from jaxrec.nn.arithmetic import promote
from jaxrec.nn.sequence import SequenceModel, SequenceOptions, scaled
from jaxrec.nn.tiled_attention import BLOCK, hstu_attention
from jaxrec.ragged import JaggedArray, KeyedJaggedArray, complete_cumsum
from jaxrec.ragged.arrays import AnyArray, each_device
from jaxrec.ragged.offsets import without_padding

QueryTime: TypeAlias = Literal["next", "own"]


class HSTUBlock(nnx.Module):
    """One hierarchical sequential transduction unit.

    ``U, V, Q, K = split(SiLU(f1(norm(x))))``, then `hstu_attention` of Q, K and V, and the output
    ``x + dropout(f2(norm(attended) * U))``: Zhai et al. 2024 (arXiv:2402.17152), equations 1 to 3.

    Args:
        dim: Columns of input and output.
        num_heads: Number of heads.
        max_length: Length of the longest sequence. Each distance below it has its own bias, and the
            attention is divided by it.
        qk_dim: Columns of a head's queries and keys; None: ``dim / num_heads``.
        value_dim: Columns of a head's values and gates; None: ``dim / num_heads``.
        time_buckets: Buckets of the bias for time, see `time_bucket`; 0: no bias.
        query_time: Time from which the bias for time counts back to a key: "next", that of the
            query's next element, as in the authors' code; or "own", that of the query itself, as in
            models that jaxrec trained before it had this option.
        dropout_rate: Share of the gated output that is dropped in training.
        block_size: See `hstu_attention`.
        dtype: Type that it computes in; None: the wider of the input's and ``param_dtype``.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values (Glorot's uniform; biases normal with standard
            deviation 0.02), and of dropout.

    Raises:
        ValueError: A size is below 1, or ``query_time`` is another word.

    Example:
        >>> import jax.numpy as jnp
        >>> block = HSTUBlock(8, 2, max_length=5, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((4, 8)), jnp.array([1, 2])).shape
        (4, 8)
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        max_length: int,
        qk_dim: int | None = None,
        value_dim: int | None = None,
        time_buckets: int = 0,
        query_time: QueryTime = "next",
        dropout_rate: float = 0.0,
        block_size: int = BLOCK,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.num_heads = num_heads
        # 0 heads are refused below, with the other sizes.
        columns = dim // num_heads if num_heads else 0
        self.qk_dim = columns if qk_dim is None else qk_dim
        self.value_dim = columns if value_dim is None else value_dim
        if min(num_heads, self.qk_dim, self.value_dim, max_length) < 1:
            raise ValueError(
                f"an HSTU block's sizes are 1 or more; got num_heads={num_heads}, qk_dim="
                f"{self.qk_dim}, value_dim={self.value_dim}, max_length={max_length}"
            )
        if query_time not in get_args(QueryTime):
            raise ValueError(f'query_time is "next" or "own", got {query_time!r}')
        self.query_time = query_time
        self.max_length = max_length
        self.block_size = block_size
        values = num_heads * self.value_dim

        def dense(columns: int, out: int) -> nnx.Linear:
            return nnx.Linear(columns, out, kernel_init=nnx.initializers.glorot_uniform(), **types)

        self.inputs = dense(dim, 2 * values + 2 * num_heads * self.qk_dim)
        self.out = dense(values, dim)
        self.norm = nnx.LayerNorm(dim, **types)
        self.attended_norm = nnx.LayerNorm(values, **types)
        draw = nnx.initializers.normal(0.02)
        self.position_bias = nnx.Param(draw(rngs.params(), (max_length, num_heads), param_dtype))
        self.time_bias = nnx.data(
            nnx.Param(draw(rngs.params(), (time_buckets, num_heads), param_dtype))
            if time_buckets
            else None
        )
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)
        self.dtype = dtype

    def __call__(
        self,
        states: Float[AnyArray, "*devices capacity dim"],
        lengths: AnyArray,
        timestamps: AnyArray | None = None,
        next_timestamps: AnyArray | None = None,
    ) -> Float[Array, "*devices capacity dim"]:
        """Transform the states of a batch of sequences; the output has the same shape.

        Args:
            states: ``[capacity, dim]``, the sequences one after the other.
            lengths: ``[rows]``, the number of elements of each sequence.
            timestamps: ``[capacity]`` integers, the elements' times; needed with ``time_buckets``.
            next_timestamps: ``[rows]`` integers, the time of the element after each sequence: that
                of the target in training, that of the request in serving. None: 0, or the last
                element's own time where the sequence has ``max_length`` elements, as in the
                authors' code, which pads sequences to ``max_length``.

        Raises:
            ValueError: Timestamps are missing, or given without ``time_buckets``;
                ``next_timestamps`` are given where they are not read; or there is not one time for
                each element or row.
        """
        (states,) = promote(self.dtype, without_padding(states, complete_cumsum(lengths)))
        # One product for all four projections; the split follows the paper's order U, V, Q, K.
        mixed = nnx.silu(self.inputs(self.norm(states)))
        values, queries = self.num_heads * self.value_dim, self.num_heads * self.qk_dim
        gate, value, query, key = jnp.split(
            mixed, (values, 2 * values, 2 * values + queries), axis=-1
        )
        heads = (*states.shape[:-1], self.num_heads, -1)
        attended = hstu_attention(
            query.reshape(heads),
            key.reshape(heads),
            value.reshape(heads),
            lengths,
            scale=1 / self.max_length,
            position_bias=self.position_bias[...],
            time_bias=None if self.time_bias is None else self.time_bias[...],
            timestamps=timestamps,
            query_timestamps=self._query_times(lengths, timestamps, next_timestamps),
            block_size=self.block_size,
        )
        # Without a softmax the sum grows with the length of the row, so a norm comes before the
        # gate.
        gated = self.attended_norm(attended.reshape(gate.shape)) * gate
        return states + self.out(self.dropout(gated))

    def _query_times(
        self, lengths: AnyArray, timestamps: AnyArray | None, next_timestamps: AnyArray | None
    ) -> Array | None:
        """Return the time of each query, ``[capacity]``; None: its own."""
        if next_timestamps is not None and (timestamps is None or self.query_time == "own"):
            raise ValueError('next_timestamps needs timestamps and query_time="next"')
        if timestamps is None or self.query_time == "own":
            return None
        if next_timestamps is not None and np.shape(next_timestamps) != lengths.shape:
            raise ValueError(
                f"next_timestamps has a time for each row, {lengths.shape}; its shape is "
                f"{np.shape(next_timestamps)}"
            )
        arrays = jax.tree.map(jnp.asarray, (lengths, timestamps, next_timestamps))
        return each_device(functools.partial(_next_times, max_length=self.max_length), *arrays)


def _next_times(
    lengths: Int[Array, " rows"],
    timestamps: Int[Array, " capacity"],
    after: Int[Array, " rows"] | None,
    *,
    max_length: int,
) -> Int[Array, " capacity"]:
    """Return the time of the element after each one; at the end of a row that in ``after``."""
    last = jnp.cumsum(lengths, dtype=jnp.int32) - 1
    if after is None:
        own = timestamps.at[last].get(mode="clip")
        after = jnp.where(lengths < max_length, jnp.zeros((), own.dtype), own)
    places = jnp.where(lengths > 0, last, timestamps.shape[0])
    following = jnp.roll(timestamps, -1)
    return following.at[places].set(after.astype(timestamps.dtype), mode="drop")


class HSTU(SequenceModel):
    """Predicts the next item of a sequence from the items before it and their times.

    Zhai et al. 2024, "Actions speak louder than words: Trillion-parameter sequential transducers
    for generative recommendations" (arXiv:2402.17152): a stack of `HSTUBlock`. Used like `SASRec`.

    Args:
        items: Tables. One table reads the history, and also the other features with items, such as
            next items, negatives and candidates.
        num_heads: Heads of each `HSTUBlock`.
        qk_dim: Columns of a head's queries and keys; None: the items' width over ``num_heads``.
        value_dim: Columns of a head's values and gates; None: the items' width over ``num_heads``.
        time_buckets: Buckets of the bias for time, see `time_bucket`; 0: no bias.
        query_time: See `HSTUBlock`.
        options: See `SequenceOptions`.

    Raises:
        ValueError: No table reads the history, or several do.

    Example:
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> table = jaxrec.EmbeddingConfig("item", 100, 8, feature_names=("history", "next"))
        >>> model = HSTU(jaxrec.EmbeddingCollection([table], rngs=rngs), max_length=5, rngs=rngs)
        >>> batch = KeyedJaggedArray.from_lists(
        ...     {"history": [[1, 2, 3], [4]], "next": [[2, 3, 7], [9]]})
        >>> model(batch)["history"].values.shape
        (8, 8)
    """

    def __init__(
        self,
        items: EmbeddingCollection,
        *,
        num_heads: int = 1,
        qk_dim: int | None = None,
        value_dim: int | None = None,
        time_buckets: int = 0,
        query_time: QueryTime = "next",
        **options: Unpack[SequenceOptions],
    ):
        make_block = functools.partial(
            HSTUBlock,
            num_heads=num_heads,
            max_length=options["max_length"],
            qk_dim=qk_dim,
            value_dim=value_dim,
            time_buckets=time_buckets,
            query_time=query_time,
        )
        super().__init__(items, make_block, **options)

    def __call__(
        self,
        features: KeyedJaggedArray,
        timestamps: AnyArray | None = None,
        next_timestamps: AnyArray | None = None,
    ) -> dict[str, JaggedArray]:
        """Return the states of the history's items, and the embeddings of other features.

        Args:
            features: The batch.
            timestamps: ``[capacity]`` integers, the time of each item in
                ``features[history].values``; needed with ``time_buckets``.
            next_timestamps: ``[rows]`` integers, the time of the item to predict after each
                history; see `HSTUBlock`.

        Returns:
            The result of the collection, with states, ``[capacity, dim]``, in place of the
            history's embeddings. The state at position ``i`` depends on the items up to ``i``.

        Raises:
            ValueError: Timestamps are missing, or given without ``time_buckets``; or a sequence is
                longer than ``max_length``. Under jit the states past it become NaN instead.
        """

        def encode(history: JaggedArray) -> Array:
            states = self.dropout(self.positions(scaled(history)).values)
            for block in self.blocks:
                states = block(states, history.lengths, timestamps, next_timestamps)
            return self.norm(states)

        return self.embed(features, encode)
