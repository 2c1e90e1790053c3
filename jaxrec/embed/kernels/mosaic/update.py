"""Updates of rows, and the sums of their gradients, in Mosaic."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrec.embed.formats import is_packed
from jaxrec.embed.kernels.base import BagRows, Lookups, State, Table
from jaxrec.embed.kernels.mosaic.indexing import load, store, wait_for_loads
from jaxrec.embed.kernels.mosaic.row_functions import evaluate, unsupported
from jaxrec.embed.kernels.mosaic.runs import FEWEST, Runs, row_lanes
from jaxrec.embed.kernels.mosaic.sorted_lookups import SortedLookups
from jaxrec.embed.kernels.mosaic.stored_rows import StoredRows, refuse_format
from jaxrec.embed.kernels.mosaic.tile import Tile
from jaxrec.embed.kernels.updates import norm_factors
from jaxrec.optim.base import RowOptimizer
from jaxrec.optim.hyperparameters import Step, numbers_of_step, resolve, with_numbers
from jaxrec.optim.norm import cut_rows

# Lookups in a part of a frequent row, and parts in a block: see `SortedLookups`.
CUT = 64
BLOCK = 16

# Elements of a row, of its gradient and of each array of state that a thread has.
ELEMENTS = 8


def refuse_update(arguments: Mapping[str, Any]) -> str | None:
    """Return why the kernels do not take a call of `fused_update`; None: they do."""
    table, optimizer = arguments["table"], arguments["optimizer"]
    for array in (table, *arguments["state"].values()):
        if is_packed(array) and (reason := refuse_format(array.row_format)) is not None:
            return reason
    if not optimizer.can_cut_rows:
        return f"{type(optimizer).__name__} has neither is_elementwise nor sums_rows"
    if (operation := _unsupported(optimizer, table.shape[1])) is not None:
        return f"{type(optimizer).__name__} has {operation}, which the kernel cannot compute"
    return None


def fused_update(
    table: Table,
    state: State,
    lookups: Lookups,
    gradients: BagRows,
    optimizer: RowOptimizer,
    step: Step,
    table_starts: tuple[int, ...] = (0,),
    *,
    elements: int = ELEMENTS,
    cut: int = CUT,
    block: int = BLOCK,
    interpret: bool = False,
) -> tuple[Table, State]:
    """Update the rows that occur; see `jaxrec.embed.kernels.reference`."""
    # The optimizer's own `update` is traced into the kernel, so that a user's optimizer is fused
    # like ours, if it has `RowOptimizer.can_cut_rows`.
    if 0 in (lookups.rows.size, gradients.shape[0]):
        return table, state
    num_rows, dim = table.shape
    bound, size = optimizer.clip_value, lookups.rows.size
    by_row = SortedLookups.of(lookups, gradients, num_rows, bound, cut, block)
    runs, sums = Runs.of(by_row, interpret=interpret)
    tile = update_tile(dim, elements)
    launch = functools.partial(tile.launch, num_groups=size, interpret=interpret)
    # A bound on a table's norm needs the gradients of all of its rows before the first row changes:
    # they are summed once for the norms, and again for the update.
    factors = None
    if optimizer.clip_norm is not None:
        kernel = functools.partial(_square_runs, tile=tile)
        output = jax.ShapeDtypeStruct((size,), jnp.float32)
        (squares,) = launch(kernel, (runs, by_row, sums), (output,))
        is_run = jnp.arange(size, dtype=jnp.int32) < runs.count - 1
        rows = jnp.where(is_run, runs.rows[:size], num_rows)
        factors = norm_factors(squares, rows, optimizer.clip_norm, table_starts, num_rows)

    # Numbers that change from step to step (rates, hyperparameters) are operands of the kernel.
    set_now, step = resolve(optimizer, step)
    numbers = (jnp.stack(numbers_of_step(set_now, step)), jnp.reshape(step, 1))
    kernel = functools.partial(_update, tile=tile, optimizer=set_now)
    return launch(kernel, (runs, by_row, sums, factors, numbers), (table, state))


def sum_rows(
    lookups: Lookups,
    gradients: BagRows,
    num_rows: int,
    bound: float | None = None,
    *,
    elements: int = ELEMENTS,
    cut: int = CUT,
    block: int = BLOCK,
    interpret: bool = False,
) -> Float[Array, "num_rows dim"]:
    """Return the sum of each row's gradients; see `jaxrec.embed.kernels.reference`."""
    result = jnp.zeros((num_rows, gradients.shape[1]), jnp.float32)
    if 0 in (lookups.rows.size, *result.shape, gradients.shape[0]):
        return result
    by_row = SortedLookups.of(lookups, gradients, num_rows, bound, cut, block)
    runs, sums = Runs.of(by_row, interpret=interpret)
    tile = update_tile(gradients.shape[1], elements)
    kernel = functools.partial(_write_sums, tile=tile)
    inputs, size = (runs, by_row, sums), lookups.rows.size
    return tile.launch(kernel, inputs, (result,), size, interpret=interpret)[0]


def update_tile(dim: int, elements: int) -> Tile:
    """Return the tile that updates rows of ``dim`` columns, one lookup of each at a time."""
    # Most runs are short: with a second lookup at a time, it would mostly load nothing.
    lanes = row_lanes(dim)
    tile = Tile.of(lanes, max(elements // lanes.vector, 1))
    return dataclasses.replace(tile, groups=max(tile.groups, FEWEST))


def _square_runs(runs: Runs, lookups: SortedLookups, sums: Any, out: Any, *, tile: Tile) -> None:
    """Sum the squares of the gradient of one run per group."""
    number = tile.group_ids()
    run = runs.load(number, lookups.num_rows, tile.lanes)
    gradients = run.sum(lookups, sums, tile.lanes)
    squares = jnp.sum(gradients * gradients, axis=1)
    store(out, number, number < out.shape[0], tile.lanes, squares)


def _write_sums(runs: Runs, lookups: SortedLookups, sums: Any, out: Any, *, tile: Tile) -> None:
    """Write the gradient of one run per group to its row."""
    run = runs.load(tile.group_ids(), lookups.num_rows, tile.lanes)
    store(out, run.row, run.is_run, tile.lanes, run.sum(lookups, sums, tile.lanes))


def _update(*refs: Any, tile: Tile, optimizer: RowOptimizer) -> None:
    """Update the row of one run per group."""
    runs, lookups, sums, factors, numbers, table, state = refs
    number, lanes = tile.group_ids(), tile.lanes
    run = runs.load(number, lookups.num_rows, lanes)
    row, is_run = run.row, run.is_run
    # Each array rounds with random bits of its own, or rows and moments would go up together.
    stored = {
        name: StoredRows(array, lanes, tile.groups, salt)
        for salt, (name, array) in enumerate(sorted(state.items()), start=1)
    }
    stored_table = StoredRows(table, lanes, tile.groups, salt=0)
    old_rows = stored_table.load(row, is_run)
    old_state = {name: array.load(row, is_run) for name, array in stored.items()}
    # The rates are loaded here and not first: the program would wait for them before it requests
    # any row.
    rates = [numbers[0][i] for i in range(numbers[0].shape[0])]
    step = numbers[1][0]
    gradients = run.sum(lookups, sums, lanes)
    if factors is not None:
        gradients *= lanes.spread(load(factors, number, is_run, lanes))
    rows, new_state = evaluate(
        functools.partial(_apply, optimizer),
        stored_table.shape,
        (old_rows, gradients, old_state, step),
        rates,
    )
    # Without this, a thread could load a row's count of updates after another thread stored it.
    if any(each.has_numbers for each in (stored_table, *stored.values())):
        wait_for_loads(lanes)
    is_random = optimizer.stochastic_rounding
    stored_table.store(row, is_run, rows, step if is_random else None)
    for name, values in new_state.items():
        stored[name].store(row, is_run, values, step if is_random else None)


def _apply(optimizer: RowOptimizer, arguments: tuple[Any, ...], rates: list[Array]) -> Any:
    rows = arguments[0]
    # Rows are whole here, even on a mesh that cuts other rows by columns.
    with cut_rows(rows.shape[1]):
        return with_numbers(optimizer, rates).update(*arguments)


@functools.lru_cache(maxsize=1024)
def _unsupported(optimizer: RowOptimizer, dim: int) -> str | None:
    """Return an operation of an optimizer that kernels cannot compute; None: there is none."""
    rows = jax.ShapeDtypeStruct((2, dim), jnp.float32)
    # Where a mesh is set, these have shardings, which no kernel has.
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.eval_shape(lambda: optimizer.init(2, dim)),
    )
    return unsupported(optimizer.update, rows, rows, state, jax.ShapeDtypeStruct((), jnp.int32))
