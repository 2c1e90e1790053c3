"""Masks of attention within ragged rows: their description, and the keys that each query sees.

A row holds context tokens, then history, then targets. Every mask here shows a query one interval
of keys, and the last few keys up to itself. That is the form that tiles and kernels work with.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from jaxrec.ragged import complete_cumsum, segment_ids
from jaxrec.ragged.arrays import AnyArray, take

# The first key of a query that sees no keys: later than any.
NOWHERE = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """Description of a mask, as the arguments of `hstu_attention` give it.

    Attributes:
        num_targets: ``[rows]`` number of targets at the end of each row; None: no targets.
        contextual_lengths: ``[rows]`` number of context tokens at the start of each row; None: no
            context.
        causal: Whether history sees only earlier tokens and itself.
        max_attention_length: Number of places that a query looks back; 0: all.
        min_full_attention_length: Number of last history tokens that, like targets, look back to
            the start of the row.
        target_group_size: Number of consecutive targets that see earlier ones of their group.
    """

    num_targets: Int32[Array, "*devices rows"] | None
    contextual_lengths: Int32[Array, "*devices rows"] | None
    causal: bool = dataclasses.field(metadata={"static": True})
    max_attention_length: int = dataclasses.field(metadata={"static": True})
    min_full_attention_length: int = dataclasses.field(metadata={"static": True})
    target_group_size: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyIntervals:
    """The keys that each query sees: from ``first`` to ``last``, and from ``group`` to ``own``.

    The four bounds are positions in the array of keys, rows one after the other. Both intervals
    include their ends. A query that sees no keys, such as padding, has ``first`` after every key.

    Attributes:
        first: ``[queries]`` first key of the first interval.
        last: ``[queries]`` last key of the first interval.
        own: ``[queries]`` position of the query itself; -1 at padding.
        group: ``[queries]`` first target of the query's group; the query itself if it is no target.
            None in a batch without targets, where a query sees the first interval alone.
    """

    first: Int32[Array, "*queries"]
    last: Int32[Array, "*queries"]
    own: Int32[Array, "*queries"]
    group: Int32[Array, "*queries"] | None

    def see(self, keys: Int32[Array, "*tiles keys"]) -> Bool[Array, "*tiles queries keys"]:
        """Return whether each query sees each of the keys at the given positions."""
        key = keys[..., None, :]
        mask = (self.first[..., None] <= key) & (key <= self.last[..., None])
        if self.group is None:
            return mask
        return mask | ((self.group[..., None] <= key) & (key <= self.own[..., None]))


def make_mask(
    lengths: AnyArray,
    *,
    causal: bool,
    num_targets: AnyArray | None,
    contextual_length: int | AnyArray,
    max_attention_length: int,
    min_full_attention_length: int,
    target_group_size: int,
) -> AttentionMask:
    """Return the description of a mask; refuse arguments that contradict each other."""
    for name, size, least in (
        ("max_attention_length", max_attention_length, 0),
        ("min_full_attention_length", min_full_attention_length, 0),
        ("target_group_size", target_group_size, 1),
    ):
        if size < least:
            raise ValueError(f"{name} is {least} or more, got {size}")
        if size != int(size):
            raise ValueError(f"{name} is an integer, got {size}")
    if max_attention_length and not causal:
        raise ValueError(
            f"max_attention_length={max_attention_length} looks back from the query, so it needs "
            "causal=True"
        )
    if min_full_attention_length and not max_attention_length:
        raise ValueError(
            f"min_full_attention_length={min_full_attention_length} exempts the last tokens from "
            "max_attention_length, which is 0; give both or neither"
        )
    if target_group_size > 1 and num_targets is None:
        raise ValueError(f"target_group_size={target_group_size} needs num_targets")
    no_context = isinstance(contextual_length, int) and contextual_length == 0
    return AttentionMask(
        num_targets=_counts("num_targets", num_targets, lengths),
        contextual_lengths=None
        if no_context
        else _counts("contextual_length", contextual_length, lengths),
        causal=causal,
        max_attention_length=max_attention_length,
        min_full_attention_length=min_full_attention_length,
        target_group_size=target_group_size,
    )


def _counts(
    name: str, counts: int | AnyArray | None, lengths: AnyArray
) -> Int32[Array, "*devices rows"] | None:
    """Return one count for each row, like ``lengths``; refuse those below 0 that are known."""
    if counts is None:
        return None
    if np.ndim(counts) and np.shape(counts) != lengths.shape:
        raise ValueError(
            f"{name} has a number for each row, in the shape of lengths, {lengths.shape}; its "
            f"shape is {np.shape(counts)}"
        )
    if not jnp.issubdtype(jnp.result_type(counts), jnp.integer):
        raise ValueError(f"{name} counts tokens in integers, got {jnp.result_type(counts)}")
    if not isinstance(counts, jax.core.Tracer) and np.min(np.asarray(counts), initial=0) < 0:
        raise ValueError(f"{name} is 0 or more, got {int(np.min(np.asarray(counts)))}")
    return jnp.broadcast_to(jnp.asarray(counts, jnp.int32), lengths.shape)


def require_counts(name: str, counts: AnyArray | None, lengths: AnyArray) -> None:
    """Refuse counts of another shape, and those known to exceed a row's length."""
    if counts is None:
        return
    if counts.shape != lengths.shape:
        raise ValueError(
            f"{name} has a number for each row, in the shape of lengths, {lengths.shape}; its "
            f"shape is {counts.shape}"
        )
    if any(isinstance(x, jax.core.Tracer) for x in (counts, lengths)):
        return
    counts, lengths = np.asarray(counts), np.asarray(lengths)
    wrong = np.argwhere((counts < 0) | (counts > lengths))
    if wrong.size:
        row = tuple(wrong[0])
        raise ValueError(
            f"{name} is between 0 and the row's length; row {row[-1]} has {name}={counts[row]} "
            f"and length {lengths[row]}"
        )


def require_capacity(name: str, lengths: AnyArray, capacity: int) -> None:
    """Refuse lengths that are known to be negative, or to sum past an array's elements."""
    if isinstance(lengths, jax.core.Tracer):
        return
    known = np.asarray(lengths)
    if np.min(known, initial=0) < 0:
        row = tuple(np.argwhere(known < 0)[0])
        raise ValueError(f"{name} are 0 or more; row {row[-1]} has {known[row]}")
    total = int(np.max(known.sum(-1, dtype=np.int64), initial=0))
    if total > capacity:
        raise ValueError(
            f"{name} sum to {total}, more than the {capacity} elements of "
            f"{'query' if name == 'query_lengths' else 'key and value'}; cut rows, or pack the "
            "batch with a larger capacity"
        )


def wrong_queries(
    lengths: Int[Array, " rows"],
    query_lengths: Int[Array, " rows"] | None,
    mask: AttentionMask,
    *,
    queries: int,
    keys: int,
) -> Bool[Array, " {queries}"]:
    """Return the queries of rows that do not fit the arrays or have too many targets or queries."""
    starts = complete_cumsum(lengths if query_lengths is None else query_lengths)
    key_starts = complete_cumsum(lengths)
    wrong = (key_starts[1:] > keys) | (starts[1:] > queries)
    for counts in (mask.num_targets, query_lengths):
        if counts is not None:
            wrong |= (counts < 0) | (counts > lengths)
    return take(jnp.asarray(wrong), segment_ids(starts, queries), fill_value=False)


def key_intervals(
    mask: AttentionMask,
    lengths: Int[AnyArray, " rows"],
    capacity: int,
    query_lengths: Int[AnyArray, " rows"] | None = None,
) -> KeyIntervals:
    """Return the keys that each of ``capacity`` queries sees.

    Args:
        mask: Its arrays are ``[rows]``.
        lengths: Keys of each row.
        capacity: Number of queries, padding included.
        query_lengths: Queries of each row, which are the last of its tokens; None: all.
    """
    counts = lengths if query_lengths is None else query_lengths
    starts, key_starts = complete_cumsum(counts), complete_cumsum(lengths)
    rows = segment_ids(starts, capacity)
    exists = rows < lengths.shape[0]

    def of_row(facts: AnyArray) -> Array:
        return take(jnp.asarray(facts, jnp.int32), rows)

    # From here on places count from the start of the row.
    length = of_row(lengths)
    skipped = jnp.maximum(length - of_row(counts), 0)
    place = jnp.arange(capacity, dtype=jnp.int32) - of_row(starts[:-1]) + skipped
    history_end = length
    if mask.num_targets is not None:
        history_end = length - jnp.clip(of_row(mask.num_targets), 0, length)
    first = jnp.zeros_like(place)
    last = jnp.minimum(place, history_end - 1) if mask.causal else history_end - 1
    group = place
    if mask.target_group_size > 1:
        past = jnp.maximum(place - history_end, 0)
        group = place - past % mask.target_group_size
    # All context counts as one place, before the history.
    joined = jnp.zeros_like(place)
    if mask.contextual_lengths is not None:
        context = of_row(mask.contextual_lengths)
        joined = jnp.maximum(context - 1, 0)
        last = jnp.where(place < context, history_end - 1, last)
    if mask.max_attention_length:
        rank = jnp.clip(place - joined, 0, jnp.maximum(history_end - joined, 0))
        earliest = rank - mask.max_attention_length
        first = jnp.where(earliest > 0, earliest + joined, 0)
        if mask.min_full_attention_length:
            is_free = place >= history_end - mask.min_full_attention_length
            first = jnp.where(is_free, 0, first)
    if mask.contextual_lengths is not None and mask.causal:
        # In rows with fewer tokens than context slots the formula shows each token only itself.
        is_cut = (context > 0) & (history_end < context)
        first, last = jnp.where(is_cut, group, first), jnp.where(is_cut, place, last)

    row_start = of_row(key_starts[:-1])
    return KeyIntervals(
        first=jnp.where(exists, row_start + first, NOWHERE),
        last=jnp.where(exists, row_start + last, -1),
        own=jnp.where(exists, row_start + place, -1),
        group=None if mask.num_targets is None else jnp.where(exists, row_start + group, NOWHERE),
    )
