"""The primitives in XLA: runs on every device, takes every type, is what the others are held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int32

from jaxrec.embed.kernels.base import BagLayout, Buckets, Lookups, Runs
from jaxrec.embed.kernels.rounding import round_rows
from jaxrec.optim.base import RowOptimizer
from jaxrec.optim.hyperparameter import Step, resolve


def refuse(primitive: str, arguments: Mapping[str, Any]) -> str | None:
    """Why the reference does not take a call of a primitive: it takes all."""
    return None


def new_rows(row: Array, num_rows: int) -> Array:
    """Rows that are all alike; see `jaxrec.embed.kernels.base`."""
    return jnp.broadcast_to(row, (num_rows, *row.shape))


def flatten_bags(
    ids: Int32[Array, " ids"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " ids"] | None,
    layout: BagLayout,
    num_rows: int,
) -> Lookups:
    """The batch as flat lookups; see `jaxrec.embed.kernels.base`."""
    positions = _segments(ids, layout.id_starts, layout.capacities)
    bag_lengths = _segments(lengths, layout.length_starts, layout.strides)

    # Padding is one more bag at the end of each feature, so that bags tile the positions exactly.
    used = jax.ops.segment_sum(
        bag_lengths, np.repeat(np.arange(layout.num_features), layout.strides), layout.num_features
    )
    padding = jnp.asarray(layout.capacities, jnp.int32) - used
    bag_ends = np.cumsum(layout.strides)
    extents = _insert(bag_lengths, bag_ends, padding)
    extent = jnp.repeat(jnp.arange(extents.size), extents, total_repeat_length=layout.num_positions)
    is_padding = _insert(np.zeros(layout.num_bags, bool), bag_ends, True)[extent]
    bags = _insert(_output_rows(layout), bag_ends, 0)[extent]

    feature = np.repeat(np.arange(layout.num_features), layout.capacities)
    row_counts = np.asarray(layout.row_counts, np.int32)[feature]
    row_offsets = np.asarray(layout.row_offsets, np.int32)[feature]
    outside = (positions < 0) | (positions >= row_counts)
    rows = jnp.where(outside, num_rows + 1, positions + row_offsets)
    rows = jnp.where(is_padding, num_rows, rows)

    scales = None if weights is None else _segments(weights, layout.id_starts, layout.capacities)
    if any(layout.means):
        is_mean = np.repeat(np.asarray(layout.means), layout.strides)
        divisors = jnp.where(is_mean, jnp.maximum(bag_lengths, 1), 1)
        shares = 1.0 / _insert(divisors, bag_ends, 1)[extent].astype(jnp.float32)
        scales = shares if scales is None else scales * shares
    return Lookups(rows, bags.astype(jnp.int32), scales)


def pooled_lookup(
    table: Float[Array, "rows dim"],
    ids: Int32[Array, " ids"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " ids"] | None,
    layout: BagLayout,
    dtype: DTypeLike,
) -> Float[Array, "bags dim"]:
    """The sum or mean of each bag's rows; see `jaxrec.embed.kernels.base`."""
    lookups = flatten_bags(ids, lengths, weights, layout, table.shape[0])
    rows = row_lookup(table, lookups.rows).astype(jnp.float32)
    if lookups.scales is not None:
        rows = rows * lookups.scales[:, None]
        rows = jnp.where((lookups.rows == table.shape[0])[:, None], 0, rows)
    assert lookups.bags is not None
    return jax.ops.segment_sum(rows, lookups.bags, layout.num_bags).astype(dtype)


def row_lookup(table: Float[Array, "rows dim"], rows: Int32[Array, " n"]) -> Float[Array, "n dim"]:
    """The rows themselves; see `jaxrec.embed.kernels.base`."""
    # A negative row must not count from the end.
    rows = jnp.where(rows < 0, table.shape[0] + 1, rows)
    found = table.at[rows].get(mode="fill", fill_value=jnp.nan)
    return jnp.where((rows == table.shape[0])[:, None], jnp.zeros((), table.dtype), found)


def build_runs(rows: Int32[Array, " n"], num_rows: int) -> Runs:
    """Stable sort and runs of equal rows; see `jaxrec.embed.kernels.base`."""
    rows = jnp.where((rows < 0) | (rows > num_rows), num_rows, rows)
    order = jnp.argsort(rows, stable=True)
    sorted_rows = rows[order]
    starts = jnp.ones(rows.shape, bool).at[1:].set(sorted_rows[1:] != sorted_rows[:-1])
    segments = jnp.cumsum(starts) - 1
    unique = jnp.full(rows.shape, num_rows, jnp.int32).at[segments].set(sorted_rows)
    order, segments = order.astype(jnp.int32), segments.astype(jnp.int32)
    inverse = jnp.zeros(rows.shape, jnp.int32).at[order].set(segments, unique_indices=True)
    return Runs(order, segments, unique, inverse)


def bucket(owners: Int32[Array, " n"], num_owners: int) -> Buckets:
    """Stable grouping by owner; see `jaxrec.embed.kernels.base`."""
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
    """Rows in another numbering; see `jaxrec.embed.kernels.base`."""
    stretch = jnp.searchsorted(np.asarray(starts, np.int32), rows, side="right") - 1
    shift = jnp.asarray(shifts, jnp.int32)[jnp.maximum(stretch, 0)]
    is_row = (rows >= 0) & (rows < num_rows)
    return jnp.where(is_row, rows + shift, outside).astype(jnp.int32)


def sum_rows(
    lookups: Lookups, gradients: Float[Array, "bags dim"], num_rows: int, bound: float | None
) -> Float[Array, "num_rows dim"]:
    """The gradients of each row; see `jaxrec.embed.kernels.base`."""
    runs = build_runs(lookups.rows, num_rows)
    sums = _sum_runs(lookups, runs, gradients, bound)
    zeros = jnp.zeros((num_rows, gradients.shape[1]), jnp.float32)
    return zeros.at[runs.unique].set(sums, mode="drop", indices_are_sorted=True)


def fused_update(
    table: Float[Array, "rows dim"],
    state: dict[str, Array],
    lookups: Lookups,
    gradients: Float[Array, "bags dim"],
    optimizer: RowOptimizer,
    step: Step,
    table_starts: tuple[int, ...] = (0,),
) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
    """One optimizer step on the rows that occur; see `jaxrec.embed.kernels.base`."""
    runs = build_runs(lookups.rows, table.shape[0])
    sums = _sum_runs(lookups, runs, gradients, optimizer.clip_value)
    return update_unique(table, state, runs.unique, sums, optimizer, step, table_starts)


def update_unique(
    table: Float[Array, "rows dim"],
    state: dict[str, Array],
    unique: Int32[Array, " lookups"],
    gradients: Float[Array, "lookups dim"],
    optimizer: RowOptimizer,
    step: Step,
    table_starts: tuple[int, ...],
) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
    """`fused_update`, given each row once, as in `Runs.unique`, with the sum of its gradients."""
    optimizer, step = resolve(optimizer, step)
    if optimizer.clip_norm is not None:
        gradients = _clip_norm(gradients, unique, optimizer.clip_norm, table_starts, table.shape[0])

    def at_runs(array: Array) -> Array:
        return array.at[unique].get(mode="fill", fill_value=0, indices_are_sorted=True)

    def put(array: Array, values: Array) -> Array:
        return _put_rows(array, unique, values.astype(array.dtype))

    rows, new_state = optimizer.update(
        at_runs(table).astype(jnp.float32), gradients, jax.tree.map(at_runs, state), step
    )
    if optimizer.stochastic_rounding:
        rows = round_rows(rows, unique, step, table.dtype)
    return put(table, rows), jax.tree.map(put, state, new_state)


def _sum_runs(
    lookups: Lookups, runs: Runs, gradients: Float[Array, "bags dim"], bound: float | None
) -> Float[Array, "lookups dim"]:
    """The sum of the gradients of each run, elements of a lookup's gradient within the bound."""
    bags = runs.order if lookups.bags is None else lookups.bags[runs.order]
    gradients = gradients[bags].astype(jnp.float32)
    if bound is not None:
        gradients = jnp.clip(gradients, -bound, bound)
    if lookups.scales is not None:
        gradients = gradients * lookups.scales[runs.order][:, None]
    return jax.ops.segment_sum(gradients, runs.segments, bags.size, indices_are_sorted=True)


def _put_rows(array: Array, rows: Int32[Array, " n"], values: Array) -> Array:
    """Sets ascending rows in place; those past the end are left out."""

    def scatter(array: Array) -> Array:
        return array.at[rows].set(values, mode="drop", indices_are_sorted=True)

    def one_by_one(array: Array) -> Array:
        def put(i, array):
            return jax.lax.dynamic_update_slice_in_dim(array, values[i][None], rows[i], 0)

        used = jnp.searchsorted(rows, array.shape[0]).astype(jnp.int32)
        return jax.lax.fori_loop(0, used, put, array)

    if array.dtype.itemsize == 4:
        return scatter(array)
    # On CPUs XLA scatters 16-bit floats through a float32 copy of the whole table.
    return jax.lax.platform_dependent(array, cpu=one_by_one, default=scatter)


def _clip_norm(
    gradients: Float[Array, "n dim"],
    rows: Int32[Array, " n"],
    bound: float,
    table_starts: tuple[int, ...],
    num_rows: int,
) -> Float[Array, "n dim"]:
    """Scales each table's gradient to a norm of at most ``bound``."""
    squares = jnp.where(rows < num_rows, jnp.sum(gradients**2, axis=1), 0)
    table = jnp.searchsorted(jnp.asarray(table_starts[1:], jnp.int32), rows, side="right")
    norms = jnp.sqrt(jax.ops.segment_sum(squares, table, len(table_starts)))
    factors = jnp.minimum(1, bound / (norms + 1e-6))
    return gradients * factors[table][:, None]


def _segments(array: Array, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Array:
    """The segments of ``array`` one after the other; no copy where they already lie so."""
    pieces, begin = [], 0
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    for i, end in enumerate(ends):
        if i + 1 == len(ends) or starts[i + 1] != end:
            pieces.append(array[starts[begin] : end])
            begin = i + 1
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def _insert(array: Array | np.ndarray, places: np.ndarray, values: Any) -> Array:
    """`numpy.insert`: ``values`` go before ``places`` (static) of ``array``."""
    # jnp.insert computes these places on the device, which takes XLA seconds to fold.
    order = np.insert(np.arange(len(array)), places, len(array) + np.arange(len(places)))
    array = jnp.asarray(array)
    values = jnp.broadcast_to(jnp.asarray(values, array.dtype), places.shape)
    return jnp.concatenate([array, values])[order]


def _output_rows(layout: BagLayout) -> np.ndarray:
    """The output row of each bag, bags in feature order."""
    rows = np.arange(layout.num_bags)
    if layout.is_interleaved:
        return rows.reshape(-1, layout.num_features).T.ravel()
    return rows
