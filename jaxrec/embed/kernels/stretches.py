"""Sums over stretches of positions that repeat bit for bit on every platform.

`jax.ops.segment_sum` does so on CPUs and TPUs. On GPUs it adds by atomics, in an order that differs
from run to run, and floats of 16 bits by loops of compare-and-swap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

# Positions whose rows are in memory at once, on GPUs: at 128 columns 34 MB, less than their caches.
CHUNK = 1 << 16


def sum_stretches(
    load: Callable[[Any], Float[Array, "positions dim"]],
    terms: Any,
    segments: Int32[Array, " positions"],
    num_segments: int,
    dim: int,
) -> Float[Array, "num_segments dim"]:
    """Return the sum of each stretch of rows; zeros where there is none.

    Args:
        load: From ``terms``, or from equal slices of all of them, to their rows of float32.
        terms: Tree of arrays with one element a position.
        segments: Segment of each position. Equal numbers lie side by side; those outside
            ``[0, num_segments)`` are left out.
        num_segments: Number of segments.
        dim: Width of the rows.
    """

    def in_chunks(terms: Any, segments: Array) -> Array:
        return sum_in_chunks(load, terms, segments, num_segments, dim)

    def at_once(terms: Any, segments: Array) -> Array:
        return jax.ops.segment_sum(load(terms), segments, num_segments)

    return jax.lax.platform_dependent(
        terms, segments, cuda=in_chunks, rocm=in_chunks, default=at_once
    )


def sum_in_chunks(
    load: Callable[[Any], Float[Array, "positions dim"]],
    terms: Any,
    segments: Int32[Array, " positions"],
    num_segments: int,
    dim: int,
    chunk: int = CHUNK,
) -> Float[Array, "num_segments dim"]:
    """Do what `sum_stretches` does without atomics, some positions at a time.

    The sums up to each position of a chunk are taken by doubling: to sums of up to ``n`` rows are
    added those that end ``n`` positions earlier, as far as the stretch goes (Hillis and Steele
    1986, "Data parallel algorithms"). The sum at a stretch's last position is its own; that at the
    chunk's last position enters the next chunk.
    """
    if (size := segments.size) == 0:
        return jnp.zeros((num_segments, dim), jnp.float32)
    chunk = min(chunk, size)
    is_first = jnp.concatenate([jnp.ones(1, bool), segments[1:] != segments[:-1]])
    positions = jnp.arange(size, dtype=jnp.int32)
    depths = positions - jax.lax.cummax(jnp.where(is_first, positions, 0))
    is_last = jnp.concatenate([is_first[1:], jnp.ones(1, bool)])
    is_written = is_last & (segments >= 0) & (segments < num_segments)
    # Numbers past the end, each its own, are not written.
    targets = jnp.where(is_written, segments, num_segments + positions)

    lanes = jnp.arange(chunk, dtype=jnp.int32)

    def add_chunk(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        sums, before = carry
        # The last chunk begins early, so that it is as long as the others: some of it is done.
        start = jnp.minimum(i * chunk, size - chunk)
        first = i * chunk - start
        part, depth, target = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, chunk), (terms, depths, targets)
        )
        rows = load(part)
        enters = (lanes == first) & (depth > 0)
        rows = jnp.where(enters[:, None], rows + before[None], rows)
        reach = jnp.minimum(depth, lanes - first)

        def double(turn: Array, rows: Array) -> Array:
            shift = 1 << turn
            earlier = jnp.roll(rows, shift, axis=0)
            return jnp.where((reach >= shift)[:, None], rows + earlier, rows)

        turns = 32 - jax.lax.clz(jnp.maximum(jnp.max(reach), 0))
        rows = jax.lax.fori_loop(0, turns, double, rows)
        target = jnp.where(lanes >= first, target, num_segments + start + lanes)
        sums = sums.at[target].set(rows, mode="drop", unique_indices=True)
        return sums, rows[-1]

    zeros = jnp.zeros((num_segments, dim), jnp.float32), jnp.zeros(dim, jnp.float32)
    return jax.lax.fori_loop(0, -(-size // chunk), add_chunk, zeros)[0]


def sum_by_table(
    values: Float[Array, " rows"], tables: Int32[Array, " rows"], num_tables: int
) -> Float[Array, " num_tables"]:
    """Return the sum of the values of each table, given the table of each, in any order."""

    def compared(values: Array, tables: Array) -> Array:
        is_of = tables[:, None] == jnp.arange(num_tables, dtype=jnp.int32)[None]
        return jnp.sum(jnp.where(is_of, values[:, None], 0), axis=0)

    def scattered(values: Array, tables: Array) -> Array:
        return jax.ops.segment_sum(values, tables, num_tables)

    return jax.lax.platform_dependent(
        values, tables, cuda=compared, rocm=compared, default=scattered
    )
