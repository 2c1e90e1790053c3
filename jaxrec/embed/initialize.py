"""First values of tables, made block by block in place."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Key, Shaped

from jaxrec.embed.formats import TableArray
from jaxrec.embed.formats.bits import as_bits, of_bits

# Rows are made in blocks of about this many elements, so that memory beyond the table stays small
# and the values do not depend on how tables are grouped or spread over devices.
BLOCK_ELEMENTS = 1 << 18


def _uniform(key, shape, dtype):
    return jax.random.uniform(key, shape, dtype, -1.0, 1.0)


def _xavier_variance(num_rows: int, dim: int) -> float:
    return 2.0 / (num_rows + dim)


# By name: the standard values, and what scales them for a table of the given rows and columns.
INITIALIZERS: dict[str, tuple[Callable, Callable[[int, int], float]]] = {
    "uniform": (_uniform, lambda rows, dim: rows**-0.5),
    "normal": (jax.random.normal, lambda rows, dim: dim**-0.5),
    "xavier_uniform": (_uniform, lambda rows, dim: (3 * _xavier_variance(rows, dim)) ** 0.5),
    "xavier_normal": (jax.random.normal, lambda rows, dim: _xavier_variance(rows, dim) ** 0.5),
    "zeros": (jax.nn.initializers.zeros, lambda rows, dim: 1.0),
    "ones": (jax.nn.initializers.ones, lambda rows, dim: 1.0),
}


def table_key(key: Key[Array, ""] | Shaped[Array, 2], name: str) -> Array:
    """Return the random key of a table, which depends on its name and not on its place."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def draw_and_scale(
    initializer: str | Callable, num_rows: int, dim: int
) -> tuple[Callable, np.float32]:
    """Return an initializer that draws values block by block, and the factor of its values.

    Raises:
        ValueError: The values depend on the number of rows that are drawn at once.
    """
    if not isinstance(initializer, str):
        _check_scale(initializer, dim)
        return initializer, np.float32(1)
    draw, scale_of = INITIALIZERS[initializer]
    return draw, np.float32(scale_of(num_rows, dim))


@functools.lru_cache(maxsize=256)
def _check_scale(initializer: Callable, dim: int) -> None:
    """Compare typical values of a few rows and of 32 times as many."""
    few = max(64, 512 // dim)
    typical = []
    with jax.ensure_compile_time_eval():
        for rows in (few, 32 * few):
            values = initializer(jax.random.key(0), (rows, dim), jnp.float32)
            if isinstance(values, jax.core.Tracer):
                return  # it draws on something that is being traced
            typical.append(float(np.median(np.abs(np.asarray(values, np.float32)))))
    if min(typical) > 0 and max(typical) > 1.5 * min(typical):
        raise ValueError(
            f"initializer {initializer} draws values that depend on the number of rows (median "
            f"{typical[0]:.2g} of {few} rows, {typical[1]:.2g} of {32 * few}), as initializers by "
            "fan-in do, but tables are drawn in blocks of rows. Give the scale yourself, as in "
            "jax.nn.initializers.normal(stddev=rows ** -0.5), or a name such as 'xavier_normal'"
        )


def initialize_rows(
    array: Float[TableArray, "rows dim"],
    key: Array,
    initializer: str | Callable,
    first_row: int,
    num_rows: int,
) -> Float[TableArray, "rows dim"]:
    """Fill ``num_rows`` rows of a group's array from ``first_row`` on; ``array`` is donated."""
    draw, scale = draw_and_scale(initializer, num_rows, array.shape[1])
    place = np.array(place_of((0, num_rows), first_row, (0, array.shape[1]), array.shape[1]))
    return _fill(array, key, draw, scale, place)


def place_of(
    rows: tuple[int, int], start: int, columns: tuple[int, int], dim: int
) -> tuple[np.int32, ...]:
    """Return the place of a part of a table in an array, as `fill_rows` takes it.

    Args:
        rows: The table's first row in the part and the row after the last.
        start: The row of the array that the first goes to.
        columns: The table's first column in the part and the column after the last.
        dim: Columns of the table.

    Returns:
        The block of the table that has the first row, the first row's number in the block, the
        number of rows, the row of the array, the first column and the column after the last.
    """
    first, stop = rows
    block, in_block = divmod(first, _block_rows(dim))
    return tuple(map(np.int32, (block, in_block, stop - first, start, *columns)))


def _block_rows(dim: int) -> int:
    return max(1, BLOCK_ELEMENTS // dim)


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def _fill(
    array: Float[TableArray, "rows dim"],
    key: Array,
    draw: Callable,
    scale: Float[Array, ""],
    place: Int32[Array, "6"],
) -> Float[TableArray, "rows dim"]:
    return fill_rows(array, key, draw, scale, place, array.shape[1])


def fill_rows(
    array: Float[TableArray, "rows width"],
    key: Array,
    draw: Callable,
    scale: Float[Array, ""],
    place: Int32[Array, "6"],
    dim: int,
) -> Float[TableArray, "rows width"]:
    """Fill rows of an array with a part of a table's first values.

    Args:
        array: Where to; as wide as the part, or wider: then zeros are behind the part's columns.
        key: The table's key.
        draw: Function that draws blocks of the table.
        scale: Factor of the drawn blocks.
        place: Where which rows and columns go, as `place_of` returns it. int32 holds it also for
            tables whose rows it cannot number.
        dim: Columns of the table.
    """
    block_rows = _block_rows(dim)
    in_block = jnp.arange(block_rows, dtype=jnp.int32)
    first_block, in_first, count, start, first_column, stop_column = place

    def fill_block(number, bits):
        block_key = jax.random.fold_in(key, first_block + number)
        values = draw(block_key, (block_rows, dim), jnp.float32) * scale
        part = slice_columns(values, first_column, stop_column, array.shape[1])
        # Rows of the last block that int32 cannot number become negative, and are outside as well.
        of_part = number * block_rows - in_first + in_block
        is_inside = (of_part >= 0) & (of_part < count)
        rows = jnp.where(is_inside, start + of_part, array.shape[0])
        return bits.at[rows].set(as_bits(part.astype(array.dtype)), mode="drop")

    # Blocks of the rows before the last, and one more.
    num_blocks = jnp.where(count > 0, (in_first + count - 1) // block_rows + 1, 0)
    return of_bits(jax.lax.fori_loop(0, num_blocks, fill_block, as_bits(array)), array.dtype)


def slice_columns(
    values: Float[Array, "*rows dim"], first: Array | int, stop: Array | int, width: int
) -> Float[Array, "*rows width"]:
    """Return some columns of values, with zeros behind them.

    Args:
        values: Whole rows.
        first: The first column.
        stop: The column after the last.
        width: Number of columns of the result, with the zeros.
    """
    if values.shape[-1] == width:
        return values
    # A slice that reaches beyond the last column would begin earlier than asked.
    padding = [(0, 0)] * (values.ndim - 1) + [(0, width)]
    part = jax.lax.dynamic_slice_in_dim(jnp.pad(values, padding), first, width, values.ndim - 1)
    is_column = jnp.arange(width, dtype=jnp.int32) < stop - first
    return jnp.where(jnp.broadcast_to(is_column, part.shape), part, 0)
