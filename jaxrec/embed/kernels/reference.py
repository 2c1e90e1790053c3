"""The primitives, defined and computed in XLA.

This implementation runs on every device and takes every type; tests compare the others with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int32, Shaped

from jaxrec.embed.formats import PackedRows, TableArray, is_packed
from jaxrec.embed.kernels.base import BagLayout, Buckets, Lookups, Runs
from jaxrec.embed.kernels.flat_lookups import flatten_bags as flatten_bags
from jaxrec.embed.kernels.pairs import pair_gradients as pair_gradients
from jaxrec.embed.kernels.pairs import pair_products as pair_products
from jaxrec.embed.kernels.rounding import random_bits, round_rows
from jaxrec.embed.kernels.stretches import sum_by_table, sum_stretches
from jaxrec.optim.base import RowOptimizer
from jaxrec.optim.hyperparameter import Step, resolve
from jaxrec.optim.norm import root


def refuse(primitive: str, arguments: Mapping[str, Any]) -> str | None:
    """Return None: the reference takes every call of every primitive."""
    return None


def new_rows(row: Shaped[Array, "*shape"], num_rows: int) -> Shaped[Array, "num_rows *shape"]:
    """Return a new array of equal rows, in memory that suits reading it at random places.

    Args:
        row: The value of each row.
        num_rows: Number of rows.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> kernels.new_rows(jnp.array([1.0, 2.0]), 2).tolist()
        [[1.0, 2.0], [1.0, 2.0]]
    """
    return jnp.broadcast_to(row, (num_rows, *row.shape))


def pooled_lookup(
    table: Float[TableArray, "rows dim"],
    ids: Int32[Array, " ids"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " ids"] | None,
    layout: BagLayout,
    dtype: DTypeLike,
    *,
    parts_in: int = 1,
    parts_out: int = 1,
) -> Float[Array, "bags dim"]:
    """Return the sum or mean of each bag's rows.

    Args:
        table: The group's rows; packed ones are unpacked to float32 as they are read.
        ids: The ids of all keys of a batch.
        lengths: The lengths of all its bags.
        weights: The weight of each id; None: 1.
        layout: Where the group's features lie in these arrays.
        dtype: Type of the result.
        parts_in, parts_out: Hints for the table and the result; see `jaxrec.embed.kernels.base`.

    Returns:
        One row for each bag, at `BagLayout.bag_rows`; NaN for a bag with an id outside its table.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> layout = kernels.BagLayout((0,), (4,), (0,), (2,), (0,), (3,), (False,))
        >>> table = jnp.array([[1.0], [10.0], [100.0]])
        >>> ids, lengths = jnp.array([2, 0, 1, 0]), jnp.array([2, 1])
        >>> kernels.pooled_lookup(table, ids, lengths, None, layout, "float32").tolist()
        [[101.0], [10.0]]
    """
    num_rows = table.shape[0]
    lookups = flatten_bags(ids, lengths, weights, layout, num_rows)

    def load(terms: tuple[Array, Array | None]) -> Array:
        row, scale = terms
        values = row_lookup(table, row).astype(jnp.float32)
        return values if scale is None else values * scale[:, None].astype(jnp.float32)

    assert lookups.bags is not None
    # Padding, whose scales may be NaN, belongs to no bag.
    bags = jnp.where(lookups.rows == num_rows, layout.num_bags, lookups.bags)
    terms = (lookups.rows, lookups.scales)
    return sum_stretches(load, terms, bags, layout.num_bags, table.shape[1]).astype(dtype)


def row_lookup(
    table: Float[TableArray, "rows dim"],
    rows: Int32[Array, " n"],
    *,
    parts_in: int = 1,
    parts_out: int = 1,
) -> Float[Array, "n dim"]:
    """Return ``table[rows]``: zeros at padding, NaN at a bad row.

    Args:
        table: The rows; packed ones give float32.
        rows: Row of each lookup.
        parts_in, parts_out: Hints for the table and the result; see `jaxrec.embed.kernels.base`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> kernels.row_lookup(jnp.array([[1.0], [2.0]]), jnp.array([1, 2, 3])).tolist()
        [[2.0], [0.0], [nan]]
    """
    # JAX counts negative indices from the end.
    beyond = jnp.where(rows < 0, table.shape[0] + 1, rows)
    values = table.at[beyond].get(mode="fill", fill_value=jnp.nan)
    return jnp.where((rows == table.shape[0])[:, None], jnp.zeros((), table.dtype), values)


def build_runs(rows: Int32[Array, " n"], num_rows: int) -> Runs:
    """Sort lookups by row, stably, and cut them into runs of equal rows.

    Args:
        rows: Row of each lookup; one outside ``[0, num_rows)`` counts as ``num_rows``.
        num_rows: Number of rows of the table.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> runs = kernels.build_runs(jnp.array([5, 2, 5]), num_rows=8)
        >>> runs.order.tolist(), runs.unique.tolist(), runs.inverse.tolist()
        ([1, 0, 2], [2, 5, 8], [1, 0, 1])
    """
    rows = jnp.where((rows < 0) | (rows > num_rows), num_rows, rows)
    positions = jnp.arange(rows.size, dtype=jnp.int32)
    sorted_rows, order = jax.lax.sort((rows, positions), num_keys=1, is_stable=True)
    starts = jnp.ones(rows.shape, bool).at[1:].set(sorted_rows[1:] != sorted_rows[:-1])
    segments = jnp.cumsum(starts) - 1
    unique = jnp.full(rows.shape, num_rows, jnp.int32).at[segments].set(sorted_rows)
    segments = segments.astype(jnp.int32)
    inverse = jnp.zeros(rows.shape, jnp.int32).at[order].set(segments, unique_indices=True)
    return Runs(order, segments, unique, inverse)


def bucket(owners: Int32[Array, " n"], num_owners: int) -> Buckets:
    """Group lookups by the device that owns their row, stably.

    Args:
        owners: Owner of each lookup's row; a number outside ``[0, num_owners)`` means no owner.
        num_owners: Number of devices.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> buckets = kernels.bucket(jnp.array([1, 2, 0, 1]), num_owners=2)
        >>> buckets.order.tolist(), buckets.counts.tolist()
        ([2, 0, 3, 1], [1, 2])
    """
    owners = jnp.where((owners < 0) | (owners > num_owners), num_owners, owners)
    counts = jnp.zeros(num_owners, jnp.int32).at[owners].add(1, mode="drop")
    return Buckets(jnp.argsort(owners, stable=True).astype(jnp.int32), counts)


def shift_rows(
    rows: Int32[Array, " n"],
    starts: tuple[int, ...],
    shifts: tuple[int, ...],
    num_rows: int,
    outside: int,
) -> Int32[Array, " n"]:
    """Number rows anew: add to each the shift of the stretch of rows that it lies in.

    Args:
        rows: Any numbers.
        starts: First row of each stretch, ascending from 0.
        shifts: Summand of the rows of each stretch.
        num_rows: End of the last stretch.
        outside: Result for numbers outside ``[0, num_rows)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> rows = jnp.array([0, 4, 5, 9, -1])
        >>> kernels.shift_rows(rows, (0, 5), (100, -5), num_rows=8, outside=999).tolist()
        [100, 104, 0, 999, 999]
    """
    # A loop would take three launches a turn on GPUs.
    stretch = jnp.searchsorted(
        np.asarray(starts, np.int32), rows, side="right", method="scan_unrolled"
    )
    stretch -= 1
    shift = jnp.asarray(shifts, jnp.int32)[jnp.maximum(stretch, 0)]
    is_row = (rows >= 0) & (rows < num_rows)
    return jnp.where(is_row, rows + shift, outside).astype(jnp.int32)


def sum_rows(
    lookups: Lookups,
    gradients: Float[Array, "bags dim"],
    num_rows: int,
    bound: float | None = None,
    *,
    parts_out: int = 1,
) -> Float[Array, "num_rows dim"]:
    """Return the sum of the gradients of each row's lookups; `pooled_lookup` transposed.

    Args:
        lookups: Row, bag and factor of each lookup; rows outside are left out.
        gradients: The gradient of each bag.
        num_rows: Number of rows of the result.
        bound: Bound on the absolute value of each element of a bag's gradient; None: no bound.
        parts_out: Hint for the result; see `jaxrec.embed.kernels.base`.

    Returns:
        ``[num_rows, dim]`` of float32.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxrec.embed import kernels
        >>> lookups = kernels.Lookups(jnp.array([1, 1, 5]), jnp.array([0, 1, 1]), None)
        >>> kernels.sum_rows(lookups, jnp.array([[1.0], [10.0]]), num_rows=2).tolist()
        [[0.0], [11.0]]
    """
    runs = build_runs(lookups.rows, num_rows)
    sums = _sum_runs(lookups, runs, gradients, bound)
    zeros = jnp.zeros((num_rows, gradients.shape[1]), jnp.float32)
    return zeros.at[runs.unique].set(sums, mode="drop", indices_are_sorted=True)


def fused_update(
    table: Float[TableArray, "rows dim"],
    state: dict[str, TableArray],
    lookups: Lookups,
    gradients: Float[Array, "bags dim"],
    optimizer: RowOptimizer,
    step: Step,
    table_starts: tuple[int, ...] = (0,),
    *,
    parts_in: int = 1,
) -> tuple[Float[TableArray, "rows dim"], dict[str, TableArray]]:
    """Sum the gradients of each row that occurs, apply the optimizer and write each row once.

    The table and its state change in place where they are donated.

    Args:
        table: The group's rows.
        state: Their optimizer state.
        lookups: Row, bag and factor of each lookup.
        gradients: The gradient of each bag.
        optimizer: The row optimizer.
        step: Number of updates made before this one, and the current hyperparameters.
        table_starts: First row of each table of the group, for bounds on a table's gradient.
        parts_in: Hint for the gradients; see `jaxrec.embed.kernels.base`.

    Returns:
        The new rows and the new state.
    """
    runs = build_runs(lookups.rows, table.shape[0])
    sums = _sum_runs(lookups, runs, gradients, optimizer.clip_value)
    return update_unique(table, state, runs.unique, sums, optimizer, step, table_starts)


def update_unique(
    table: Float[TableArray, "rows dim"],
    state: dict[str, TableArray],
    unique: Int32[Array, " lookups"],
    gradients: Float[Array, "lookups dim"],
    optimizer: RowOptimizer,
    step: Step,
    table_starts: tuple[int, ...],
) -> tuple[Float[TableArray, "rows dim"], dict[str, TableArray]]:
    """Update rows as `fused_update` does, given `Runs.unique` and the gradient of each run."""
    optimizer, step = resolve(optimizer, step)
    if optimizer.clip_norm is not None:
        squares = jnp.sum(gradients**2, axis=1)
        clip_norm, num_rows = optimizer.clip_norm, table.shape[0]
        factors = norm_factors(squares, unique, clip_norm, table_starts, num_rows)
        gradients = gradients * factors[:, None]

    def at_runs(array: TableArray) -> Array:
        values = array.at[unique].get(mode="fill", fill_value=0, indices_are_sorted=True)
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
    new_table = put(table, rows, salt=0)
    return new_table, {
        name: put(array, new_state[name], salt)
        for salt, (name, array) in enumerate(sorted(state.items()), start=1)
    }


def _sum_runs(
    lookups: Lookups, runs: Runs, gradients: Float[Array, "bags dim"], bound: float | None
) -> Float[Array, "lookups dim"]:
    """Return the sum of the gradients of each run, each element clipped to the bound."""
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

    return sum_stretches(load, (bags, scales), runs.segments, bags.size, gradients.shape[1])


def _put_rows(array: TableArray, rows: Int32[Array, " n"], values: Array) -> TableArray:
    """Set ascending rows in place, each element rounded to nearest; see `_put_stored`."""
    if isinstance(array, PackedRows):
        return array.with_stored(_put_stored(array.stored, rows, array.row_format.pack(values)))
    return _put_stored(array, rows, values.astype(array.dtype))


def _put_stored(array: Array, rows: Int32[Array, " n"], values: Array) -> Array:
    """Set ascending rows in place, those past the end left out."""

    def scatter(array: Array, values: Array) -> Array:
        # Rows of the table occur once. Said to be unique, 16-bit ones are stored on GPUs without
        # loops of compare-and-swap.
        return array.at[rows].set(values, mode="drop", indices_are_sorted=True, unique_indices=True)

    def scatter_bits(array: Array) -> Array:
        bits = jax.lax.bitcast_convert_type
        new = scatter(bits(array, jnp.uint16), bits(values, jnp.uint16))
        return bits(new, array.dtype)

    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize == 4:
        return scatter(array, values)
    # On CPUs XLA scatters 16-bit floats through a float32 copy of the whole table, and in a loop it
    # makes one for each row.
    return jax.lax.platform_dependent(
        array, cpu=scatter_bits, default=lambda array: scatter(array, values)
    )


def norm_factors(
    squares: Float[Array, " n"],
    rows: Int32[Array, " n"],
    bound: float,
    table_starts: tuple[int, ...],
    num_rows: int,
) -> Float[Array, " n"]:
    """Return the factors of rows' gradients that make each table's norm at most ``bound``.

    Args:
        squares: The sum of the squares of each row's gradient.
        rows: The rows, each once, ascending; one past the table counts for nothing.
        bound: `RowOptimizer.clip_norm`.
        table_starts: First row of each table.
        num_rows: End of the last table.
    """
    squares = jnp.where(rows < num_rows, squares, 0)
    starts = jnp.asarray(table_starts[1:], jnp.int32)
    table = jnp.searchsorted(starts, rows, side="right", method="scan_unrolled")
    norms = root(sum_by_table(squares, table, len(table_starts)))
    return jnp.minimum(1, bound / (norms + 1e-6))[table]
