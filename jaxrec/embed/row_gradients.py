"""Gradients of looked-up embeddings as gradients of rows: step 4 of `training_step`."""

# A gradient of rows stays a list of lookups beside the gradients of their bags, for as long as
# possible. That is small: a bag of 20 ids has one gradient, not 20. Calls are joined and samples
# that share a bag are added up here. The sum over the lookups of a row is left to the update, which
# has to sort them by row anyway.

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.embed import kernels
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.kernels.stretches import sum_by_table
from jaxrec.embed.layout import Group, TableLayout
from jaxrec.optim import RowOptimizer
from jaxrec.ragged import KeyedArray

# Outputs differ in capacity and width, so the names of these axes bind nothing.
Activations: TypeAlias = KeyedArray | dict[str, Float[Array, "*_devices _capacity _dim"]]
"""Looked-up embeddings: pooled ``[batch, sum(dims)]``, or by output ``[capacity, dim]``."""

Routes: TypeAlias = dict[str, Any]
"""By group, the route of one batch: the plan of its exchange. A pytree."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residuals:
    """Data of a lookup that its update needs, by the name of the group.

    Attributes:
        lookups: The group's flat lookups.
        bag_of_sample: Only if the batch has `inverse_indices`: the bag of each sample and feature,
            ``[batch, features]``. Without pooling: the lookup of each line of the output, out of
            range at padding.
        layouts: Layout of each group's features in the batch, in the order of the groups.
        routes: Route of the group's lookups.
    """

    lookups: dict[str, Lookups]
    bag_of_sample: dict[str, Int32[Array, "..."]]
    layouts: tuple[BagLayout, ...] = dataclasses.field(metadata={"static": True})
    routes: Routes = dataclasses.field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowGradients:
    """Gradients of one group's rows, before they are summed by row.

    Lookup ``i`` adds ``scales[i] * values[bags[i]]`` to the gradient of ``rows[i]``.
    """

    lookups: Lookups
    values: Float[Array, "lines dim"]
    layouts: tuple[BagLayout, ...] = dataclasses.field(default=(), metadata={"static": True})
    route: Any = None  # of the lookup; None on one device, and after `merge` of several lookups
    # The bag of each line (without pooling: its lookup) if samples share bags and their gradients
    # are still to be added, after they were clipped: see `bound_samples`. None: line i is of bag i.
    bag_of_line: Int32[Array, " lines"] | None = None
    # False: the step is skipped. None: it is not.
    is_applied: Bool[Array, ""] | None = None

    def rows_to_write(self, rows: Int32[Array, " n"], num_rows: int) -> Int32[Array, " n"]:
        """Return the rows that the update writes: only padding if the step is skipped."""
        return rows if self.is_applied is None else jnp.where(self.is_applied, rows, num_rows)

    def sum_by_row(
        self, num_rows: int, clip_value: float | None = None, **hints: Any
    ) -> tuple[kernels.Runs, Float[Array, "lookups dim"]]:
        """Return the runs of equal rows, and the sum of each run's gradients.

        The other arguments are those of `kernels.sum_rows`.
        """
        runs = kernels.build_runs(self.lookups.rows, num_rows)
        by_run = dataclasses.replace(self.lookups, rows=runs.inverse)
        return runs, kernels.sum_rows(by_run, self.values, runs.unique.size, clip_value, **hints)


def group_gradients(
    layout: TableLayout, residuals: Residuals, cotangents: Activations
) -> dict[str, RowGradients]:
    """Return the gradients of rows by group, given the gradient of the embeddings."""
    gradients = {}
    blocks = _group_blocks(layout, cotangents)
    for group, bags, block in zip(layout.groups, residuals.layouts, blocks, strict=True):
        lines, bag_of_line = block.reshape(-1, group.dim), None
        if group.name in residuals.bag_of_sample:
            bag_of_line = residuals.bag_of_sample[group.name].reshape(-1)
        route = residuals.routes.get(group.name)
        gradient = RowGradients(residuals.lookups[group.name], lines, (bags,), route, bag_of_line)
        if gradient.lookups.winners is not None:
            gradient = _of_winners(gradient, group)
        # Samples that share a bag are added now, since lines are fewer afterwards. But if the
        # optimizer clips samples' gradients, that comes first: `bound_samples` does both later.
        if group.optimizer.clip_value is None:
            gradient = add_samples(gradient)
        gradients[group.name] = gradient
    return gradients


def _of_winners(gradient: RowGradients, group: Group) -> RowGradients:
    """Turn the gradient of bags with max pooling into one line for each lookup.

    A lookup gets the gradient of the columns in which its row has the largest element.
    """
    # From here on it is the gradient of rows that were looked up one by one, which all exchanges
    # and updates take.
    lookups, clip_value = gradient.lookups, group.optimizer.clip_value
    if gradient.bag_of_line is not None and clip_value is not None:
        names = ", ".join(repr(table.name) for table in group.tables)
        raise ValueError(
            f"tables {names} have pooling='max' and an optimizer with clip_value={clip_value}, "
            "which together take no batches whose samples share bags (inverse_indices); look up "
            "batch.expanded(), or leave clip_value out"
        )
    assert lookups.winners is not None
    assert lookups.bags is not None
    of_bags = add_samples(gradient).values
    values = kernels.max_gradients(lookups.winners, of_bags, lookups.bags)
    lookups = dataclasses.replace(lookups, bags=None, winners=None)
    return dataclasses.replace(gradient, lookups=lookups, values=values, bag_of_line=None)


def table_gradient(
    layout: TableLayout, name: str, gradient: Float[Array, "rows dim"], padding_row: int | None
) -> dict[str, RowGradients]:
    """Return the gradient of a table that was read whole, as if each row was looked up once.

    The row of a padding id gets no gradient.
    """
    group, index = layout.find(name)
    rows = group.row_offsets[index] + jnp.arange(gradient.shape[0], dtype=jnp.int32)
    if padding_row is not None:
        rows = rows.at[padding_row].set(group.num_rows)
    return {group.name: RowGradients(Lookups(rows, None, None), gradient.astype(jnp.float32))}


def add_samples(gradient: RowGradients, bound: float | None = None) -> RowGradients:
    """Add the gradients of samples that share a bag; elements are first clipped to ``bound``."""
    if bound is None and gradient.bag_of_line is None:
        return gradient
    if gradient.bag_of_line is None:
        assert bound is not None
        values = jnp.clip(gradient.values.astype(jnp.float32), -bound, bound)
    else:
        (layout,), lookups = gradient.layouts, gradient.lookups
        # Bags are rows of this sum, so the kernel for sums by row does it.
        count = lookups.rows.size if lookups.bags is None else layout.num_bags
        lines = Lookups(gradient.bag_of_line, None, None)
        values = kernels.sum_rows(lines, gradient.values, count, bound)
    return dataclasses.replace(gradient, values=values, bag_of_line=None)


def bound_samples(
    parts: Sequence[RowGradients], optimizer: RowOptimizer
) -> tuple[list[RowGradients], RowOptimizer]:
    """Bound the gradients of samples that share bags, and add them to gradients of bags.

    Returns these gradients, and the optimizer: without ``clip_value`` if it was applied here.
    """
    # If no bags are shared, a bag is a sample, and the kernels clip gradients while they sum them.
    if all(part.bag_of_line is None for part in parts):
        return list(parts), optimizer
    bounded = [add_samples(part, optimizer.clip_value) for part in parts]
    return bounded, dataclasses.replace(optimizer, clip_value=None)


def merge(parts: Sequence[RowGradients]) -> RowGradients:
    """Join the gradients of several lookups of a group, so that each row is updated once."""
    if len(parts) == 1:
        return parts[0]
    has_bags = any(part.lookups.bags is not None for part in parts)
    has_scales = any(part.lookups.scales is not None for part in parts)
    first_line, bags, scales = 0, [], []
    for part in parts:
        # Where some parts have bags or factors and others do not, the others get theirs written
        # out. Lines of a part begin behind those of the parts before.
        lookups, count = part.lookups, part.lookups.rows.size
        lines = jnp.arange(count, dtype=jnp.int32) if lookups.bags is None else lookups.bags
        ones = jnp.ones(count, jnp.float32) if lookups.scales is None else lookups.scales
        bags.append(lines + first_line)
        scales.append(ones)
        first_line += part.values.shape[0]
    owners = [part.lookups.owners for part in parts if part.lookups.owners is not None]
    lookups = Lookups(
        jnp.concatenate([part.lookups.rows for part in parts]),
        jnp.concatenate(bags) if has_bags else None,
        jnp.concatenate(scales) if has_scales else None,
        jnp.concatenate(owners) if owners else None,
    )
    layouts = tuple(layout for part in parts for layout in part.layouts)
    return RowGradients(lookups, jnp.concatenate([part.values for part in parts]), layouts)


def group_parts(calls: Sequence[dict[str, RowGradients]]) -> dict[str, list[RowGradients]]:
    """Return each group's gradients from all calls, by the name of the group."""
    names = dict.fromkeys(name for call in calls for name in call)
    return {name: [call[name] for call in calls if name in call] for name in names}


def table_squares(
    groups: Sequence[Group], calls: Sequence[dict[str, RowGradients]]
) -> dict[str, Float[Array, ""]]:
    """Return the sum of squares of each trained table's gradient, by name.

    The gradients of a row are added up first. They are not clipped.
    """
    squares: dict[str, Array] = {}
    parts = group_parts(calls)
    for group in groups:
        if group.name not in parts or not group.optimizer.is_trained:
            continue
        gradient = merge([add_samples(part) for part in parts[group.name]])
        runs, sums = gradient.sum_by_row(group.num_rows)
        by_row = jnp.where(runs.unique < group.num_rows, jnp.sum(sums * sums, axis=1), 0)
        # Runs behind the last row have zero squares, so it does not matter which table gets them.
        starts = jnp.asarray(group.row_offsets[1:], jnp.int32)
        table = jnp.searchsorted(starts, runs.unique, side="right")
        by_table = sum_by_table(by_row, table, len(group.tables))
        squares |= {each.name: by_table[i] for i, each in enumerate(group.tables)}
    return squares


def _group_blocks(layout: TableLayout, cotangents: Activations) -> list[Float[Array, "..."]]:
    """Cut the gradient of the output into groups: undo `join_pooled` or `split_rows`."""
    if not isinstance(cotangents, KeyedArray):
        keys = [
            [o.key for o in sorted(layout.outputs, key=lambda o: o.position) if o.group == g]
            for g in range(len(layout.groups))
        ]
        return [
            jnp.concatenate([_widened(cotangents[key], group.dim) for key in of_group])
            for group, of_group in zip(layout.groups, keys, strict=True)
        ]
    values = jnp.asarray(cotangents.values)
    blocks: list[dict[int, Array]] = [{} for _ in layout.groups]
    start = 0
    for number, columns in layout.column_runs():
        width = columns.stop - columns.start
        # Only the last output of a run may be narrower than its group.
        whole = -(-width // layout.groups[number].dim) * layout.groups[number].dim
        blocks[number][columns.start] = _widened(values[:, start : start + width], whole)
        start += width
    return [jnp.concatenate([block[i] for i in sorted(block)], axis=1) for block in blocks]


def _widened(values: Float[Array, "lines _"], dim: int) -> Float[Array, "lines dim"]:
    """Pad values with columns of zeros to ``dim`` columns."""
    missing = dim - values.shape[1]
    return jnp.pad(values, ((0, 0), (0, missing))) if missing else values
