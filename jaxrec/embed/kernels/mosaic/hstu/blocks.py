"""Blocks of queries and of keys: which of them meet, and which of these need no mask.

XLA computes this before a kernel runs. A kernel's program has one block of queries and visits the
blocks of keys that meet it, or the other way round. `stretches` tells it which.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Shaped

# The primitive's ``ranges``: first and last key of each query's first interval, its own place, and
# where there are groups the first key of its group.
Ranges = Int32[Array, "ends queries"]

PART = 64  # queries or keys of a warpgroup: the rows of one matrix product
TILE = 2 * PART  # of a program, which computes with two warpgroups

_NOWHERE = np.iinfo(np.int32).max


def padded(array: Shaped[Array, "n heads dim"]) -> Shaped[Array, "rows heads columns"]:
    """Pad the elements to whole tiles and the columns to a multiple of 64, by zeros."""
    rows, columns = -array.shape[0] % TILE, -array.shape[2] % PART
    return jnp.pad(array, [(0, rows), (0, 0), (0, columns)]) if rows or columns else array


def padded_ranges(ranges: Ranges) -> Int32[Array, "ends rows"]:
    """Pad the queries to whole tiles; those of padding see no keys."""
    missing = -ranges.shape[1] % TILE
    nothing = np.array([_NOWHERE, -1, -1, _NOWHERE], np.int32)[: len(ranges), None]
    return jnp.concatenate([ranges, np.tile(nothing, missing)], axis=1) if missing else ranges


def meetings(
    ranges: Ranges, num_keys: int, *, queries: int, keys: int
) -> Bool[Array, "query_blocks key_blocks"]:
    """Return whether some query of a block may see some key of a block.

    Args:
        ranges: Ranges of the queries, in whole blocks.
        num_keys: Number of keys, in whole blocks.
        queries: Queries of a block.
        keys: Keys of a block.
    """
    first, last, own, *group = ranges.reshape(len(ranges), -1, queries)
    first_key = keys * jnp.arange(num_keys // keys, dtype=jnp.int32)[None]

    def reached(begin: Array, end: Array) -> Array:
        exists = begin <= end
        lowest = jnp.where(exists, begin, _NOWHERE).min(1)[:, None]
        highest = jnp.where(exists, end, -1).max(1)[:, None]
        return (lowest < first_key + keys) & (first_key <= highest)

    result = reached(first, last)
    for start in group:
        result = result | reached(start, own)
    return result


def stretches(meets: Bool[Array, "rows blocks"]) -> Int32[Array, "rows 7"]:
    """Return the blocks that meet each row as up to three stretches of consecutive blocks.

    A mask shows a key to at most three stretches of queries: context, the queries of a window, and
    the end of the row. Where there are more, the middle stretch has all of them and what lies
    between.

    Returns:
        The number of stretches ``n``, then three pairs ``(begin, end)``; the first ``n`` count.
    """
    count = meets.shape[1]
    block = jnp.arange(count, dtype=jnp.int32)[None]

    def first(is_one: Array) -> Array:
        return jnp.where(is_one, block, count).min(1, initial=count, keepdims=True)

    def after_last(is_one: Array) -> Array:
        return jnp.where(is_one, block + 1, 0).max(1, initial=0, keepdims=True)

    begin, last_end = first(meets), after_last(meets)
    end = first(~meets & (block > begin))
    rest = meets & (block >= end)
    last_begin = after_last(~meets & (block < last_end))
    middle = rest & (block < last_begin)
    has_middle, has_last = (each.any(1, keepdims=True) for each in (middle, rest))
    second_begin = jnp.where(has_middle, first(middle), last_begin)
    second_end = jnp.where(has_middle, after_last(middle), last_end)
    number = sum(each.astype(jnp.int32) for each in (begin < count, has_last, has_middle))
    ends = begin, end, second_begin, second_end, last_begin, last_end
    return jnp.concatenate([number, *ends], axis=1)


def common(ranges: Ranges, queries: int) -> Int32[Array, "blocks 2"]:
    """Return the first and the last key that every query of a block sees, by its first interval."""
    first, last = ranges[:2].reshape(2, -1, queries)
    return jnp.stack([first.max(1), last.min(1)], axis=1)


def edge(
    array: Shaped[Array, "n heads dim"], total: Int32[Array, ""], size: int
) -> Shaped[Array, "{size} heads dim"]:
    """Return the block with both elements and padding, if there is one, with zeros at padding."""
    # A product multiplies padding by zeros, and padding may be NaN. Clearing one block instead of
    # the array saves a pass over it.
    start = jnp.minimum(total // size * size, array.shape[0] - size)
    rows = jnp.arange(size, dtype=jnp.int32) + start
    block = jnp.take(array, rows, axis=0, mode="clip")
    return jnp.where((rows < total)[:, None, None], block, jnp.zeros((), array.dtype))
