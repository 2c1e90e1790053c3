"""The primitives of an update, defined and computed in XLA.

An update sorts the lookups by row, adds up the gradients of each row, and writes each row once. No
two writes meet, so that the same batch gives the same bits on every run, on GPUs too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxrec.embed.formats import PackedRows, TableArray, gather_rows, is_packed
from jaxrec.embed.formats.floats import PlainRows
from jaxrec.embed.formats.rounding import random_bits, round_rows
from jaxrec.embed.kernels.base import BagRows, Lookups, RowIndices, Runs, State, Table
from jaxrec.embed.kernels.stretches import sum_by_table, sum_stretches
from jaxrec.optim.base import RowOptimizer
from jaxrec.optim.hyperparameters import Step, UpdateStep, resolve
from jaxrec.optim.norm import root

# Elements of a table that a sweep unpacks and changes at a time: 4 MiB of float32.
_BLOCK_ELEMENTS = 1 << 20

# A sweep may follow an update of the same step. With the same random bits for both, an element that
# was rounded up by the one would be rounded up by the other.
_SWEEP_SALT = 0x5EED


def build_runs(rows: RowIndices, num_rows: int) -> Runs:
    """Sort lookups by row, stably, and cut them into runs of equal rows.

    Rows outside ``[0, num_rows)`` count as ``num_rows``. Rows (5, 2, 5) of 8 give the order
    (1, 0, 2), the unique rows (2, 5, 8) and the inverse (1, 0, 1).
    """
    rows = jnp.where((rows < 0) | (rows > num_rows), num_rows, rows)
    # Stable, so that the gradients of a row are always added in the order of the batch.
    positions = jnp.arange(rows.size, dtype=jnp.int32)
    sorted_rows, order = jax.lax.sort((rows, positions), num_keys=1, is_stable=True)
    starts = jnp.ones(rows.shape, bool).at[1:].set(sorted_rows[1:] != sorted_rows[:-1])
    segments = jnp.cumsum(starts) - 1
    # The number of runs is known on the device alone, so arrays have room for as many as lookups.
    # Without the hint, XLA sorts the ascending segments once more on TPUs.
    unique = jnp.full(rows.shape, num_rows, jnp.int32)
    unique = unique.at[segments].set(sorted_rows, indices_are_sorted=True)
    segments = segments.astype(jnp.int32)
    inverse = jnp.zeros(rows.shape, jnp.int32).at[order].set(segments, unique_indices=True)
    return Runs(order, segments, unique, inverse)


def sum_rows(
    lookups: Lookups,
    gradients: BagRows,
    num_rows: int,
    bound: float | None = None,
    *,
    parts_out: int = 1,
) -> Float[Array, "num_rows dim"]:
    """Return the sum of each row's gradients, ``[num_rows, dim]``: `pooled_lookup` transposed.

    Each element of a bag's gradient is first clipped to ``[-bound, bound]``.
    """
    runs = build_runs(lookups.rows, num_rows)
    sums = _sum_runs(lookups, runs, gradients, bound)
    zeros = jnp.zeros((num_rows, gradients.shape[1]), jnp.float32)
    return zeros.at[runs.unique].set(sums, mode="drop", indices_are_sorted=True)


def fused_update(
    table: Table,
    state: State,
    lookups: Lookups,
    gradients: BagRows,
    optimizer: RowOptimizer,
    step: Step,
    table_starts: tuple[int, ...] = (0,),
    *,
    parts_in: int = 1,
) -> tuple[Table, State]:
    """Sum the gradients of each row that occurs, apply the optimizer, and write the row once.

    ``table_starts``, the first row of each table, matters for `RowOptimizer.clip_norm` alone, which
    bounds the norm of a table's gradient.
    """
    runs = build_runs(lookups.rows, table.shape[0])
    sums = _sum_runs(lookups, runs, gradients, optimizer.clip_value)
    return update_unique(table, state, runs.unique, sums, optimizer, step, table_starts)


def update_unique(
    table: Table,
    state: State,
    unique: Int32[Array, " lookups"],
    gradients: Float[Array, "lookups dim"],
    optimizer: RowOptimizer,
    step: Step,
    table_starts: tuple[int, ...],
) -> tuple[Table, State]:
    """Apply the optimizer to rows without repeats, given the sum of each row's gradients.

    ``unique`` has the row of each run, as `Runs.unique`; the other arguments are those of
    `fused_update`.
    """
    optimizer, step = resolve(optimizer, step)
    if optimizer.clip_norm is not None:
        squares = jnp.sum(gradients**2, axis=1)
        clip_norm, num_rows = optimizer.clip_norm, table.shape[0]
        factors = norm_factors(squares, unique, clip_norm, table_starts, num_rows)
        gradients = gradients * factors[:, None]

    # Entries behind the last run have the row `num_rows`. Reads past the end give zeros and writes
    # there are dropped, so the optimizer's formula runs on them in vain.
    def at_runs(array: TableArray) -> Array:
        values = gather_rows(array, unique, mode="fill", fill_value=0, indices_are_sorted=True)
        return values.astype(jnp.float32)

    def put(array: TableArray, values: Array, salt: int) -> TableArray:
        if not optimizer.stochastic_rounding:
            return _put_rows(array, unique, values)
        if is_packed(array):
            noise = random_bits(unique, step, values.shape[1], salt)
            stored = array.row_format.pack_at_random(values, noise)
            return array.with_stored(_put_stored(array.stored, unique, stored))
        return _put_rows(array, unique, round_rows(values, unique, step, array.dtype, salt))

    rows, new_state = optimizer.update(
        at_runs(table), gradients, {name: at_runs(array) for name, array in state.items()}, step
    )
    # Each array rounds with random bits of its own, or rows and moments would go up together.
    new_table = put(table, rows, salt=0)
    return new_table, {
        name: put(array, new_state[name], salt)
        for salt, (name, array) in enumerate(sorted(state.items()), start=1)
    }


def _sum_runs(
    lookups: Lookups, runs: Runs, gradients: BagRows, bound: float | None
) -> Float[Array, "lookups dim"]:
    """Return the sum of each run's gradients, whose elements are first clipped to the bound."""
    if gradients.shape[0] == 0:  # a batch without samples, which has padding only
        return jnp.zeros((runs.order.size, gradients.shape[1]), jnp.float32)
    bags = runs.order if lookups.bags is None else lookups.bags[runs.order]
    scales = None if lookups.scales is None else lookups.scales[runs.order]

    def load(terms: tuple[Array, Array | None]) -> Array:
        bag, scale = terms
        values = gradients[bag].astype(jnp.float32)
        if bound is not None:
            values = jnp.clip(values, -bound, bound)
        return values if scale is None else values * scale[:, None].astype(jnp.float32)

    return sum_stretches(
        load, (bags, scales), runs.segments, bags.size, gradients.shape[1], is_ascending=True
    )


def _put_rows(array: TableArray, rows: RowIndices, values: Array) -> TableArray:
    """Set ascending rows in place, elements rounded to nearest; see `_put_stored`."""
    if isinstance(array, PackedRows):
        return array.with_stored(_put_stored(array.stored, rows, array.row_format.pack(values)))
    return _put_stored(array, rows, values.astype(array.dtype))


def _put_stored(array: Array, rows: RowIndices, values: Array) -> Array:
    """Set ascending rows in place; rows past the end are left out."""

    def scatter(array: Array, values: Array) -> Array:
        # Only the row past the end repeats, and it is dropped. Because we say that rows are unique,
        # GPUs store 16-bit ones without a loop of compare-and-swap.
        return array.at[rows].set(values, mode="drop", indices_are_sorted=True, unique_indices=True)

    def scatter_bits(array: Array) -> Array:
        bits = jax.lax.bitcast_convert_type
        new = scatter(bits(array, jnp.uint16), bits(values, jnp.uint16))
        return bits(new, array.dtype)

    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize == 4:
        return scatter(array, values)
    # On CPUs, XLA converts the whole table to float32 and back to scatter 16-bit floats, for each
    # row if it scatters in a loop. Integers of the same bits are scattered in place.
    return jax.lax.platform_dependent(
        array, cpu=scatter_bits, default=lambda array: scatter(array, values)
    )


def norm_factors(
    squares: Float[Array, " n"],
    rows: RowIndices,
    bound: float,
    table_starts: tuple[int, ...],
    num_rows: int,
) -> Float[Array, " n"]:
    """Return each row's factor that bounds the norm of its table's gradient.

    ``squares`` has the sum of squares of each row's gradient. ``rows`` ascend and occur once; rows
    past the last table are ignored.
    """
    squares = jnp.where(rows < num_rows, squares, 0)
    starts = jnp.asarray(table_starts[1:], jnp.int32)
    table = jnp.searchsorted(starts, rows, side="right", method="scan_unrolled")
    norms = root(sum_by_table(squares, table, len(table_starts)))
    return jnp.minimum(1, bound / (norms + 1e-6))[table]


def sweep_rows(
    table: Table, optimizer: RowOptimizer, step: Step, is_applied: Bool[Array, ""] | None = None
) -> Table:
    """Apply `RowOptimizer.sweep` to all rows if it is due after this step's update; traced."""
    num_rows, dim = table.shape
    if not optimizer.sweeps or 0 in (num_rows, dim):
        return table
    count = step.count if isinstance(step, UpdateStep) else step
    is_due = optimizer.is_sweep_due(count)
    # A skipped step does not advance the count, and comes here again: its sweep waits, too.
    if is_applied is not None:
        is_due &= is_applied
    size = min(num_rows, max(1, _BLOCK_ELEMENTS // dim))
    num_blocks = jnp.where(is_due, -(-num_rows // size), 0)
    stored = table.stored if isinstance(table, PackedRows) else table

    def sweep_block(block: Int32[Array, ""], stored: Array) -> Array:
        # All blocks have one static size, so the last one overlaps the block before. Rows that were
        # swept there must not be swept again.
        start = jnp.minimum(block * size, num_rows - size)
        rows = start + jnp.arange(size, dtype=jnp.int32)
        old = jax.lax.dynamic_slice_in_dim(stored, start, size, 0)
        new = _swept(table, old, rows, optimizer, count)
        new = jnp.where((rows >= block * size)[:, None], new, old)
        return jax.lax.dynamic_update_slice_in_dim(stored, new, start, 0)

    # A loop of zero turns where a branch would be natural: XLA copies the table for a branch.
    stored = jax.lax.fori_loop(0, num_blocks, sweep_block, stored)
    return table.with_stored(stored) if isinstance(table, PackedRows) else stored


def _swept(
    table: TableArray,
    stored: Shaped[Array, "n width"],
    rows: RowIndices,
    optimizer: RowOptimizer,
    count: Int32[Array, ""],
) -> Shaped[Array, "n width"]:
    """Unpack stored rows, sweep them, and pack them again."""
    dim = table.shape[1]
    row_format = table.row_format if isinstance(table, PackedRows) else PlainRows(table.dtype.name)
    new = optimizer.sweep(row_format.unpack(stored, dim))
    if not optimizer.stochastic_rounding:
        return row_format.pack(new)
    if isinstance(table, PackedRows):
        return row_format.pack_at_random(new, random_bits(rows, count, dim, _SWEEP_SALT))
    return row_format.pack(round_rows(new, rows, count, table.dtype, _SWEEP_SALT))
