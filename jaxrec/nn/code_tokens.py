"""Histories of items as tokens: a user's token, then the codes of each item."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int32

from jaxrec.ragged import JaggedArray, complete_cumsum, segment_ids
from jaxrec.ragged.arrays import each_device, take


@dataclasses.dataclass(frozen=True)
class Histories:
    """Items of each row, oldest first, and the rows' users.

    Attributes:
        items: ``[capacity]`` int32 items.
        users: ``[rows]`` int32 tokens of the users.
        table: ``[items, levels]`` int32 codes of all items.
    """

    items: JaggedArray
    users: Int32[Array, "*devices rows"]
    table: Int32[Array, "items levels"]

    @property
    def rows(self) -> Int32[Array, "*devices capacity"]:
        """Row of each item; the number of rows at padding."""
        return each_device(
            lambda lengths: segment_ids(complete_cumsum(lengths), self.items.capacity),
            jnp.asarray(self.items.lengths),
        )

    def codes(self, items: Int32[Array, "*axes"]) -> Int32[Array, "*axes levels"]:
        """Return the codes of items; -1 for items that do not exist."""
        is_item = (items >= 0) & (items < self.table.shape[0])
        return take(self.table, jnp.where(is_item, items, self.table.shape[0]), fill_value=-1)

    def without_last(self) -> tuple[Histories, Int32[Array, "*devices rows"]]:
        """Return the histories without their last items, and these; -1 for empty rows."""

        def split(lengths: Array, items: Array) -> tuple[Array, Array, Array]:
            starts = jnp.asarray(complete_cumsum(lengths))
            shorter = jnp.maximum(lengths - 1, 0)
            last = take(items, jnp.where(lengths > 0, starts[1:] - 1, items.shape[0]))
            offsets = jnp.asarray(complete_cumsum(shorter))
            rows = segment_ids(offsets, items.shape[0])
            within = jnp.arange(items.shape[0], dtype=jnp.int32) - take(offsets, rows)
            places = jnp.where(rows < lengths.shape[0], take(starts, rows) + within, items.shape[0])
            return shorter, take(items, places), jnp.where(lengths > 0, last, -1)

        lengths, items, last = each_device(
            split, jnp.asarray(self.items.lengths), jnp.asarray(self.items.values)
        )
        return dataclasses.replace(self, items=JaggedArray(items, lengths)), last


class CodeEmbedding(nnx.Module):
    """Learned vectors of users' tokens, of each level's codes, and of the items' positions.

    A row of ``n`` items has ``1 + n levels`` tokens.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        *,
        max_length: int,
        num_user_tokens: int,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        draw = nnx.initializers.normal(dim**-0.5)
        self.users = nnx.Param(draw(rngs.params(), (num_user_tokens, dim), param_dtype))
        self.vectors = nnx.Param(draw(rngs.params(), (sum(sizes), dim), param_dtype))
        # Positions of the user's token, of each item of a history, and of the next item.
        self.positions = nnx.Param(draw(rngs.params(), (max_length + 2, dim), param_dtype))
        self.offsets = tuple(int(x) for x in np.cumsum([0, *sizes[:-1]]))
        self.dtype = dtype

    @property
    def levels(self) -> int:
        """Number of codes of an item."""
        return len(self.offsets)

    def of_codes(
        self, level: int, codes: Int32[Array, "*axes"], positions: Int32[Array, "*axes"]
    ) -> Float[Array, "*axes dim"]:
        """Return the tokens of one level's codes, of items at positions from 1."""
        return self._sum(self._row(codes, level), positions)

    def __call__(self, histories: Histories) -> JaggedArray:
        """Return the tokens of histories, ``[capacity * levels + rows, dim]``.

        Tokens of an item without codes, and past ``max_length`` items, are NaN.
        """
        levels = self.levels
        codes = histories.codes(jnp.asarray(histories.items.values))

        def build(lengths: Array, codes: Array, users: Array) -> tuple[Array, Array, Array]:
            counts = lengths * levels + 1
            size = codes.shape[0] * levels + lengths.shape[0]
            offsets = jnp.asarray(complete_cumsum(counts))
            rows = segment_ids(offsets, size)
            within = jnp.arange(size, dtype=jnp.int32) - take(offsets, rows)
            # Tokens before it: one user's token of each row up to its own, and codes.
            flat = jnp.arange(size, dtype=jnp.int32) - rows - 1
            level = flat % levels
            of_item = self._row(take(codes.reshape(-1), jnp.maximum(flat, 0)), level)
            of_user = take(users, rows)
            index = jnp.where(within == 0, of_user, of_item)
            is_token = rows < lengths.shape[0]
            position = jnp.where(within == 0, 0, (within - 1) // levels + 1)
            return counts, jnp.where(is_token, index, 0), jnp.where(is_token, position, 0)

        counts, index, positions = each_device(
            build, jnp.asarray(histories.items.lengths), codes, histories.users
        )
        return JaggedArray(self._sum(index, positions), counts)

    def _row(self, codes: Array, level: int | Array) -> Array:
        """Return the row of a code's vector, behind those of users; past the end for code -1."""
        offsets = jnp.asarray(self.offsets, jnp.int32)[level]
        past = self.users.shape[0] + self.vectors.shape[0]
        return jnp.where(codes >= 0, self.users.shape[0] + offsets + codes, past)

    def _sum(self, index: Array, positions: Array) -> Array:
        vectors = jnp.concatenate([self.users[...], self.vectors[...]])
        # An index out of range must reach the loss and the scores, for compiled code cannot raise.
        tokens = take(vectors, index, fill_value=jnp.nan)
        tokens = tokens + take(self.positions[...], positions, fill_value=jnp.nan)
        return tokens if self.dtype is None else tokens.astype(self.dtype)
