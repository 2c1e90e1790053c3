"""Updates of rows, and the sums of their gradients, in Triton."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed.formats import is_packed
from jaxrec.embed.formats.rounding import round_rows
from jaxrec.embed.kernels.base import BagRows, Lookups
from jaxrec.embed.kernels.triton.readers import refuse_packed
from jaxrec.embed.kernels.triton.runs import Runs
from jaxrec.embed.kernels.triton.sorted_lookups import SortedLookups
from jaxrec.embed.kernels.triton.tile import RUN_ELEMENTS, Tile
from jaxrec.embed.kernels.updates import norm_factors
from jaxrec.optim.base import RowOptimizer
from jaxrec.optim.hyperparameters import Step, numbers_of_step, resolve, with_numbers
from jaxrec.optim.norm import cut_rows

# Lookups in a part of a frequent row, and parts in a block: see `SortedLookups`. Blocks of 16 and
# not of 256 save 5 % of an update with few, frequent rows (docs/internals/gpu.md).
CUT = 64
BLOCK = 16


def refuse(primitive: str, arguments: Mapping[str, Any]) -> str | None:
    """Return why these kernels do not take a call; None: they do."""
    table = arguments.get("table")
    if table is not None and 0 in table.shape:
        return "its table has rows and columns, and this one has none"
    if is_packed(table):
        is_update = primitive == "fused_update"
        return "it does not update packed rows" if is_update else refuse_packed(table)
    if primitive == "fused_update" and arguments["optimizer"].state_dtype != "float32":
        return "its optimizer state is float32"
    if primitive != "fused_update" or arguments["optimizer"].can_cut_rows:
        return None
    # Kernels pad rows to a power of two columns. An optimizer that sums over a row must leave the
    # padding out, and only these two kinds are known to.
    return f"{type(arguments['optimizer']).__name__} has neither is_elementwise nor sums_rows"


def fused_update(
    table: Float[Array, "rows dim"],
    state: dict[str, Array],
    lookups: Lookups,
    gradients: BagRows,
    optimizer: RowOptimizer,
    step: Step,
    table_starts: tuple[int, ...] = (0,),
    *,
    elements: int | None = None,
    warps: int | None = None,
    cut: int = CUT,
    block: int = BLOCK,
    interpret: bool = False,
) -> tuple[Float[Array, "rows dim"], dict[str, Array]]:
    """Update the rows that occur; see `jaxrec.embed.kernels.reference`."""
    # The optimizer's own `update` is traced into the kernel, so that a user's optimizer is fused
    # like ours, if it has `RowOptimizer.can_cut_rows`.
    if 0 in (lookups.rows.size, gradients.shape[0]):
        return table, state
    num_rows, dim = table.shape
    bound, size = optimizer.clip_value, lookups.rows.size
    by_row = SortedLookups.of(lookups, gradients, num_rows, bound, cut, block)
    by_row, runs, sums = Runs.of(by_row, interpret=interpret)
    warps = warps or run_warps(dim, table.dtype)
    tile = Tile.of_runs(dim, elements or run_elements(dim, state), warps)
    launch = functools.partial(tile.launch, interpret=interpret)
    # A bound on a table's norm needs the gradients of all of its rows before the first row changes:
    # they are summed once for the norms, and again for the update.
    factors = None
    if optimizer.clip_norm is not None:
        kernel = functools.partial(_square_runs, tile=tile)
        output = jax.ShapeDtypeStruct((size,), jnp.float32)
        squares = launch(kernel, (runs, by_row, sums), output, size)
        is_run = jnp.arange(size, dtype=jnp.int32) < runs.count - 1
        rows = jnp.where(is_run, runs.rows[:size], num_rows)
        factors = norm_factors(squares, rows, optimizer.clip_norm, table_starts, num_rows)

    # Numbers that change from step to step (rates, hyperparameters) are operands of the kernel.
    set_now, step = resolve(optimizer, step)
    numbers = (jnp.stack(numbers_of_step(set_now, step)), jnp.reshape(step, 1))
    kernel = functools.partial(_update, tile=tile, optimizer=set_now)
    return launch(kernel, (runs, by_row, sums, factors, numbers), (table, state), size)


def sum_rows(
    lookups: Lookups,
    gradients: BagRows,
    num_rows: int,
    bound: float | None = None,
    *,
    elements: int = RUN_ELEMENTS,
    warps: int | None = None,
    cut: int = CUT,
    block: int = BLOCK,
    interpret: bool = False,
) -> Float[Array, "num_rows dim"]:
    """Return the sum of each row's gradients; see `jaxrec.embed.kernels.reference`."""
    result = jnp.zeros((num_rows, gradients.shape[1]), jnp.float32)
    if 0 in (lookups.rows.size, *result.shape, gradients.shape[0]):
        return result
    by_row = SortedLookups.of(lookups, gradients, num_rows, bound, cut, block)
    by_row, runs, sums = Runs.of(by_row, interpret=interpret)
    tile = Tile.of_runs(gradients.shape[1], elements, warps)
    kernel = functools.partial(_write_sums, tile=tile)
    inputs, size = (runs, by_row, sums), lookups.rows.size
    return tile.launch(kernel, inputs, result, size, interpret=interpret)


def run_elements(dim: int, state: Mapping[str, Any]) -> int:
    """Return the elements of a lane that updates rows of ``dim`` columns with their state."""
    # Two moments of each element, as Adam's, need registers: half as many elements keep 36 warps
    # resident at 128 columns and do not spill. Narrow rows with state have half as many too, since
    # a tile then waits less often before its first store. Otherwise more elements are better: more
    # rows are on their way at once.
    num_moments = sum(array.ndim == 2 for array in state.values())
    is_halved = (dim <= 16 and len(state) > 0) or (num_moments > 1 and 64 < dim <= 128)
    return RUN_ELEMENTS // 2 if is_halved else RUN_ELEMENTS


def run_warps(dim: int, dtype: DTypeLike) -> int | None:
    """Return the warps of a tile that updates rows of ``dim`` columns; None: `Tile.of_runs`'s."""
    # One warp updates rows of 256 float32 in 0.93 of the time of two, on an H200.
    return 1 if 128 < dim <= 256 and jnp.dtype(dtype).itemsize == 4 else None


def _square_runs(runs: Runs, lookups: SortedLookups, sums: Any, out: Any, *, tile: Tile) -> None:
    """Sum the squares of the gradient of one run per group."""
    number = tile.group_ids()
    gradients = runs.load(number, lookups.num_rows).sum(tile, lookups, sums)
    squares = jnp.sum(gradients * gradients, axis=1)
    pltriton.store(out.at[number], squares, mask=number < out.shape[0])


def _write_sums(runs: Runs, lookups: SortedLookups, sums: Any, out: Any, *, tile: Tile) -> None:
    """Write the gradient of one run per group to its row."""
    run = runs.load(tile.group_ids(), lookups.num_rows)
    tile.store_rows(out, run.row, run.is_run, run.sum(tile, lookups, sums))


def _update(
    runs: Runs,
    lookups: SortedLookups,
    sums: Any,
    factors: Any,
    numbers: tuple[Any, Any],
    table: Any,
    state: dict[str, Any],
    *,
    tile: Tile,
    optimizer: RowOptimizer,
) -> None:
    """Update the row of one run per group."""
    number = tile.group_ids()
    run = runs.load(number, lookups.num_rows)
    row, is_run = run.row, run.is_run

    def load(array: Any) -> Array:
        if array.ndim == 1:
            return pltriton.load(array.at[row], mask=is_run, other=0)
        return tile.load_rows(array, row, is_run)

    def store(array: Any, values: Array) -> None:
        if array.ndim == 1:
            pltriton.store(array.at[row], values, mask=is_run)
        else:
            tile.store_rows(array, row, is_run, values)

    old_rows = load(table)
    old_state = {name: load(array) for name, array in state.items()}
    # The rates are loaded here and not first: the program would wait for them before it requests
    # any row.
    rule = with_numbers(optimizer, [numbers[0][i] for i in range(numbers[0].shape[0])])
    step = numbers[1][0]
    gradients = run.sum(tile, lookups, sums)
    if factors is not None:
        factor = pltriton.load(factors.at[number], mask=is_run, other=0)
        gradients *= factor[:, None]
    with cut_rows(tile.dim, is_column=tile.is_column()):
        rows, new_state = rule.update(old_rows, gradients, old_state, step)
    # All warps of a row load its count of updates, say, and one stores it: not before the others
    # have loaded it.
    if any(array.ndim == 1 for array in state.values()):
        tile.wait_for_loads()
    if optimizer.stochastic_rounding:
        rows = round_rows(rows, row, step, table.dtype)
    store(table, rows)
    for name, values in new_state.items():
        store(state[name], values)
