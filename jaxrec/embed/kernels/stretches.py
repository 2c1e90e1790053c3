"""Sums over stretches of positions, whose bits repeat from run to run on every platform.

`jax.ops.segment_sum` repeats on CPUs and TPUs. On GPUs it adds by atomics, in an order that differs
from run to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

# Positions whose rows a GPU holds in memory at once: 34 MB at 128 columns, less than its caches.
CHUNK = 1 << 16


def sum_stretches(
    load: Callable[[Any], Float[Array, "positions dim"]],
    terms: Any,
    segments: Int32[Array, " positions"],
    num_segments: int,
    dim: int,
    *,
    is_ascending: bool = False,
) -> Float[Array, "num_segments dim"]:
    """Return the sum of each segment's rows, ``[num_segments, dim]`` of float32.

    ``terms`` are arrays with one element a position. ``load`` of them, or of a slice of them,
    returns one row for each position. Positions of one segment lie side by side; those of segments
    outside ``[0, num_segments)`` are left out. ``is_ascending`` says that no segment is below the
    one before, so that XLA does not sort them on TPUs.
    """

    def in_chunks(terms: Any, segments: Array) -> Array:
        return sum_in_chunks(load, terms, segments, num_segments, dim)

    def at_once(terms: Any, segments: Array) -> Array:
        rows = load(terms)
        return jax.ops.segment_sum(rows, segments, num_segments, indices_are_sorted=is_ascending)

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
    """Compute `sum_stretches` without atomics, ``chunk`` positions at a time."""
    # A segmented prefix sum by doubling (Hillis and Steele 1986, "Data parallel algorithms"). Turn
    # k adds to each position the sum that ends 2**k positions earlier, if that is still in the same
    # stretch. Then each position has the sum of its stretch up to itself, and the last position of
    # a stretch has the sum that is written. A stretch that goes on in the next chunk enters there
    # as the sum at this chunk's last position.
    if (size := segments.size) == 0:
        return jnp.zeros((num_segments, dim), jnp.float32)
    chunk = min(chunk, size)
    is_first = jnp.concatenate([jnp.ones(1, bool), segments[1:] != segments[:-1]])
    positions = jnp.arange(size, dtype=jnp.int32)
    # Number of positions of the stretch before each position.
    depths = positions - jax.lax.cummax(jnp.where(is_first, positions, 0))
    is_last = jnp.concatenate([is_first[1:], jnp.ones(1, bool)])
    is_written = is_last & (segments >= 0) & (segments < num_segments)
    # Sums that are not written go past the end, each to a number of its own, since the scatter
    # below is told that its indices are unique.
    targets = jnp.where(is_written, segments, num_segments + positions)

    lanes = jnp.arange(chunk, dtype=jnp.int32)

    def add_chunk(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        sums, before = carry
        # Chunks have one static length, so the last one begins early and repeats some positions.
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

        # As many turns as the longest stretch needs: batches of short bags take few.
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
    """Return the sum of each table's values; ``tables`` has the table of each value."""

    # On GPUs a scatter adds by atomics in varying order, and here all threads to a few numbers.
    # Tables are few, so we compare every value with every table instead.
    def compared(values: Array, tables: Array) -> Array:
        is_of = tables[:, None] == jnp.arange(num_tables, dtype=jnp.int32)[None]
        return jnp.sum(jnp.where(is_of, values[:, None], 0), axis=0)

    def scattered(values: Array, tables: Array) -> Array:
        return jax.ops.segment_sum(values, tables, num_tables)

    return jax.lax.platform_dependent(
        values, tables, cuda=compared, rocm=compared, default=scattered
    )
