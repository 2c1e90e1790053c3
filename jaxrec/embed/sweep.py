"""Changes of all rows of a table between two steps, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxrec.embed.formats import PackedRows, TableArray
from jaxrec.embed.formats.plain import PlainRows
from jaxrec.embed.kernels.rounding import random_bits, round_rows
from jaxrec.optim import RowOptimizer
from jaxrec.optim.hyperparameter import Step, UpdateStep

# Number of elements that are changed at a time.
_BLOCK_ELEMENTS = 1 << 20

# Stochastic rounding of a sweep takes other random bits than the update of the same step.
_SALT = 0x5EED


def sweep_rows(
    table: Float[TableArray, "rows dim"],
    optimizer: RowOptimizer,
    step: Step,
    is_applied: Bool[Array, ""] | None = None,
) -> Float[TableArray, "rows dim"]:
    """Apply `RowOptimizer.sweep` to all rows where it is due; traced, in place where donated.

    Args:
        table: The rows.
        optimizer: Their row optimizer.
        step: Number of updates made before the one that this follows.
        is_applied: Whether the update was made; None: it was.
    """
    num_rows, dim = table.shape
    if not optimizer.sweeps or 0 in (num_rows, dim):
        return table
    count = step.count if isinstance(step, UpdateStep) else step
    is_due = optimizer.is_sweep_due(count)
    if is_applied is not None:
        is_due &= is_applied
    size = min(num_rows, max(1, _BLOCK_ELEMENTS // dim))
    num_blocks = jnp.where(is_due, -(-num_rows // size), 0)
    stored = table.stored if isinstance(table, PackedRows) else table

    def sweep_block(block: Int32[Array, ""], stored: Array) -> Array:
        # The last block overlaps the one before, whose rows are left as they are.
        start = jnp.minimum(block * size, num_rows - size)
        rows = start + jnp.arange(size, dtype=jnp.int32)
        old = jax.lax.dynamic_slice_in_dim(stored, start, size, 0)
        new = _swept(table, old, rows, optimizer, count)
        new = jnp.where((rows >= block * size)[:, None], new, old)
        return jax.lax.dynamic_update_slice_in_dim(stored, new, start, 0)

    # A loop of no turns, unlike a branch, keeps the table where it is.
    stored = jax.lax.fori_loop(0, num_blocks, sweep_block, stored)
    return table.with_stored(stored) if isinstance(table, PackedRows) else stored


def _swept(
    table: TableArray,
    stored: Shaped[Array, "n width"],
    rows: Int32[Array, " n"],
    optimizer: RowOptimizer,
    count: Int32[Array, ""],
) -> Shaped[Array, "n width"]:
    """Return some rows of a table after a sweep, as they are stored."""
    dim = table.shape[1]
    row_format = table.row_format if isinstance(table, PackedRows) else PlainRows(table.dtype.name)
    new = optimizer.sweep(row_format.unpack(stored, dim))
    if not optimizer.stochastic_rounding:
        return row_format.pack(new)
    if isinstance(table, PackedRows):
        return row_format.pack_at_random(new, random_bits(rows, count, dim, _SALT))
    return row_format.pack(round_rows(new, rows, count, table.dtype, _SALT))
