"""Reads of rows by index, in a form for TPUs where XLA would copy the whole array first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

# XLA lays out an array on a TPU such that tiles of 128 numbers waste the least memory: row by row
# if the width is a multiple of 128, else column by column. A gather of whole rows from the latter
# first copies the array row by row, unless that would more than double its memory, as it does up
# to 56 columns. A gather of a part of each row reads the array as it lies, so wider rows are
# gathered in parts.
_LANES = 128
_MAX_COLUMNS = 56
_TILE = 32  # columns of a tile of an 8-bit type


def gather_rows(array: Any, rows: Int32[Array, " n"], **options: Any) -> Shaped[Array, "n *width"]:
    """Return rows of a `TableArray` or of its state; ``options`` are those of ``.at[rows].get``."""

    def whole(array: Any, rows: Array) -> Array:
        return array.at[rows].get(**options)

    def in_parts(array: Array, rows: Array) -> Array:
        width = array.shape[1]
        if array.dtype.itemsize == 1 and width % _TILE == 0:
            # XLA copies such an array for parts that are whole tiles. The reshaped array is another
            # view of the same memory.
            tiles = array.reshape(array.shape[0], -1, _TILE)
            parts = [tiles.at[rows, i].get(**options) for i in range(tiles.shape[1])]
        else:
            size = -(-width // -(-width // _MAX_COLUMNS))  # equal parts, but for the last
            starts = range(0, width, size)
            parts = [array.at[rows, start : start + size].get(**options) for start in starts]
        return jnp.concatenate(parts, axis=1)

    # Packed rows come here again with the array that stores them.
    is_plain = isinstance(array, jax.Array) and array.ndim == 2
    if not is_plain or array.shape[1] <= _MAX_COLUMNS or array.shape[1] % _LANES == 0:
        return whole(array, rows)
    return jax.lax.platform_dependent(array, rows, tpu=in_parts, default=whole)
