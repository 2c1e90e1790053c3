"""The update of tables over a mesh: gradients travel to the rows, each row is written once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.embed import kernels
from jaxrec.embed.kernels import Lookups
from jaxrec.embed.update import (
    RowGradients,
    bound_samples,
    group_parts,
    merge,
    update_rows,
)
from jaxrec.mesh.collectives import Turns
from jaxrec.mesh.exchange import RowsRoute, route_rows, update_by_rows
from jaxrec.mesh.layout import PlacedGroup
from jaxrec.mesh.pieces import update_pieces
from jaxrec.mesh.pool import SumsRoute, route_sums, update_at_owners, update_owned
from jaxrec.mesh.tables import ShardedTables, Store, first, send_bags
from jaxrec.optim.hyperparameter import Step, as_step


@update_rows.register(ShardedTables)
def update_rows_sharded(
    tables: ShardedTables,
    lookups: Sequence[dict[str, RowGradients]],
    step: Step | int,
    is_applied: Bool[Array, ""] | None = None,
) -> ShardedTables:
    """Bring gradients to the rows' owners, and update each row once, there."""
    return update_groups(tables, lookups, step, is_applied, _update)


def update_groups(
    tables: Store,
    lookups: Sequence[dict[str, RowGradients]],
    step: Step | int,
    is_applied: Bool[Array, ""] | None,
    update: Callable[..., tuple[Array, dict[str, Array]]],
) -> Store:
    """Update the groups one by one; those of frozen tables stay as they are.

    Args:
        tables: The tables.
        lookups: For each lookup the gradients of each group's rows.
        step: Number of updates made before.
        is_applied: False leaves every row and its state as it is; None: True.
        update: Makes a device's new rows and state of a group, given the tables, the group, its
            rows and state here, their gradient and the step.
    """
    groups = [placed for placed in tables.layout.groups if placed.group.optimizer.is_trained]
    names = [placed.group.name for placed in groups]
    specs = {placed.group.name: tables.spec(placed) for placed in groups}
    state_specs = {name: dict.fromkeys(tables.state[name], spec) for name, spec in specs.items()}

    def on_device(rows, state, lookups, step, is_applied):
        parts = group_parts(first(lookups))
        new, turns = {}, Turns(tables.mesh)
        for placed in groups:
            name = placed.group.name
            placed, bounded = bound_group(tables, placed, parts[name], turns)
            gradient = begin_exchange(placed, merge(bounded), turns)
            gradient = dataclasses.replace(gradient, is_applied=is_applied)
            new[name] = update(tables, placed, rows[name], state[name], gradient, step)
            turns.end(new[name][0])
        return {name: pair[0] for name, pair in new.items()}, {n: p[1] for n, p in new.items()}

    rows, state = jax.shard_map(
        on_device,
        mesh=tables.mesh,
        in_specs=(
            specs,
            state_specs,
            PartitionSpec(tables.batch_axes),
            PartitionSpec(),
            PartitionSpec(),
        ),
        out_specs=(specs, state_specs),
        check_vma=False,
    )(
        {name: tables.rows[name] for name in names},
        {name: tables.state[name] for name in names},
        [{name: gradients[name] for name in names} for gradients in lookups],
        as_step(step),
        is_applied,
    )
    return dataclasses.replace(tables, rows=tables.rows | rows, state=tables.state | state)


def bound_group(
    tables: ShardedTables, placed: PlacedGroup, parts: list[RowGradients], turns: Turns
) -> tuple[PlacedGroup, list[RowGradients]]:
    """Apply `bound_samples` to a group; the group returned has the optimizer that is left."""
    optimizer = placed.group.optimizer
    if tables.num_replicas > 1 and optimizer.clip_value is not None and not placed.is_replicated:
        # The update multiplies gradients by the number of replicas, after this.
        bound = optimizer.clip_value / tables.num_replicas
        optimizer = dataclasses.replace(optimizer, clip_value=bound)
    bounded, left = bound_samples(parts, optimizer)
    if left is optimizer:
        return placed, parts
    if placed.exchange == "bags":
        bounded = [
            after
            if before.bag_of_line is None
            else send_bags(tables, placed, after, after.layouts[0], turns)
            for before, after in zip(parts, bounded, strict=True)
        ]
    group = dataclasses.replace(placed.group, optimizer=left)
    return dataclasses.replace(placed, group=group), bounded


def begin_exchange(placed: PlacedGroup, gradient: RowGradients, turns: Turns) -> RowGradients:
    """The gradient, for an exchange that begins when the last has ended."""
    rows, values = turns.begin(gradient.lookups.rows), gradient.values
    if placed.exchange == "sums":
        values = turns.begin(values)  # they are gathered first, whatever the rows
    return dataclasses.replace(
        gradient,
        lookups=dataclasses.replace(gradient.lookups, rows=rows),
        values=values,
        route=gradient.route and gradient.route.map_awaited(turns.begin),
    )


def _update(
    tables: ShardedTables, placed: PlacedGroup, *args: Any
) -> tuple[Array, dict[str, Array]]:
    update = _update_replicated if placed.is_replicated else _update_owned
    return update(tables, placed, *args)


def _update_owned(
    tables: ShardedTables,
    placed: PlacedGroup,
    rows: Array,
    state: dict[str, Array],
    gradient: RowGradients,
    step: Step,
) -> tuple[Array, dict[str, Array]]:
    """Gradients travel to the rows' owners, as rows or as bags."""
    gradient, routed = routed_gradient(tables, placed, gradient)
    channel = tables.channel
    if placed.exchange == "rows":
        return update_by_rows(placed, rows, state, gradient, step, channel, routed)
    if placed.exchange == "sums":
        return update_at_owners(placed, rows, state, gradient, step, channel, routed)
    if placed.joins_pieces:
        return update_pieces(placed, rows, state, gradient, step, channel)
    return update_owned(placed, rows, state, gradient, step, channel, parts=channel.parts)


def routed_gradient(
    tables: ShardedTables, placed: PlacedGroup, gradient: RowGradients
) -> tuple[RowGradients, Any]:
    """The gradient of a replica's own samples, and its route; None where bags have travelled."""
    if tables.num_replicas > 1:
        # That of the mean over the replica's own samples, not over those of all replicas.
        gradient = dataclasses.replace(gradient, values=gradient.values * tables.num_replicas)
    lookups, routed = gradient.lookups, gradient.route
    room = tables.room(placed, lookups.rows.size)
    if placed.exchange == "rows" and not isinstance(routed, RowsRoute):
        routed = route_rows(placed, lookups.rows, tables.channel, room)
    if placed.exchange == "sums" and not isinstance(routed, SumsRoute):
        routed = route_sums(placed, lookups, gradient.values.shape[0], tables.channel, room)
    return gradient, routed


def _update_replicated(
    tables: ShardedTables,
    placed: PlacedGroup,
    rows: Array,
    state: dict[str, Array],
    gradient: RowGradients,
    step: Step,
) -> tuple[Array, dict[str, Array]]:
    """Every device gathers all devices' gradients of rows and makes the same update."""
    optimizer = placed.group.optimizer
    slots, sums = gather_sums(tables, placed, gradient, optimizer.clip_value)
    optimizer = dataclasses.replace(optimizer, clip_value=None)
    slots = gradient.rows_to_write(slots, placed.num_slots)
    starts = placed.group.row_offsets
    return kernels.fused_update(
        rows, state, Lookups(slots, None, None), sums, optimizer, step, starts
    )


def gather_sums(
    tables: ShardedTables, placed: PlacedGroup, gradient: RowGradients, clip_value: float | None
) -> tuple[Int32[Array, " n"], Float[Array, "n dim"]]:
    """The slots of all devices' lookups, and each device's sums of gradients of each."""
    lookups = gradient.lookups
    runs = kernels.build_runs(lookups.rows, placed.num_slots)
    is_row = (lookups.rows >= 0) & (lookups.rows < placed.num_slots)
    at = dataclasses.replace(lookups, rows=jnp.where(is_row, runs.inverse, -1))
    sums = kernels.sum_rows(at, gradient.values, runs.unique.size, clip_value)
    slots = tables.channel_of_all.gather(runs.unique)
    return slots, tables.channel_of_all.gather_gradients(sums)
