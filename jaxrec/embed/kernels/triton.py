"""The primitives on NVIDIA GPUs, by the Triton backend of Pallas.

What bounds these kernels is memory, so every program holds a tile of rows in flight at once: some
groups (bags, runs) side by side, and some rows of each. Rows are padded to a power of two columns,
as Triton wants all arrays, and masked. Nothing is added by atomics, so results repeat bit for bit.

JAX has deprecated this backend since 0.11: it warns when a program is lowered.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, DTypeLike, Float, Int32

from jaxrec.embed.kernels import fused_rules
from jaxrec.embed.kernels.base import BagLayout, Lookups
from jaxrec.embed.kernels.extents import bag_extents, bag_features
from jaxrec.embed.kernels.parts import Parts, split_runs
from jaxrec.embed.kernels.reference import build_runs
from jaxrec.embed.kernels.rounding import round_rows
from jaxrec.optim.base import RowOptimizer
from jaxrec.optim.hyperparameter import Step, resolve


def refuse(primitive: str, arguments: Mapping[str, Any]) -> str | None:
    """Why these kernels do not take a call of a primitive; None: they do."""
    return fused_rules.refuse(arguments["optimizer"]) if primitive == "fused_update" else None


def pooled_lookup(
    table: Float[Array, "rows dim"],
    ids: Int32[Array, " ids"],
    lengths: Int32[Array, " all_bags"],
    weights: Float[Array, " ids"] | None,
    layout: BagLayout,
    dtype: DTypeLike,
    *,
    interpret: bool = False,
) -> Float[Array, "bags dim"]:
    """The sum or mean of each bag's rows; see `jaxrec.embed.kernels.base`."""
    output = jax.ShapeDtypeStruct((layout.num_bags, table.shape[1]), dtype)
    if 0 in (layout.num_bags, layout.num_positions):
        return jnp.zeros(output.shape, dtype)
    tile = Tile.of(table.shape[1], layout.num_positions / layout.num_bags)
    features = jnp.array([layout.row_offsets, layout.row_counts, layout.means], jnp.int32)
    kernel = functools.partial(_pool, tile=tile, layout=layout)
    inputs = (ids, weights, *bag_extents(lengths, layout), features, table)
    return _call(kernel, inputs, output, layout.num_bags, tile, interpret)


def row_lookup(
    table: Float[Array, "rows dim"], rows: Int32[Array, " n"], *, interpret: bool = False
) -> Float[Array, "n dim"]:
    """The rows themselves; see `jaxrec.embed.kernels.base`."""
    output = jax.ShapeDtypeStruct((rows.size, table.shape[1]), table.dtype)
    if rows.size == 0:
        return jnp.zeros(output.shape, table.dtype)
    tile = Tile.of(table.shape[1], 1)
    kernel = functools.partial(_copy_rows, tile=tile)
    return _call(kernel, (rows, table), output, rows.size, tile, interpret)


def fused_update(
    table: Float[Array, "rows dim"],
    state: dict[str, Array],
    lookups: Lookups,
    gradients: Float[Array, "bags dim"],
    optimizer: RowOptimizer,
    step: Step,
    table_starts: tuple[int, ...] = (0,),
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
    """One optimizer step on the rows that occur; see `jaxrec.embed.kernels.base`.

    Only for optimizers that `fused_rules` knows.
    """
    if lookups.rows.size == 0:
        return table, state
    runs = build_runs(lookups.rows, table.shape[0])
    parts = split_runs(runs, table.shape[0])
    bags = runs.order if lookups.bags is None else lookups.bags[runs.order]
    scales = None if lookups.scales is None else lookups.scales[runs.order]
    terms = (bags, scales, gradients)

    tile = Tile.of(table.shape[1], parts.size)
    num_parts = parts.starts.size
    kernel = functools.partial(_sum_parts, tile=tile, clip_value=optimizer.clip_value)
    output = jax.ShapeDtypeStruct((num_parts, table.shape[1]), jnp.float32)
    sums = _call(kernel, (parts.starts, parts.ends, terms), output, num_parts, tile, interpret)

    tile = Tile.of(table.shape[1], 4)
    tables = (table, state)
    set_now, step = resolve(optimizer, step)
    factors = fused_rules.step_factors(set_now, step)
    inputs = (tables, runs.unique, parts, sums, terms, factors, jnp.reshape(step, 1))
    kernel = functools.partial(_update, tile=tile, optimizer=optimizer)
    return _call(kernel, inputs, tables, runs.unique.size, tile, interpret, in_place=True)


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one program holds in flight.

    Attributes:
        dim: Width of a row.
        columns: The same, padded to a power of two.
        groups: Groups of rows (bags, runs) side by side.
        depth: Rows of each.
        warps: Warps of the program.
    """

    dim: int
    columns: int
    groups: int
    depth: int
    warps: int

    @classmethod
    def of(cls, dim: int, mean_length: float) -> Tile:
        """The tile for groups of some mean number of rows: 32 elements a lane, or one row."""
        columns = pl.next_power_of_2(dim)
        warps = min(max(columns // 256, 1), 8)
        rows = max(1024 * warps // columns, 1)
        depth = min(pl.next_power_of_2(max(math.ceil(mean_length), 1)), rows)
        return cls(dim, columns, rows // depth, depth, warps)

    def group_ids(self) -> Int32[Array, " groups"]:
        """The groups of this program."""
        return pl.program_id(0) * self.groups + jnp.arange(self.groups, dtype=jnp.int32)

    def elements(self, rows: Int32[Array, "*shape"], used: Array) -> tuple[Array, Array, Array]:
        """Row and column of each element of some rows, and whether it is one to touch."""
        shape = (*rows.shape, self.columns)
        columns = jax.lax.broadcasted_iota(jnp.int32, shape, rows.ndim)
        mask = jnp.broadcast_to(used[..., None], shape) & (columns < self.dim)
        return jnp.broadcast_to(rows[..., None], shape), columns, mask

    def load_rows(self, source: Any, rows: Int32[Array, "*shape"], used: Array) -> Array:
        """Rows of ``source`` in float32, ``[*shape, columns]``; zeros where not ``used``."""
        rows, columns, mask = self.elements(rows, used)
        return pltriton.load(source.at[rows, columns], mask=mask, other=0).astype(jnp.float32)

    def store_rows(self, target: Any, rows: Int32[Array, " n"], used: Array, values: Array) -> None:
        rows, columns, mask = self.elements(rows, used)
        pltriton.store(target.at[rows, columns], values.astype(target.dtype), mask=mask)

    def sum_rows(
        self,
        starts: Int32[Array, " groups"],
        ends: Int32[Array, " groups"],
        load: Callable[[Array, Array], Array],
    ) -> Float[Array, "groups columns"]:
        """The sum of ``load(positions, is_used)`` over each group's positions."""
        lanes = jnp.arange(self.depth, dtype=jnp.int32)

        def add(i: Array, total: Array) -> Array:
            positions = starts[:, None] + (i * self.depth + lanes)[None]
            return total + load(positions, positions < ends[:, None])

        total = jnp.zeros((self.groups, self.depth, self.columns), jnp.float32)
        longest = jnp.max(ends - starts)
        return jnp.sum(jax.lax.fori_loop(0, pl.cdiv(longest, self.depth), add, total), axis=1)


def _pool(
    ids: Any,
    weights: Any,
    starts: Any,
    ends: Any,
    features: Any,
    table: Any,
    out: Any,
    *,
    tile: Tile,
    layout: BagLayout,
) -> None:
    """Each group is a bag."""
    bags = tile.group_ids()
    is_bag = bags < layout.num_bags
    start = pltriton.load(starts.at[bags], mask=is_bag, other=0)
    end = pltriton.load(ends.at[bags], mask=is_bag, other=0)
    feature = bag_features(bags, layout)
    offset, count, is_mean = (
        pltriton.load(features.at[i, feature], mask=is_bag, other=0) for i in range(3)
    )

    def load(positions: Array, used: Array) -> Array:
        row = pltriton.load(ids.at[positions], mask=used, other=0)
        inside = (row >= 0) & (row < count[:, None])
        rows = tile.load_rows(table, row + offset[:, None], used & inside)
        rows = jnp.where((used & ~inside)[..., None], jnp.nan, rows)
        if weights is None:
            return rows
        return rows * pltriton.load(weights.at[positions], mask=used, other=0)[..., None]

    pooled = tile.sum_rows(start, end, load)
    divisor = jnp.where(is_mean > 0, jnp.maximum(end - start, 1), 1).astype(jnp.float32)
    tile.store_rows(out, bags, is_bag, pooled / divisor[:, None])


def _copy_rows(rows: Any, table: Any, out: Any, *, tile: Tile) -> None:
    """Each group is one row."""
    lines = tile.group_ids()
    used = lines < rows.shape[0]
    row = pltriton.load(rows.at[lines], mask=used, other=0)
    inside = (row >= 0) & (row < table.shape[0])
    found = tile.load_rows(table, row, used & inside)
    missing = jnp.where(row == table.shape[0], 0.0, jnp.nan)
    tile.store_rows(out, lines, used, jnp.where(inside[:, None], found, missing[:, None]))


def _sum_parts(
    starts: Any, ends: Any, terms: Any, out: Any, *, tile: Tile, clip_value: float | None
) -> None:
    """Each group is a part of a long run."""
    part = tile.group_ids()
    used = part < out.shape[0]
    start = pltriton.load(starts.at[part], mask=used, other=0)
    end = pltriton.load(ends.at[part], mask=used, other=0)
    tile.store_rows(out, part, used, _sum_terms(tile, terms, start, end, clip_value))


def _update(
    _inputs: Any,
    unique: Any,
    parts: Parts,
    sums: Any,
    terms: Any,
    factors: Any,
    step: Any,
    table: Any,
    state: dict[str, Any],
    *,
    tile: Tile,
    optimizer: RowOptimizer,
) -> None:
    """Each group is a run: sums its gradients, updates its row."""
    run = tile.group_ids()
    in_range = run < unique.shape[0]
    row = pltriton.load(unique.at[run], mask=in_range, other=table.shape[0])
    used = row < table.shape[0]

    def bounds(starts: Any) -> tuple[Array, Array]:
        first, last = (pltriton.load(starts.at[run + i], mask=used, other=0) for i in (0, 1))
        return first, last

    start, end = bounds(parts.run_starts)
    is_long = end - start > parts.size
    gradients = _sum_terms(tile, terms, start, jnp.where(is_long, start, end), optimizer.clip_value)
    gradients += tile.sum_rows(
        *bounds(parts.first_parts), lambda part, used: tile.load_rows(sums, part, used)
    )

    def load(array: Any) -> Array:
        if array.ndim == 1:
            return pltriton.load(array.at[row], mask=used, other=0)
        return tile.load_rows(array, row, used)

    scalars = tuple(factors[i] for i in range(factors.shape[0]))
    rows, new_state = fused_rules.apply(
        fused_rules.Step(optimizer, tile.dim, scalars),
        load(table),
        gradients,
        {name: load(array) for name, array in state.items()},
    )
    if optimizer.stochastic_rounding:
        rows = round_rows(rows, row, step[0], table.dtype)
    tile.store_rows(table, row, used, rows)
    for name, values in new_state.items():
        if values.ndim == 1:
            pltriton.store(state[name].at[row], values, mask=used)
        else:
            tile.store_rows(state[name], row, used, values)


def _sum_terms(
    tile: Tile, terms: Any, starts: Array, ends: Array, clip_value: float | None
) -> Float[Array, "groups columns"]:
    """The gradients of sorted lookups, clipped and scaled, summed from each start to its end."""
    bags, scales, gradients = terms

    def load(positions: Array, used: Array) -> Array:
        bag = pltriton.load(bags.at[positions], mask=used, other=0)
        rows = tile.load_rows(gradients, bag, used)
        if clip_value is not None:
            rows = jnp.clip(rows, -clip_value, clip_value)
        if scales is None:
            return rows
        return rows * pltriton.load(scales.at[positions], mask=used, other=0)[..., None]

    return tile.sum_rows(starts, ends, load)


def _call(
    kernel: functools.partial,
    inputs: Any,
    outputs: Any,
    num_groups: int,
    tile: Tile,
    interpret: bool,
    *,
    in_place: bool = False,
) -> Any:
    """Runs a kernel on tiles of groups; with ``in_place`` on the first input's own memory."""
    whole = pl.BlockSpec(memory_space=pl.ANY)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs)
    num_aliased = len(jax.tree.leaves(outputs)) if in_place else 0
    return pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(pl.cdiv(num_groups, tile.groups),),
        in_specs=jax.tree.map(lambda _: whole, inputs),
        out_specs=jax.tree.map(lambda _: whole, shapes),
        input_output_aliases={i: i for i in range(num_aliased)},
        compiler_params=pltriton.CompilerParams(num_warps=tile.warps),
        interpret=interpret,
        name=kernel.func.__name__.strip("_"),
    )(*inputs)
