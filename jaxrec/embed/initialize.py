"""Tables filled with first values, block by block in place."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxrec.embed.first_values import draw_and_scale, draw_rows, slice_columns
from jaxrec.embed.formats import TableArray, as_bits, of_bits
from jaxrec.embed.row_keys import KeyWords

# Rows are drawn in blocks of about this many elements, so that memory beyond the table stays small.
BLOCK_ELEMENTS = 1 << 18


def initialize_rows(
    array: Float[TableArray, "rows dim"],
    key: KeyWords,
    initializer: str | Callable,
    start: int,
    num_rows: int,
) -> Float[TableArray, "rows dim"]:
    """Fill ``num_rows`` rows of a group's array from ``start`` on; ``array`` is donated."""
    draw, scale = draw_and_scale(initializer, num_rows, array.shape[1])
    place = place_of((0, num_rows), start, (0, array.shape[1]))
    return _fill(array, key, draw, scale, place)


def place_of(rows: tuple[int, int], start: int, columns: tuple[int, int]) -> Int32[np.ndarray, "6"]:
    """Return the place of a part of a table in an array, as `fill_rows` takes it.

    Args:
        rows: The table's first row in the part and the row after the last.
        start: The row of the array that the first goes to.
        columns: The table's first column in the part and the column after the last.

    Returns:
        The high and the low word of the table's first row, the number of rows, the row of the
        array, the first column and the column after the last.
    """
    first, stop = rows
    words = np.array(divmod(first, 2**32), np.uint32).view(np.int32)
    return np.array([*words, stop - first, start, *columns], np.int32)


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def _fill(
    array: Float[TableArray, "rows dim"],
    key: KeyWords,
    draw: Callable,
    scale: Float[Array, ""],
    place: Int32[Array, "6"],
) -> Float[TableArray, "rows dim"]:
    return fill_rows(array, key, draw, scale, place, array.shape[1])


def fill_rows(
    array: Float[TableArray, "rows width"],
    key: KeyWords,
    draw: Callable,
    scale: Float[Array, ""],
    place: Int32[Array, "6"],
    dim: int,
) -> Float[TableArray, "rows width"]:
    """Fill rows of an array with a part of a table's first values.

    Args:
        array: Where to; as wide as the part, or wider: then zeros are behind the part's columns.
        key: The table's key.
        draw: Function that draws a row.
        scale: Factor of its values.
        place: Where which rows and columns go, as `place_of` returns it. int32 holds it also for
            tables whose rows it cannot number.
        dim: Columns of the table.
    """
    block_rows = min(max(1, BLOCK_ELEMENTS // dim), array.shape[0])
    in_block = jnp.arange(block_rows, dtype=jnp.int32)
    high, low = jax.lax.bitcast_convert_type(place[:2], jnp.uint32)
    count, start, first_column, stop_column = place[2:]

    def fill_block(number, bits):
        of_part = number * block_rows + in_block
        row_low = low + of_part.astype(jnp.uint32)
        row_high = high + (row_low < low).astype(jnp.uint32)
        values = draw_rows(draw, scale, key, row_high, row_low, dim)
        part = slice_columns(values, first_column, stop_column, array.shape[1])
        # Rows of the last block that int32 cannot number become negative, and are outside as well.
        is_inside = (of_part >= 0) & (of_part < count)
        rows = jnp.where(is_inside, start + of_part, array.shape[0])
        return bits.at[rows].set(as_bits(part.astype(array.dtype)), mode="drop")

    num_blocks = (count - 1) // block_rows + 1
    return of_bits(jax.lax.fori_loop(0, num_blocks, fill_block, as_bits(array)), array.dtype)
