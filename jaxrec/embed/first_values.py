"""First values of rows: row ``r`` is ``initializer(fold_in(table_key, r), (1, dim))``."""

# A row is a function of its table's key and of its own number, 64 bits wide. So it begins the same
# in a whole table, in a shard, behind a cache and in an open vocabulary, where the id is the
# number. A model that is sharded, or restored on other devices, draws the same rows. That rules out
# initializers that draw a whole table at once.

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Key, Shaped, UInt32

from jaxrec.embed.formats import TableArray
from jaxrec.embed.formats.packed_rows import as_bits, of_bits
from jaxrec.embed.row_keys import KeyWords, draw_with, fold_words, key_words


def _uniform(key, shape, dtype):
    return jax.random.uniform(key, shape, dtype, -1.0, 1.0)


def _xavier_variance(num_rows: int, dim: int) -> float:
    return 2.0 / (num_rows + dim)


# By name: a function that draws rows of a standard size, and their factor, given a table's rows and
# columns. The factor is an operand, so that tables of different sizes share a compiled program.
INITIALIZERS: dict[str, tuple[Callable, Callable[[int, int], float]]] = {
    "uniform": (_uniform, lambda rows, dim: rows**-0.5),
    "normal": (jax.random.normal, lambda rows, dim: dim**-0.5),
    "xavier_uniform": (_uniform, lambda rows, dim: (3 * _xavier_variance(rows, dim)) ** 0.5),
    "xavier_normal": (jax.random.normal, lambda rows, dim: _xavier_variance(rows, dim) ** 0.5),
    "zeros": (jax.nn.initializers.zeros, lambda rows, dim: 1.0),
    "ones": (jax.nn.initializers.ones, lambda rows, dim: 1.0),
}


def table_key(key: Key[Array, ""] | Shaped[Array | np.ndarray, "_"], name: str) -> KeyWords:
    """Return a table's random key, given its collection's key (or that key's data) and its name."""
    # By name and not by position, so that a table added before this one does not change its rows.
    return fold_words(key_words(key), jnp.uint32(0), jnp.uint32(zlib.crc32(name.encode())))


def draw_and_scale(
    initializer: str | Callable, num_rows: int, dim: int
) -> tuple[Callable, np.float32]:
    """Return the function that draws a row for an initializer, and the factor of its values."""
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
    """Return the first values of the rows numbered ``high * 2**32 + low``; traced.

    ``draw`` and ``scale`` are from `draw_and_scale`. There is one scale and one table key for all
    rows, or one for each row: ``[n]`` and ``[n, 2]``.
    """
    words = fold_words(key, high, low)
    values = jax.vmap(lambda of_row: draw_with(draw, of_row, (1, dim))[0])(words)
    # Without the barrier, XLA multiplies a factor that all rows share by a constant inside of the
    # initializer first. The last bits would differ from rows that are drawn with a factor each.
    scales = jax.lax.optimization_barrier(jnp.broadcast_to(scale, high.shape))
    return values * scales[:, None]


def slice_columns(
    values: Float[Array, "*rows dim"], first: Array | int, stop: Array | int, width: int
) -> Float[Array, "*rows width"]:
    """Return columns ``[first, stop)`` of values, then zeros up to ``width`` columns."""
    if values.shape[-1] == width:
        return values
    # `dynamic_slice` moves a slice that reaches beyond the last column to the front, so pad first.
    padding = [(0, 0)] * (values.ndim - 1) + [(0, width)]
    part = jax.lax.dynamic_slice_in_dim(jnp.pad(values, padding), first, width, values.ndim - 1)
    is_column = jnp.arange(width, dtype=jnp.int32) < stop - first
    return jnp.where(jnp.broadcast_to(is_column, part.shape), part, 0)


@functools.lru_cache(maxsize=256)
def check_row_wise(initializer: Callable, dim: int) -> None:
    """Raise a ValueError if an initializer cannot draw rows one by one."""
    # We cannot read the function, so we compare what it draws: rows together, with two keys, and
    # rows alone. It is refused if rows drawn alone have another shape or another size
    # (`lecun_normal` scales by the number of rows), or differ less from each other (the function
    # ignores its key), or if rows drawn together are alike for both keys (they depend on the row's
    # position).
    few = max(64, 512 // dim)
    many = 32 * few

    def draw(words: jax.Array, rows: int) -> jax.Array:
        return draw_with(initializer, words, (rows, dim))

    with jax.ensure_compile_time_eval():
        keys = jnp.asarray(np.arange(2 * few, dtype=np.uint32).reshape(few, 2))
        alone = jax.vmap(functools.partial(draw, rows=1))(keys)
        draws = [draw(keys[0], many), draw(keys[1], many), alone]
        if any(isinstance(values, jax.core.Tracer) for values in draws):
            return  # the function uses a value that is being traced: no comparison is possible
        for values, shape in zip(draws, [(many, dim), (many, dim), (few, 1, dim)], strict=True):
            if np.shape(values) != shape:
                raise ValueError(
                    f"initializer {initializer} was called with shape {shape[-2:]} and returned "
                    f"values of shape {np.shape(values)[-2:]}; it must return the shape that it is "
                    "given, since rows are drawn one by one. Set given values by load_table"
                )
        parts = [np.asarray(x[: 4 * few], np.float64).reshape(-1, dim) for x in draws]
    what = _difference(*parts)
    if what:
        raise ValueError(
            f"initializer {initializer} draws values that depend on the number of rows or on other "
            f"rows ({what}), as initializers by fan-in do, but tables are drawn row by row. Give "
            "the scale yourself, as in jax.nn.initializers.normal(stddev=rows ** -0.5), or a name "
            "such as 'xavier_normal'; set given values by load_table"
        )


def _difference(first: np.ndarray, second: np.ndarray, alone: np.ndarray) -> str:
    """Describe the evidence that an initializer does not draw rows one by one; empty: none.

    ``first`` and ``second`` are rows drawn together, with two keys; ``alone`` were drawn singly.
    """
    without_columns = [x - np.median(x, axis=0) for x in (first, second, alone)]
    for what, together, by_itself in (
        ("typical value", first, alone),
        ("typical difference of rows", without_columns[0], without_columns[2]),
    ):
        typical = [_typical(together), _typical(by_itself)]
        if not np.max(typical) <= 1.5 * np.min(typical):  # or NaN
            return (
                f"{what} {typical[0]:.2g} of rows drawn together, {typical[1]:.2g} of rows drawn "
                "alone"
            )
    a, b = without_columns[:2]
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    if norms > 0 and (a * b).sum() > 0.5 * norms:
        return "rows of the same number are alike with any key"
    return ""


def _typical(values: np.ndarray) -> float:
    """Return a typical size of values, finite also for a Cauchy distribution."""
    return float(np.sqrt(np.abs(values)).mean() ** 2)


# Rows are drawn in blocks of about this many elements, so that memory beyond the table stays small.
BLOCK_ELEMENTS = 1 << 18


def initialize_rows(
    array: Float[TableArray, "rows dim"],
    key: KeyWords,
    initializer: str | Callable,
    start: int,
    num_rows: int,
) -> Float[TableArray, "rows dim"]:
    """Write a table's first values to a group's array from row ``start`` on, in place."""
    draw, scale = draw_and_scale(initializer, num_rows, array.shape[1])
    place = place_of((0, num_rows), start, (0, array.shape[1]))
    return _fill(array, key, draw, scale, place)


def place_of(rows: tuple[int, int], start: int, columns: tuple[int, int]) -> Int32[np.ndarray, "6"]:
    """Describe a part of a table for `fill_rows`, to be written to an array from row ``start`` on.

    The six numbers are the part's first row in the table (two words), its number of rows, its first
    row in the array, its first column, and the column after its last.
    """
    # One int32 array, not six arguments: parts of all places share a compiled program.
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
    """Fill rows of an array with a part of a table's first values; ``place`` is from `place_of`.

    The table has ``dim`` columns. If the array is wider than the part, zeros follow its columns.
    """
    block_rows = min(max(1, BLOCK_ELEMENTS // dim), array.shape[0])
    in_block = jnp.arange(block_rows, dtype=jnp.int32)
    high, low = jax.lax.bitcast_convert_type(place[:2], jnp.uint32)
    count, start, first_column, stop_column = place[2:]

    def fill_block(number, bits):
        # Row numbers are 64 bits wide, in two words: the low word of the sum wraps around, and
        # is then smaller than before.
        of_part = number * block_rows + in_block
        row_low = low + of_part.astype(jnp.uint32)
        row_high = high + (row_low < low).astype(jnp.uint32)
        values = draw_rows(draw, scale, key, row_high, row_low, dim)
        part = slice_columns(values, first_column, stop_column, array.shape[1])
        # Past the end of the last block, `of_part` may wrap around to negative numbers.
        is_inside = (of_part >= 0) & (of_part < count)
        rows = jnp.where(is_inside, start + of_part, array.shape[0])
        return bits.at[rows].set(as_bits(part.astype(array.dtype)), mode="drop")

    num_blocks = (count - 1) // block_rows + 1
    return of_bits(jax.lax.fori_loop(0, num_blocks, fill_block, as_bits(array)), array.dtype)
