"""The norm of each table's gradient, whose rows lie over a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxrec.embed.gradient_norms import table_squares
from jaxrec.embed.kernels import Lookups
from jaxrec.embed.update import RowGradients, group_parts, merge
from jaxrec.mesh.collectives import Turns
from jaxrec.mesh.exchange import squares_by_rows
from jaxrec.mesh.layout import PlacedGroup
from jaxrec.mesh.norms import table_squares as local_squares
from jaxrec.mesh.pool import squares_at_owners
from jaxrec.mesh.tables import ShardedTables, first
from jaxrec.mesh.update import begin_exchange, bound_group, gather_sums, routed_gradient


@table_squares.register(ShardedTables)
def table_squares_sharded(
    tables: ShardedTables, calls: Sequence[dict[str, RowGradients]]
) -> dict[str, Float[Array, ""]]:
    """`jaxrec.embed.gradient_norms.table_squares`, for which gradients travel to their rows."""
    return squares_of_groups(tables, calls, _squares)


def squares_of_groups(
    tables: ShardedTables,
    calls: Sequence[dict[str, RowGradients]],
    find: Callable[..., Float[Array, " tables"]],
) -> dict[str, Float[Array, ""]]:
    """Return the sum of squares of each trained table's gradient, the mean over replicas.

    Args:
        tables: The tables; their arrays are not read.
        calls: For each lookup the gradients of each group's rows.
        find: Gives a device's part of the sums of a group, given the tables, the group and the
            gradient of the device's lookups.
    """
    groups = [placed for placed in tables.layout.groups if placed.group.optimizer.is_trained]
    names = [placed.group.name for placed in groups]

    def on_device(calls):
        parts_of, turns = group_parts(first(calls)), Turns(tables.mesh)
        squares: dict[str, Array] = {}
        for placed in groups:
            # The norm is that of the gradient itself, whatever bound the optimizer has.
            optimizer = dataclasses.replace(placed.group.optimizer, clip_value=None)
            group = dataclasses.replace(placed.group, optimizer=optimizer)
            unbounded = dataclasses.replace(placed, group=group)
            _, added = bound_group(tables, unbounded, parts_of[placed.group.name], turns)
            gradient = begin_exchange(placed, merge(added), turns)
            parts = find(tables, placed, gradient)
            turns.end(parts)
            found = jax.lax.psum(parts, tables.batch_axes) / tables.num_replicas
            for name, square in zip(placed.tables, found, strict=True):
                squares[name] = squares.get(name, 0) + square
        return squares

    return jax.shard_map(
        on_device,
        mesh=tables.mesh,
        in_specs=PartitionSpec(tables.batch_axes),
        out_specs=PartitionSpec(),
        check_vma=False,
    )([{name: gradients[name] for name in names} for gradients in calls])


def _squares(
    tables: ShardedTables, placed: PlacedGroup, gradient: RowGradients
) -> Float[Array, " tables"]:
    if placed.is_replicated:
        slots, sums = gather_sums(tables, placed, gradient, None)
        squares = local_squares(placed, Lookups(slots, None, None), sums, None, tables.channel)
        # All devices have found the same; one of each replica counts.
        return jnp.where(tables.channel.index == 0, squares, 0)
    gradient, routed = routed_gradient(tables, placed, gradient)
    if placed.exchange == "rows":
        return squares_by_rows(placed, gradient, tables.channel, routed)
    if placed.exchange == "sums":
        return squares_at_owners(placed, gradient, tables.channel, routed)
    return local_squares(placed, gradient.lookups, gradient.values, None, tables.channel)
