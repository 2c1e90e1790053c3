"""Reads of rows by index, in a form for TPUs where XLA would copy the whole array first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

# XLA lays out an array on a TPU such that tiles of 128 numbers waste the least memory: row by row
# if the width is a multiple of 128, else column by column. A gather from the latter first copies
# the whole array row by row, unless that would more than double its memory. Rows of up to 56
# columns are thus gathered as they lie. Wider rows are gathered here in pieces that narrow.
_LANES = 128
_MAX_COLUMNS = 56


def gather_rows(array: Any, rows: Int32[Array, " n"], **options: Any) -> Shaped[Array, "n *width"]:
    """Return rows of a `TableArray` or of its state; ``options`` are those of ``.at[rows].get``."""

    def whole(array: Any, rows: Array) -> Array:
        return array.at[rows].get(**options)

    def in_pieces(array: Array, rows: Array) -> Array:
        # Pieces consist of whole tiles, so that this shape is another view of the same memory.
        pieces = array.reshape(array.shape[0], -1, columns)
        parts = [pieces.at[rows, i].get(**options) for i in range(pieces.shape[1])]
        return jnp.concatenate(parts, axis=1)

    # Packed rows come here again with the array that stores them.
    is_plain = isinstance(array, jax.Array) and array.ndim == 2
    columns = piece_columns(array.shape[1]) if is_plain else None
    if columns is None:
        return whole(array, rows)
    return jax.lax.platform_dependent(array, rows, tpu=in_pieces, default=whole)


def piece_columns(width: int) -> int | None:
    """Return the columns of a piece that TPUs gather without a copy; None: rows stay whole."""
    if width <= _MAX_COLUMNS or width % _LANES == 0:
        return None
    # A tile has 8 columns, or 32 of an 8-bit type if the width is a multiple of 32.
    if width % 32 == 0:
        return 32
    return next((each for each in range(_MAX_COLUMNS, 0, -8) if width % each == 0), None)
