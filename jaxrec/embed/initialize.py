"""The first values of tables, made block by block where they stay."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Key, Shaped

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
    """The random key of a table: depends on its name, not on its place among others."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def initialize_rows(
    array: Float[Array, "rows dim"],
    key: Array,
    initializer: str | Callable,
    first_row: int,
    num_rows: int,
) -> Float[Array, "rows dim"]:
    """Fills ``num_rows`` rows of a group's array from ``first_row`` on; ``array`` is donated."""
    if isinstance(initializer, str):
        draw, scale_of = INITIALIZERS[initializer]
        scale = scale_of(num_rows, array.shape[1])
    else:
        draw, scale = initializer, 1.0
    return _fill(array, key, draw, jnp.float32(scale), jnp.int32(first_row), jnp.int32(num_rows))


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def _fill(
    array: Float[Array, "rows dim"],
    key: Array,
    draw: Callable,
    scale: Float[Array, ""],
    first_row: Int32[Array, ""],
    num_rows: Int32[Array, ""],
) -> Float[Array, "rows dim"]:
    capacity, dim = array.shape
    block_rows = max(1, BLOCK_ELEMENTS // dim)
    in_block = jnp.arange(block_rows, dtype=jnp.int32)

    def fill_block(block, array):
        values = draw(jax.random.fold_in(key, block), (block_rows, dim), jnp.float32) * scale
        local = block * block_rows + in_block
        rows = jnp.where(local < num_rows, first_row + local, capacity)
        return array.at[rows].set(values.astype(array.dtype), mode="drop")

    return jax.lax.fori_loop(0, (num_rows + block_rows - 1) // block_rows, fill_block, array)
