"""The norm of each table's gradient."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrec.embed import kernels
from jaxrec.embed.tables import TableStore
from jaxrec.embed.update import RowGradients, add_samples, group_parts, merge


@functools.singledispatch
def table_squares(
    tables: TableStore, calls: Sequence[dict[str, RowGradients]]
) -> dict[str, Float[Array, ""]]:
    """Return the sum of squares of each trained table's gradient, by name.

    The gradients of a row are summed first. Dispatches on the kind of tables.

    Args:
        tables: The tables; their arrays are not read.
        calls: For each lookup the gradients of each group's rows.
    """
    squares: dict[str, Array] = {}
    parts = group_parts(calls)
    for group in tables.layout.groups:
        if group.name not in parts or not group.optimizer.is_trained:
            continue
        gradient = merge([add_samples(part) for part in parts[group.name]])
        runs = kernels.build_runs(gradient.lookups.rows, group.num_rows)
        at = dataclasses.replace(gradient.lookups, rows=runs.inverse)
        sums = kernels.sum_rows(at, gradient.values, runs.unique.size)
        by_row = jnp.where(runs.unique < group.num_rows, jnp.sum(sums * sums, axis=1), 0)
        starts = jnp.asarray(group.row_offsets[1:], jnp.int32)
        table = jnp.searchsorted(starts, runs.unique, side="right")
        by_table = jax.ops.segment_sum(by_row, table, len(group.tables))
        squares |= {each.name: by_table[i] for i, each in enumerate(group.tables)}
    return squares
