"""From the gradient of looked-up embeddings to new tables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.embed import kernels
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.layout import TableLayout
from jaxrec.embed.lookup import Activations, Residuals, Route, column_runs
from jaxrec.embed.tables import TableStore
from jaxrec.optim import RowOptimizer
from jaxrec.optim.hyperparameter import Step, as_step
from jaxrec.ragged import KeyedArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowGradients:
    """The gradient of one group's rows before it is summed by row.

    Attributes:
        lookups: Which row belongs to which line of ``values``, and its factor.
        values: ``[lines, dim]`` gradient of the looked-up embeddings.
        layouts: Where the group's features lay in the batches that were looked up, in turn.
        route: The route of the one lookup that this is the gradient of; None if there is none, or
            if there were several.
        bag_of_line: The bag of each line, where the optimizer bounds the gradients of samples
            (``clip_value``) and samples share bags: `bound_samples` adds such lines up. None: line
            ``i`` is the gradient of bag ``i``.
        is_applied: Whether the update takes place; None: it does.
    """

    lookups: Lookups
    values: Float[Array, "lines dim"]
    layouts: tuple[BagLayout, ...] = dataclasses.field(default=(), metadata={"static": True})
    route: Route | None = None
    bag_of_line: Int32[Array, " lines"] | None = None
    is_applied: Bool[Array, ""] | None = None

    def rows_to_write(self, rows: Int32[Array, " n"], num_rows: int) -> Int32[Array, " n"]:
        """Return the rows that the update writes: padding where it does not take place."""
        return rows if self.is_applied is None else jnp.where(self.is_applied, rows, num_rows)


def apply_gradients(
    tables: TableStore, residuals: Residuals, gradients: Activations, step: Step | int
) -> TableStore:
    """Updates the rows of one lookup: the second phase of a training step.

    Every row that occurs is updated once, however often it occurs; other rows and their state are
    left alone. Under `jax.jit` with ``tables`` donated this happens in place.

    Args:
        tables: The tables that were looked up.
        residuals: What `lookup` returned beside the activations.
        gradients: Gradient of the loss with respect to the activations, shaped as they are.
        step: Number of updates made before, 0 at the first.

    Returns:
        The new tables.

    Example:
        >>> import jax, jaxrec
        >>> config = jaxrec.EmbeddingBagConfig("user", 3, 1, initializer="ones")
        >>> tables = jaxrec.embed.init_tables([config], jaxrec.optim.sgd(0.5), jax.random.key(0))
        >>> batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1, 1], [2]]})
        >>> activations, residuals = jaxrec.embed.lookup(tables, batch)
        >>> gradients = jax.grad(lambda pooled: pooled.values.sum())(activations)
        >>> tables = apply_gradients(tables, residuals, gradients, step=0)
        >>> jaxrec.embed.read_table(tables, "user")[:, 0].tolist()
        [1.0, 0.0, 0.5]
    """
    return update_rows(tables, [row_gradients(tables, residuals, gradients)], step)


@functools.singledispatch
def row_gradients(
    tables: TableStore, residuals: Residuals, gradients: Activations
) -> dict[str, RowGradients]:
    """The gradient of the activations as gradients of each group's rows.

    Dispatches on the kind of tables: on a mesh each device has the gradients of its own samples.
    """
    return group_gradients(tables.layout, residuals, gradients)


def group_gradients(
    layout: TableLayout, residuals: Residuals, gradients: Activations
) -> dict[str, RowGradients]:
    """`row_gradients` on one device."""
    found = {}
    blocks = _group_blocks(layout, gradients)
    for group, bags, block in zip(layout.groups, residuals.layouts, blocks, strict=True):
        lines, bag_of_line = block.reshape(-1, group.dim), None
        if group.name in residuals.bag_of_sample:
            bag_of_line = residuals.bag_of_sample[group.name].reshape(-1)
        route = residuals.routes.get(group.name)
        gradient = RowGradients(residuals.lookups[group.name], lines, (bags,), route, bag_of_line)
        if group.optimizer.clip_value is None:
            gradient = add_samples(gradient)
        found[group.name] = gradient
    return found


def add_samples(gradient: RowGradients, bound: float | None = None) -> RowGradients:
    """Add the gradients of the samples that share a bag.

    Args:
        gradient: The gradient of one lookup.
        bound: Bound on the absolute value of an element of a sample's gradient; None: none.
    """
    if bound is None and gradient.bag_of_line is None:
        return gradient
    values = gradient.values.astype(jnp.float32)
    if bound is not None:
        values = jnp.clip(values, -bound, bound)
    if gradient.bag_of_line is not None:
        (layout,) = gradient.layouts
        values = jax.ops.segment_sum(values, gradient.bag_of_line, layout.num_bags)
    return dataclasses.replace(gradient, values=values, bag_of_line=None)


def bound_samples(
    parts: Sequence[RowGradients], optimizer: RowOptimizer
) -> tuple[list[RowGradients], RowOptimizer]:
    """Bound the gradients of samples that share bags, and add them.

    Where no bags are shared, the kernels bound gradients while they sum them, and nothing happens
    here.

    Args:
        parts: The gradients of several lookups of a group.
        optimizer: The group's.

    Returns:
        The gradients of bags, and the optimizer without the bound if it has been applied.
    """
    if all(part.bag_of_line is None for part in parts):
        return list(parts), optimizer
    bounded = [add_samples(part, optimizer.clip_value) for part in parts]
    return bounded, dataclasses.replace(optimizer, clip_value=None)


def _group_blocks(layout: TableLayout, gradients: Activations) -> list[Float[Array, "..."]]:
    """Undoes the order of the outputs: the gradient of each group's own output."""
    if not isinstance(gradients, KeyedArray):
        keys = [
            [o.key for o in sorted(layout.outputs, key=lambda o: o.position) if o.group == g]
            for g in range(len(layout.groups))
        ]
        return [jnp.concatenate([gradients[key] for key in group]) for group in keys]
    values = jnp.asarray(gradients.values)
    pieces: list[dict[int, Array]] = [{} for _ in layout.groups]
    start = 0
    for group, columns in column_runs(layout):
        width = columns.stop - columns.start
        pieces[group][columns.start] = values[:, start : start + width]
        start += width
    return [jnp.concatenate([group[i] for i in sorted(group)], axis=1) for group in pieces]


def merge(parts: Sequence[RowGradients]) -> RowGradients:
    """Return one gradient for several lookups of the same tables, so that rows are updated once."""
    if len(parts) == 1:
        return parts[0]
    has_bags = any(part.lookups.bags is not None for part in parts)
    has_scales = any(part.lookups.scales is not None for part in parts)
    first_line, bags, scales = 0, [], []
    for part in parts:
        lookups, count = part.lookups, part.lookups.rows.size
        lines = jnp.arange(count, dtype=jnp.int32) if lookups.bags is None else lookups.bags
        ones = jnp.ones(count, jnp.float32) if lookups.scales is None else lookups.scales
        bags.append(lines + first_line)
        scales.append(ones)
        first_line += part.values.shape[0]
    lookups = Lookups(
        jnp.concatenate([part.lookups.rows for part in parts]),
        jnp.concatenate(bags) if has_bags else None,
        jnp.concatenate(scales) if has_scales else None,
    )
    layouts = tuple(layout for part in parts for layout in part.layouts)
    return RowGradients(lookups, jnp.concatenate([part.values for part in parts]), layouts)


def group_parts(calls: Sequence[dict[str, RowGradients]]) -> dict[str, list[RowGradients]]:
    """Return the gradients of each group that any call has gradients of, call by call."""
    names = dict.fromkeys(name for call in calls for name in call)
    return {name: [call[name] for call in calls if name in call] for name in names}


@functools.singledispatch
def update_rows(
    tables: TableStore,
    lookups: Sequence[dict[str, RowGradients]],
    step: Step | int,
    is_applied: Bool[Array, ""] | None = None,
) -> TableStore:
    """Update the rows of any number of lookups, each row once; see `apply_gradients`.

    Dispatches on the kind of tables. Frozen groups stay as they are.

    Args:
        tables: The tables.
        lookups: For each lookup the gradients of each group's rows.
        step: Number of updates made before.
        is_applied: False leaves every row and its state as it is; None: True.
    """
    step = as_step(step)
    rows, state = dict(tables.rows), dict(tables.state)
    parts = group_parts(lookups)
    for group in tables.layout.groups:
        if group.name not in parts or not group.optimizer.is_trained:
            continue
        bounded, optimizer = bound_samples(parts[group.name], group.optimizer)
        gradient = dataclasses.replace(merge(bounded), is_applied=is_applied)
        at = gradient.lookups
        rows[group.name], state[group.name] = kernels.fused_update(
            tables.rows[group.name],
            tables.state[group.name],
            dataclasses.replace(at, rows=gradient.rows_to_write(at.rows, group.num_rows)),
            gradient.values,
            optimizer,
            step,
            group.row_offsets,
        )
    return dataclasses.replace(tables, rows=rows, state=state)
