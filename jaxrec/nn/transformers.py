"""Transformers over sequences: SASRec, which looks back, and BERT4Rec, which looks both ways."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingCollection
from jaxrec.nn.arithmetic import promote
from jaxrec.nn.sequence import JaggedSelfAttention, SequenceModel, SequenceOptions, scaled
from jaxrec.nn.tiled_attention import BLOCK
from jaxrec.ragged import JaggedArray, complete_cumsum
from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.offsets import without_padding

_truncated_normal = nnx.initializers.truncated_normal(0.02)


class _Block(nnx.Module):
    """Layers of a transformer's block: attention and two dense layers, and a norm for each."""

    # Subclasses give the settings here and the order of the layers in `__call__`.
    _is_causal: ClassVar[bool]
    _hidden_factor: ClassVar[int]
    _kernel_init: ClassVar[Callable[..., Array]]

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
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        hidden = self._hidden_factor * dim
        self.attention = JaggedSelfAttention(
            dim,
            num_heads,
            causal=self._is_causal,
            block_size=block_size,
            kernel_init=self._kernel_init,
            **types,
        )
        self.attention_norm, self.dense_norm = (nnx.LayerNorm(dim, **types) for _ in range(2))
        self.hidden = nnx.Linear(dim, hidden, kernel_init=self._kernel_init, **types)
        self.out = nnx.Linear(hidden, dim, kernel_init=self._kernel_init, **types)
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)
        self.dtype = dtype


class SASRecBlock(_Block):
    """Causal attention and two dense layers, each with a layer norm before it and a shortcut.

    Kang and McAuley 2018 (arXiv:1808.09781), equations 4 to 7: ``x + dropout(f(layer_norm(x)))``.
    The attention has an output projection, as usual for multi-head attention.

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

    _is_causal = True
    _hidden_factor = 1
    _kernel_init = staticmethod(nnx.initializers.glorot_uniform())

    def __call__(
        self, states: Float[AnyArray, "*devices capacity dim"], lengths: AnyArray
    ) -> Float[Array, "*devices capacity dim"]:
        """Transform ragged states ``[capacity, dim]`` with lengths ``[rows]``; keep their shape."""
        # Norms come before the layers here and after them in BERT4Rec, as in the two papers.
        (states,) = promote(self.dtype, without_padding(states, complete_cumsum(lengths)))
        # The authors' code has the norm on queries only. Here, as in the paper, keys and values
        # have it too.
        attended = self.attention(self.attention_norm(states), lengths)
        states = states + self.dropout(attended)
        hidden = self.dropout(nnx.relu(self.hidden(self.dense_norm(states))))
        return states + self.dropout(self.out(hidden))


class BERT4RecBlock(_Block):
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

    _is_causal = False
    _hidden_factor = 4
    _kernel_init = staticmethod(_truncated_normal)

    def __call__(
        self, states: Float[AnyArray, "*devices capacity dim"], lengths: AnyArray
    ) -> Float[Array, "*devices capacity dim"]:
        """Transform ragged states ``[capacity, dim]`` with lengths ``[rows]``; keep their shape."""
        states = without_padding(states, complete_cumsum(lengths))
        attended = self.attention(states, lengths)
        between = self.attention_norm(states + self.dropout(attended))
        changed = self.out(nnx.gelu(self.hidden(between)))
        return self.dense_norm(between + self.dropout(changed))


class SASRec(SequenceModel):
    """Predicts the next item of a sequence from the items before it.

    Kang and McAuley 2018, "Self-attentive sequential recommendation" (arXiv:1808.09781). The score
    of an item is the dot product of its embedding and a sequence's last state, so the item table is
    also the output layer. Train the model with `sampled_softmax_loss` between states and next
    items. The paper's binary loss has one negative per positive; a softmax over more negatives
    ranks better (Klenitskiy and Vasilev 2023, arXiv:2309.07602).

    Args:
        items: Tables. One table reads the history, and also the other features with items, such as
            next items, negatives and candidates.
        num_heads: Heads of each `SASRecBlock`.
        options: See `SequenceOptions`.

    Raises:
        ValueError: No table reads the history, or several do.

    Example:
        >>> import jaxrec
        >>> rngs = nnx.Rngs(0)
        >>> table = jaxrec.EmbeddingConfig("item", 100, 8, feature_names=("history", "next"))
        >>> model = SASRec(jaxrec.EmbeddingCollection([table], rngs=rngs), max_length=5, rngs=rngs)
        >>> batch = jaxrec.KeyedJaggedArray.from_lists(
        ...     {"history": [[1, 2, 3], [4]], "next": [[2, 3, 7], [9]]})
        >>> out = model(batch)
        >>> out["history"].values.shape, out["next"].values.shape
        ((8, 8), (8, 8))
    """

    def __init__(
        self, items: EmbeddingCollection, *, num_heads: int = 1, **options: Unpack[SequenceOptions]
    ):
        super().__init__(items, functools.partial(SASRecBlock, num_heads=num_heads), **options)

    def _encode(self, history: JaggedArray) -> Array:
        states = self.dropout(self.positions(scaled(history)).values)
        for block in self.blocks:
            states = block(states, history.lengths)
        return self.norm(states)


class BERT4Rec(SequenceModel):
    """Predicts masked items of a sequence from the items on both sides.

    Sun et al. 2019, "BERT4Rec: Sequential recommendation with bidirectional encoder representations
    from transformer" (arXiv:1904.06690). In a training batch some items are replaced by the mask, a
    further id of the item table. The loss is between the states at the masks and the items that
    they replace. To predict the next item, append the mask. The score of an item is the dot product
    of its embedding and the state (equation 7, without its bias per item).

    Args:
        items: Tables. One table reads the history, and also the other features with items, such as
            masked items, negatives and candidates.
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
        >>> batch = jaxrec.KeyedJaggedArray.from_lists(
        ...     {"history": [[1, mask, 3], [mask]], "hidden": [[1, 2, 3], [9]]})
        >>> model(batch)["history"].values.shape
        (8, 8)
    """

    def __init__(
        self, items: EmbeddingCollection, *, num_heads: int = 2, **options: Unpack[SequenceOptions]
    ):
        super().__init__(items, functools.partial(BERT4RecBlock, num_heads=num_heads), **options)
        dim = self.positions.vectors.shape[1]
        types: dict[str, Any] = {
            "dtype": options.get("dtype"),
            "param_dtype": options.get("param_dtype", jnp.float32),
            "rngs": options["rngs"],
        }
        self.embedding_norm = nnx.LayerNorm(dim, **types)
        self.head = nnx.Linear(dim, dim, kernel_init=_truncated_normal, **types)

    def _encode(self, history: JaggedArray) -> Array:
        states = self.dropout(self.embedding_norm(self.positions(history).values))
        for block in self.blocks:
            states = block(states, history.lengths)
        # The dense layer of equation 7; its product with item embeddings is left to the loss.
        return self.norm(nnx.gelu(self.head(states)))
