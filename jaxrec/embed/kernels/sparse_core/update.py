"""Updates of rows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jaxrec.embed.kernels.base import BagRows, Lookups, State, Table
from jaxrec.embed.kernels.sparse_core.subcores import (
    IGNORED,
    LANES,
    Subcores,
    block_size,
    each_row,
    entries,
    list_buffer,
    rows_buffer,
    sum_columns,
)
from jaxrec.embed.kernels.sparse_core.sums import SegmentTerms
from jaxrec.embed.kernels.updates import build_runs
from jaxrec.optim import adagrad, rowwise_adagrad, sgd
from jaxrec.optim.base import RowOptimizer
from jaxrec.optim.hyperparameters import Step, numbers_of_step, resolve, with_numbers
from jaxrec.optim.norm import cut_rows

# Optimizers whose `update` was compiled for SparseCores.
_OPTIMIZERS = (sgd, adagrad, rowwise_adagrad)


def refuse_update(arguments: Mapping[str, Any]) -> str | None:
    """Return why the kernel does not take a call of `fused_update`; None: it does."""
    optimizer, gradients = arguments["optimizer"], arguments["gradients"]
    if type(optimizer) not in _OPTIMIZERS:
        names = ", ".join(each.__name__ for each in _OPTIMIZERS)
        return f"its optimizers are {names}, and this is {type(optimizer).__name__}"
    if optimizer.clip_norm is not None or optimizer.max_norm is not None:
        return "it bounds no norms"
    for array in (gradients, *arguments["state"].values()):
        if array.dtype != jnp.float32:
            return f"its gradients and state are float32, and these are {array.dtype}"
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
    interpret: bool = False,
) -> tuple[Table, State]:
    """Update the rows that occur; see `jaxrec.embed.kernels.reference`."""
    if 0 in (lookups.rows.size, gradients.shape[0]):
        return table, state
    num_rows, dim = table.shape
    runs = build_runs(lookups.rows, num_rows)
    bags = runs.order if lookups.bags is None else lookups.bags[runs.order]
    scales = None if lookups.scales is None else lookups.scales[runs.order]
    # The last run may be padding. Terms of a segment past the targets are not even loaded.
    is_run = runs.unique < num_rows
    segments = jnp.where(is_run[runs.segments], runs.segments, runs.unique.size)
    targets = jnp.where(is_run, runs.unique, IGNORED)
    terms = SegmentTerms.of(gradients, bags, segments, scales, targets)

    # Numbers that change from step to step (rates, hyperparameters) are operands of the kernel.
    set_now, count = resolve(optimizer, step)
    rates = jnp.stack(numbers_of_step(set_now, count))
    # Within a loop or a branch, libtpu does not compile a kernel with a constant operand, as the
    # rates may be. So each array gets some numbers behind it that are not constant.
    numbers = (
        jnp.concatenate([rates, jnp.zeros(LANES - rates.size), gradients[0, :LANES]]),
        jnp.concatenate([jnp.full(LANES, count), targets[:1]]),
    )
    size = block_size(dim)
    scratch = (
        terms.buffers,
        tuple(list_buffer(LANES, each.dtype) for each in numbers),
        jax.tree.map(lambda array: rows_buffer(size, *array.shape[1:]), (table, state)),
    )
    subcores = Subcores.of(interpret=interpret)
    kernel = functools.partial(_update, subcores=subcores, optimizer=set_now)
    _, changed = subcores.launch(kernel, (terms, numbers), changed=(table, state), scratch=scratch)
    return changed


def _update(
    inputs: tuple[SegmentTerms, Any],
    arrays: Any,
    _: Any,
    own: Any,
    *,
    subcores: Subcores,
    optimizer: RowOptimizer,
) -> None:
    terms, numbers = inputs
    sums, own_numbers, rows = own
    for array, own_array in zip(numbers, own_numbers, strict=True):
        pltpu.sync_copy(array.at[pl.ds(0, LANES)], entries(own_array))
    rates, counts = (each[pl.ds(0, LANES)] for each in own_numbers)
    rule, bound = with_numbers(optimizer, [rates[i] for i in range(LANES)]), optimizer.clip_value
    change = None if bound is None else functools.partial(jnp.clip, min=-bound, max=bound)

    def update_row(i: Array, _: Array) -> None:
        def here(array: Any) -> Any:
            return array.at[pl.ds(i, 1)]

        old, old_state = jax.tree.map(lambda array: here(array)[...], rows)
        with cut_rows(old.shape[1], sum_columns=sum_columns):
            new = rule.update(old, here(sums.sums)[...], old_state, counts[0])
        for array, values in zip(jax.tree.leaves(rows), jax.tree.leaves(new), strict=True):
            here(array)[...] = values

    def update(block: Array) -> None:
        @pl.when(terms.sum_block(subcores, block, sums, change) > 0)
        def _() -> None:
            for array, buffer in zip(jax.tree.leaves(arrays), jax.tree.leaves(rows), strict=True):
                subcores.read_rows(array, sums.targets, buffer)
            each_row(sums.targets, update_row)
            for array, buffer in zip(jax.tree.leaves(arrays), jax.tree.leaves(rows), strict=True):
                subcores.write_rows(buffer, array, sums.targets)

    subcores.each_block(terms.num_blocks, update)
