"""Generative retrieval: the next item's semantic id, code by code, from those of a history."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int32

from jaxrec.nn.code_blocks import CodeBlock
from jaxrec.nn.code_stacks import CausalStack, CodeStack, EncoderDecoderStack
from jaxrec.nn.code_tokens import CodeEmbedding, Histories
from jaxrec.nn.semantic_ids.beams import Beams, beam_search, check_beams
from jaxrec.nn.semantic_ids.item_codes import SemanticIds
from jaxrec.nn.semantic_ids.item_trie import ItemTrie
from jaxrec.nn.tiled_attention import BLOCK
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.arrays import each_device, take


class ItemVariable(nnx.Variable):
    """Codes and prefixes of the items, which are not trained."""


class SemanticIdDecoder(nnx.Module):
    """Generates the semantic ids of the items that a user takes next.

    Rajput et al. 2023, "Recommender systems with generative retrieval" (TIGER, arXiv:2305.05065):
    a history is a sequence of codes behind a user's token, and a transformer predicts the codes of
    the next item, ``p(item) = prod_l p(code_l | history, code_1, ..., code_{l-1})``.
    `generate` finds the most probable existing items by beam search.

    The model knows an item by its row in ``ids``. It is trained by teacher forcing: `loss` is the
    cross-entropy of the codes. Without encoder layers one causal stack reads history and codes, and
    each row of a batch predicts all items of its history from those before them. With encoder
    layers a row predicts its last item, as in the paper.

    Args:
        ids: Items and their semantic ids.
        dim: Columns of tokens.
        num_layers: Blocks of the decoder.
        num_encoder_layers: Blocks of the encoder; 0: the decoder reads the history, too.
        num_heads: Heads of each attention, a divisor of ``dim``.
        max_length: Largest number of items of a history.
        num_user_tokens: Number of users' tokens; a user has the token ``id % num_user_tokens``.
            With 1 the feature ``user`` is not read.
        history: Name of the feature with the items of a history, oldest first.
        user: Name of the feature with a user's id.
        capacity: Largest number of items, including those that `set_items` adds later; None: the
            number of ``ids``.
        widths: See `ItemTrie.of`.
        dropout_rate: Share of layers' outputs that is dropped in training.
        block_size: See `jagged_attention`.
        dtype: Type that the model computes in; None: ``param_dtype``. Probabilities are float32 or
            wider.
        param_dtype: Type of the parameters.
        rngs: Gives the random keys of first values and of dropout.

    Raises:
        ValueError: A number is out of range, ``num_heads`` does not divide ``dim``, or ``ids`` do
            not fit ``capacity`` or ``widths``.

    Example:
        >>> from jaxrec.nn.semantic_ids import SemanticIds
        >>> ids = SemanticIds.of([[0, 1], [0, 1], [2, 3], [1, 1]], sizes=(4, 4), last_size=2)
        >>> model = SemanticIdDecoder(
        ...     ids, dim=8, num_layers=1, num_heads=2, max_length=5, rngs=nnx.Rngs(0))
        >>> batch = KeyedJaggedArray.from_lists({"history": [[0, 2], [3]]})
        >>> model.loss(batch).shape
        ()
        >>> beams = model.generate(batch, k=2, beam_size=4, exclude=("history",))
        >>> sorted(beams.items[0].tolist())  # all items but 0 and 2
        [1, 3]
    """

    def __init__(
        self,
        ids: SemanticIds,
        *,
        dim: int = 64,
        num_layers: int = 2,
        num_encoder_layers: int = 0,
        num_heads: int = 4,
        max_length: int = 20,
        num_user_tokens: int = 1,
        history: str = "history",
        user: str = "user",
        capacity: int | None = None,
        widths: tuple[int, ...] | None = None,
        dropout_rate: float = 0.1,
        block_size: int = BLOCK,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        numbers = {"num_layers": num_layers, "max_length": max_length, "dim": dim}
        for name, number in (numbers | {"num_user_tokens": num_user_tokens}).items():
            if number < 1:
                raise ValueError(f"{name} is 1 or more, got {number}")
        if num_encoder_layers < 0:
            raise ValueError(f"num_encoder_layers is 0 or more, got {num_encoder_layers}")
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        make_block = functools.partial(
            CodeBlock,
            dim,
            num_heads,
            dropout_rate=dropout_rate,
            block_size=block_size,
            rngs=rngs,
            **types,
        )
        self.embedding = CodeEmbedding(
            ids.sizes,
            dim,
            max_length=max_length,
            num_user_tokens=num_user_tokens,
            rngs=rngs,
            **types,
        )
        draw = nnx.initializers.normal(dim**-0.5)
        stack: CodeStack
        if num_encoder_layers:
            start = draw(rngs.params(), (dim,), param_dtype)
            stack = EncoderDecoderStack(num_encoder_layers, num_layers, make_block, start)
        else:
            stack = CausalStack(num_layers, make_block)
        self.stack = stack
        self.norm = nnx.LayerNorm(dim, rngs=rngs, **types)
        self.head = nnx.Param(draw(rngs.params(), (sum(ids.sizes), dim), param_dtype))
        self.history, self.user = history, user
        self.max_length, self.num_user_tokens = max_length, num_user_tokens
        self.sizes = ids.sizes
        trie = ItemTrie.of(ids, capacity=capacity, widths=widths)
        self.codes = ItemVariable(_code_table(ids, trie))
        self.trie = ItemVariable(trie)

    def set_items(self, ids: SemanticIds) -> None:
        """Replace the items, for example to add new ones after the old ones.

        Shapes stay, so that compiled programs, checkpoints and exported models remain valid.

        Raises:
            ValueError: Codes have other sizes, or the items do not fit ``capacity`` or ``widths``.
        """
        if ids.sizes != self.sizes:
            raise ValueError(f"the model has codes of sizes {self.sizes}, the items {ids.sizes}")
        old = self.trie.get_value()
        trie = ItemTrie.of(ids, capacity=old.places.shape[0], widths=old.widths)
        self.codes.set_value(_code_table(ids, trie))
        self.trie.set_value(trie)

    def __call__(self, features: KeyedJaggedArray) -> Float[Array, "*devices rows"]:
        """Return the negative log-likelihood of each row's predicted items, ``[rows]``.

        Args:
            features: The batch: the feature ``history``, and ``user`` with several users' tokens.

        Returns:
            The sum over the row's predicted items and their codes, in float32 or wider; 0 for a row
            without items. NaN for a row with an item that the model does not have.

        Raises:
            KeyError: The batch lacks a feature.
        """
        return self._losses(features)[0]

    def loss(self, features: KeyedJaggedArray) -> Float[Array, ""]:
        """Return the mean cross-entropy of a code over all predicted items of a batch.

        Raises:
            KeyError: The batch lacks a feature.
        """
        losses, counts = self._losses(features)
        return losses.sum() / jnp.maximum(counts.sum() * len(self.sizes), 1)

    def _losses(self, features: KeyedJaggedArray) -> tuple[Array, Array]:
        """Return the sum of the losses of each row, and its number of predicted items."""
        histories = self._histories(features)
        found = self.stack.teach(self.embedding, histories)
        codes = histories.codes(found.items)
        losses = jnp.zeros(found.rows.shape, jnp.promote_types(found.states.dtype, jnp.float32))
        for level in range(len(self.sizes)):
            logs = self._log_probabilities(level, found.states[..., level, :])
            of_code = codes[..., level, None]
            own = jnp.take_along_axis(logs, jnp.maximum(of_code, 0), axis=-1)
            losses = losses - jnp.where(of_code >= 0, own, jnp.nan)[..., 0]
        rows = histories.users.shape[-1]

        def sums(rows_of: Array, losses: Array) -> tuple[Array, Array]:
            is_item = rows_of < rows
            total = jax.ops.segment_sum(jnp.where(is_item, losses, 0), rows_of, rows)
            return total, jax.ops.segment_sum(is_item.astype(jnp.int32), rows_of, rows)

        return each_device(sums, found.rows, losses)

    def generate(
        self,
        features: KeyedJaggedArray,
        *,
        k: int = 10,
        beam_size: int = 20,
        diversity: float = 0.0,
        exclude: Sequence[str] = (),
        longest: int | None = None,
    ) -> Beams:
        """Return the most probable next items of each row, found by beam search.

        Every beam is a prefix of an existing item; see `jaxrec.nn.semantic_ids.beam_search`. Keys
        and values of a history are computed once and shared by all beams.

        Args:
            features: The batch, as the model's call takes it. Dropout is off after
                ``model.eval()``.
            k: Items of a row.
            beam_size: Beams of a row, ``k`` or more.
            diversity: Penalty of siblings; see `jaxrec.nn.semantic_ids.beam_search`.
            exclude: Features whose items a row must not get, such as ``("history",)``.
            longest: Static bound of a row's items, ``max_length`` or less; None: ``max_length``.

        Returns:
            ``items`` and ``scores`` ``[rows, k]``; on a mesh with one more axis in front. A row
            with an item that the model does not have, or more than ``longest``, has items -1 and
            scores of NaN.

        Raises:
            KeyError: The batch lacks a feature.
            ValueError: A number is out of range.
        """
        check_beams(k, beam_size, diversity)
        size = self.max_length if longest is None else longest
        if not 1 <= size <= self.max_length:
            raise ValueError(f"longest must be from 1 to {self.max_length}, got {size}")
        histories = self._histories(features)
        context, suffix, first = self.stack.begin(self.embedding, histories, size)
        lengths = jnp.asarray(histories.items.lengths).reshape(-1)
        first = jnp.where((lengths <= size)[:, None], first, jnp.nan)
        positions = (lengths + 1)[:, None]

        def step(level: int, codes: Array, suffix: Any) -> tuple[Array, Any]:
            if level == 0:
                return self._log_probabilities(0, first)[:, None], suffix
            place = jnp.broadcast_to(positions, codes.shape)
            token = self.embedding.of_codes(level - 1, codes, place)
            states, suffix = self.stack.step(token, context, suffix)
            return self._log_probabilities(level, states), suffix

        beams = beam_search(
            self.trie.get_value(),
            step,
            suffix,
            rows=lengths.shape[0],
            k=k,
            beam_size=beam_size,
            diversity=diversity,
            excluded=self._items_of(features, exclude, size),
        )
        shape = (*histories.users.shape, k)
        return Beams(beams.items.reshape(shape), beams.scores.reshape(shape))

    def _log_probabilities(self, level: int, states: Float[Array, "*axes dim"]) -> Array:
        """Return the log-probabilities of a level's codes, ``[..., size]``."""
        start = self.embedding.offsets[level]
        vectors = self.head[...][start : start + self.sizes[level]]
        states = self.norm(states)
        wide = jnp.promote_types(states.dtype, jnp.float32)
        logits = jnp.einsum(
            "...d,sd->...s", states, vectors.astype(states.dtype), preferred_element_type=wide
        )
        return jax.nn.log_softmax(logits, axis=-1)

    def _histories(self, features: KeyedJaggedArray) -> Histories:
        history = features[self.history]
        lengths = jnp.asarray(history.lengths)
        tokens = jnp.zeros(lengths.shape, jnp.int32)
        if self.num_user_tokens > 1:
            column = features[self.user]

            def first(counts: Array, values: Array) -> Array:
                starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
                return jnp.where(counts > 0, take(values, starts), 0)

            ids = each_device(first, jnp.asarray(column.lengths), jnp.asarray(column.values))
            tokens = (ids % self.num_user_tokens).astype(jnp.int32)
        return Histories(history, tokens, self.codes.get_value())

    def _items_of(
        self, features: KeyedJaggedArray, names: Sequence[str], longest: int
    ) -> Int32[Array, "rows n"] | None:
        """Return the items of some features, ``[rows, n]``, filled up by -1; None: no features."""
        if isinstance(names, str):
            raise TypeError(f"exclude is a tuple of names of features, got {names!r}")
        parts = []
        for name in names:
            column = features[name]
            # Rows of the history have `longest` items or fewer; those of others may have more.
            size = column.capacity if name != self.history else min(longest, column.capacity)
            rows = functools.partial(_rows_of_items, size=size)
            lengths, values = jnp.asarray(column.lengths), jnp.asarray(column.values)
            parts.append(each_device(rows, lengths, values).reshape(-1, size))
        return jnp.concatenate(parts, axis=1) if parts else None


def _rows_of_items(lengths: Array, values: Array, *, size: int) -> Array:
    starts = jnp.cumsum(lengths, dtype=jnp.int32) - lengths
    within = jnp.arange(size, dtype=jnp.int32)[None]
    places = jnp.where(within < lengths[:, None], starts[:, None] + within, values.shape[0])
    return take(values.astype(jnp.int32), places, fill_value=-1)


def _code_table(ids: SemanticIds, trie: ItemTrie) -> Int32[Array, "capacity levels"]:
    table = np.full((trie.places.shape[0], len(ids.sizes)), -1, np.int32)
    table[: len(ids)] = ids.codes
    return jnp.asarray(table)
