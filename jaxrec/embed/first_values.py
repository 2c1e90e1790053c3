"""First values of rows: a row is a function of its table's key and its number alone.

Row ``r`` of a table is ``initializer(fold_in(table_key, r), (1, dim))``, with a 64-bit ``r``. So it
begins the same in a whole table, in a shard, behind a cache and in an open vocabulary, where its
number is its id.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, Shaped, UInt32

from jaxrec.embed.row_keys import KeyWords, draw_with, fold_words, key_words
from jaxrec.embed.row_wise import check_row_wise


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


def table_key(key: Key[Array, ""] | Shaped[Array | np.ndarray, "_"], name: str) -> KeyWords:
    """Return the random key of a table, which depends on its name and not on its place.

    Args:
        key: The key of the table's collection, or its data.
        name: Name of the table.
    """
    return fold_words(key_words(key), jnp.uint32(0), jnp.uint32(zlib.crc32(name.encode())))


def draw_and_scale(
    initializer: str | Callable, num_rows: int, dim: int
) -> tuple[Callable, np.float32]:
    """Return an initializer that draws a row, and the factor of its values.

    Raises:
        ValueError: The initializer draws rows that depend on other rows or on their number.
    """
    if not isinstance(initializer, str):
        check_row_wise(initializer, dim)
        return initializer, np.float32(1)
    draw, scale_of = INITIALIZERS[initializer]
    return draw, np.float32(scale_of(num_rows, dim))


def draw_rows(
    draw: Callable,
    scale: Float[Array | np.ndarray | np.float32, "*_"],
    key: UInt32[Array, "*_ 2"],
    high: UInt32[Array, " n"],
    low: UInt32[Array, " n"],
    dim: int,
) -> Float[Array, "n dim"]:
    """Return the first values of rows; traced.

    Args:
        draw: Function that draws a row, as `draw_and_scale` returns it.
        scale: Factor of its values; of all rows, or of each, ``[n]``.
        key: The table's key; or that of each row's table, ``[n, 2]``.
        high, low: Words of the rows' numbers, or of the ids that the rows are for.
        dim: Columns of the table.
    """
    words = fold_words(key, high, low)
    values = jax.vmap(lambda of_row: draw_with(draw, of_row, (1, dim))[0])(words)
    # One factor for all rows XLA would multiply by the initializer's own, with other last bits.
    scales = jax.lax.optimization_barrier(jnp.broadcast_to(scale, high.shape))
    return values * scales[:, None]


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
