"""Ragged rows put together from pieces, and pieces cut out of ragged rows.

A row of a ranker is context, then history, then targets. Each comes from a ragged array of its own,
and a stack that truncates its history keeps two pieces of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from jaxrec.ragged import complete_cumsum, segment_ids
from jaxrec.ragged.arrays import each_device

# First element in the source, and number of elements, of each row's piece; both ``[rows]``.
Piece = tuple[Int32[Array, " rows"], Int32[Array, " rows"]]


def join_rows(lengths: Sequence[Array], parts: Sequence[Any]) -> Any:
    """Join ragged arrays row by row.

    ``lengths`` has one array ``[*devices, rows]`` a part. A part is a pytree of arrays
    ``[*devices, capacity, ...]``; all parts have one structure, which the result has too. Its
    capacity is the sum of the parts' capacities.
    """

    def join(first: Array, others: Sequence[Array], parts: Sequence[Any]) -> Any:
        lengths = [first, *others]
        capacities = [jax.tree.leaves(part)[0].shape[0] for part in parts]
        bases = [sum(capacities[:number]) for number in range(len(parts))]
        pieces = [
            (base + jnp.asarray(complete_cumsum(length))[:-1], length)
            for base, length in zip(bases, lengths, strict=True)
        ]
        index = _index(pieces, sum(capacities), sum(capacities))
        return jax.tree.map(lambda *arrays: _pick(jnp.concatenate(arrays), index), *parts)

    first, *others = (jnp.asarray(length) for length in lengths)
    return each_device(join, first, others, list(parts))


def cut_rows(
    lengths: Array, pieces: Sequence[tuple[Array | int, Array]], values: Any, *, capacity: int
) -> Any:
    """Cut pieces out of each row and join them.

    A piece is its first place in the row and its number of elements, ``[*devices, rows]``.
    ``values`` is a pytree of arrays ``[*devices, capacity, ...]``; the result has the static
    capacity given, which must hold all pieces.
    """

    def cut(lengths: Array, pieces: Sequence[Piece], values: Any) -> Any:
        starts = jnp.asarray(complete_cumsum(lengths))[:-1]
        size = jax.tree.leaves(values)[0].shape[0]
        index = _index([(starts + first, count) for first, count in pieces], capacity, size)
        return jax.tree.map(lambda array: _pick(array, index), values)

    lengths = jnp.asarray(lengths)
    placed = [
        (jnp.broadcast_to(jnp.asarray(first, lengths.dtype), lengths.shape), count)
        for first, count in pieces
    ]
    return each_device(cut, lengths, placed, values)


def _index(pieces: Sequence[Piece], capacity: int, size: int) -> Int32[Array, " {capacity}"]:
    """Return the source of each element of the joined rows; ``size`` or more at padding."""
    counts = [count for _, count in pieces]
    offsets = jnp.asarray(complete_cumsum(sum(counts[1:], counts[0])))
    rows = segment_ids(offsets, capacity)
    element = jnp.arange(capacity, dtype=jnp.int32)
    within = element - offsets[rows]
    # Each element of padding has an index of its own past the end, so that no index repeats and the
    # gradient's scatter needs no addition.
    index = size + element
    for first, count in pieces:
        in_piece = (within >= 0) & (within < count[rows])
        index = jnp.where(in_piece, first[rows] + within, index)
        within = within - count[rows]
    return jnp.where(rows < counts[0].shape[0], index, size + element)


def _pick(
    array: Shaped[Array, "size *element"], index: Int32[Array, " capacity"]
) -> Shaped[Array, "capacity *element"]:
    return array.at[index].get(mode="fill", fill_value=0, unique_indices=True)
