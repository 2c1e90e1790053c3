"""The two forms of a generator of codes: one causal stack, or an encoder and a decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxrec.nn.code_blocks import CodeBlock, Context, Suffix, padded
from jaxrec.nn.code_tokens import CodeEmbedding, Histories
from jaxrec.ragged import JaggedArray
from jaxrec.ragged.arrays import each_device, take


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Predictions:
    """States from which the codes of items are predicted, and these items.

    Attributes:
        states: ``[n, levels, dim]``; the state of a level has seen the codes of the levels before.
        items: ``[n]`` int32 item that each of the ``n`` places predicts.
        rows: ``[n]`` row of each place; the number of rows at padding.
    """

    states: Float[Array, "*devices n levels dim"]
    items: Int32[Array, "*devices n"]
    rows: Int32[Array, "*devices n"]


class CodeStack(Protocol):
    """Blocks that turn histories, and codes generated so far, into states of the next code."""

    def teach(self, embedding: CodeEmbedding, histories: Histories) -> Predictions:
        """Return the states that predict the items of a training batch, by teacher forcing."""

    def begin(
        self, embedding: CodeEmbedding, histories: Histories, longest: int
    ) -> tuple[Context, Suffix, Float[Array, "rows dim"]]:
        """Return the cached history of ``longest`` items or fewer, and the first code's states.

        Histories over a mesh are taken as one batch, ``[devices * rows]``.
        """

    def step(
        self, token: Float[Array, "rows beams dim"], context: Context, suffix: Suffix
    ) -> tuple[Float[Array, "rows beams dim"], Suffix]:
        """Return the states after one more token of each beam, and the longer suffix."""


class CausalStack(nnx.Module):
    """Blocks over rows of a history's codes and the next item's; a code sees the codes before it.

    A training row predicts every item of its history from those before it.
    """

    def __init__(self, num_layers: int, make_block: Callable[..., CodeBlock]):
        self.blocks = nnx.List(make_block(causal=True) for _ in range(num_layers))

    def teach(self, embedding: CodeEmbedding, histories: Histories) -> Predictions:
        states, token_counts = _arrays(embedding(histories))
        for block in self.blocks:
            states = block.ragged(states, token_counts)
        levels = embedding.levels

        # The token before a code predicts it. A row's first token is the user's, so that item i of
        # the batch, in row r, has its level l predicted at place i * levels + r + l.
        def of_items(lengths: Array, states: Array, rows: Array) -> Array:
            item = jnp.arange(rows.shape[0], dtype=jnp.int32)
            level = jnp.arange(levels, dtype=jnp.int32)
            places = (item * levels + rows)[:, None] + level[None]
            is_item = (rows < lengths.shape[0])[:, None]
            return take(states, jnp.where(is_item, places, states.shape[0]))

        predicted = each_device(of_items, token_counts, states, histories.rows)
        return Predictions(predicted, jnp.asarray(histories.items.values), histories.rows)

    def begin(
        self, embedding: CodeEmbedding, histories: Histories, longest: int
    ) -> tuple[Context, Suffix, Array]:
        states, token_counts = _arrays(embedding(histories))
        size = longest * embedding.levels + 1
        keys, values = [], []
        for block in self.blocks:
            key, value = block.keys_of(states)
            keys.append(_rows(padded(token_counts, key, size)))
            values.append(_rows(padded(token_counts, value, size)))
            states = block.ragged(states, token_counts)

        def last(lengths: Array, states: Array) -> Array:
            return take(states, jnp.cumsum(lengths, dtype=jnp.int32) - 1)

        first = each_device(last, token_counts, states)
        context = Context(tuple(keys), tuple(values), token_counts.reshape(-1))
        return context, _empty(context), first.reshape(-1, first.shape[-1])

    def step(self, token: Array, context: Context, suffix: Suffix) -> tuple[Array, Suffix]:
        seen = _seen(context)
        states = token[:, :, None]  # [rows, beams, 1, dim]
        for number, block in enumerate(self.blocks):
            suffix = suffix.with_block(number, *block.keys_of(states))
            # One axis of beams and tokens, so that all beams share the keys of the history.
            states = block.extend(
                states, suffix.keys[number], suffix.values[number],
                context.keys[number], context.values[number], seen,
            )  # fmt: skip
        return states[:, :, 0], suffix


class EncoderDecoderStack(nnx.Module):
    """An encoder that reads the history both ways, and a decoder of one item's codes.

    A training row predicts the last item of its history from those before it.
    """

    def __init__(
        self,
        num_encoder_layers: int,
        num_layers: int,
        make_block: Callable[..., CodeBlock],
        start: Array,
    ):
        self.encoder = nnx.List(make_block(causal=False) for _ in range(num_encoder_layers))
        self.blocks = nnx.List(make_block(causal=True, has_cross=True) for _ in range(num_layers))
        self.start = nnx.Param(start)  # the decoder's token before the first code

    def _encode(self, embedding: CodeEmbedding, histories: Histories, longest: int) -> Context:
        states, token_counts = _arrays(embedding(histories))
        size = longest * embedding.levels + 1
        for block in self.encoder:
            states = block.ragged(states, token_counts)
        keys, values = [], []
        for block in self.blocks:
            assert block.cross is not None
            key, value = block.cross.keys_of(states)
            keys.append(padded(token_counts, key, size))
            values.append(padded(token_counts, value, size))
        return Context(tuple(keys), tuple(values), token_counts)

    def teach(self, embedding: CodeEmbedding, histories: Histories) -> Predictions:
        before, last = histories.without_last()
        longest = min(before.items.capacity, embedding.positions.shape[0] - 2)
        context = self._encode(embedding, before, longest)
        codes = histories.codes(jnp.maximum(last, 0))  # [rows, levels]
        place = jnp.asarray(before.items.lengths) + 1
        given = [
            embedding.of_codes(level, codes[..., level], place)
            for level in range(embedding.levels - 1)
        ]
        first = take(self.start[...][None], jnp.zeros_like(last))  # sharded as the rows
        states = jnp.stack([first.astype(context.keys[0].dtype), *given], axis=-2)
        levels = states.shape[-2]
        seen = _seen(context)[..., None, :]
        causal = jnp.tril(jnp.ones((levels, levels), bool))
        for number, block in enumerate(self.blocks):
            key, value = block.keys_of(states)
            states = block.cross_extend(
                states, key, value, causal, context.keys[number], context.values[number], seen
            )
        rows = jnp.arange(last.shape[-1], dtype=jnp.int32)
        rows = jnp.where(last >= 0, rows, last.shape[-1])
        return Predictions(states, jnp.maximum(last, 0), rows)

    def begin(
        self, embedding: CodeEmbedding, histories: Histories, longest: int
    ) -> tuple[Context, Suffix, Array]:
        context = self._encode(embedding, histories, longest)
        context = Context(
            tuple(map(_rows, context.keys)),
            tuple(map(_rows, context.values)),
            context.lengths.reshape(-1),
        )
        dtype = context.keys[0].dtype
        first = jnp.broadcast_to(
            self.start[...].astype(dtype), (context.lengths.shape[0], 1, self.start.shape[0])
        )
        states, suffix = self.step(first, context, _empty(context))
        return context, suffix, states[:, 0]

    def step(self, token: Array, context: Context, suffix: Suffix) -> tuple[Array, Suffix]:
        seen = _seen(context)[:, None, None]
        states = token[:, :, None]  # [rows, beams, 1, dim]
        for number, block in enumerate(self.blocks):
            suffix = suffix.with_block(number, *block.keys_of(states))
            states = block.cross_extend(
                states, suffix.keys[number], suffix.values[number], None,
                context.keys[number][:, None], context.values[number][:, None], seen,
            )  # fmt: skip
        return states[:, :, 0], suffix


def _rows(values: Array) -> Array:
    """Merge the axis of devices, if any, with that of rows: ``[rows, tokens, heads, dim]``."""
    return values.reshape(-1, *values.shape[-3:])


def _arrays(tokens: JaggedArray) -> tuple[Array, Array]:
    """Return the values and the lengths of tokens, as arrays of JAX."""
    return jnp.asarray(tokens.values), jnp.asarray(tokens.lengths)


def _seen(context: Context) -> Array:
    """Return which tokens of the padded history exist, ``[rows, tokens]``."""
    place = jnp.arange(context.keys[0].shape[-3], dtype=jnp.int32)
    return place.reshape((1,) * context.lengths.ndim + (-1,)) < context.lengths[..., None]


def _empty(context: Context) -> Suffix:
    """Return the suffix of one beam a row without a token."""
    rows, _, heads, dim = context.keys[0].shape
    nothing = (jnp.zeros((rows, 1, 0, heads, dim), context.keys[0].dtype),) * len(context.keys)
    return Suffix(nothing, nothing)
