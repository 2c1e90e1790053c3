"""Norms of tables' gradients whose rows lie on several devices, and bounds on them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrec.embed.kernels.stretches import sum_by_table
from jaxrec.embed.row_gradients import RowGradients
from jaxrec.mesh.channel import Channel
from jaxrec.mesh.placed_group import PlacedGroup
from jaxrec.optim.norm import root


def table_squares(
    placed: PlacedGroup, gradient: RowGradients, clip_value: float | None, channel: Channel
) -> Float[Array, " tables"]:
    """Return the sum of squares of the gradients of this device's rows, table by table.

    Args:
        placed: The group.
        gradient: The gradient of all devices' lookups of this device's rows.
        clip_value: Bound on the absolute value of an element of a lookup's gradient.
        channel: Channel to the other devices.
    """
    runs, sums = gradient.sum_by_row(placed.local_rows, clip_value)
    is_column = placed.is_column(runs.unique, channel.index)
    squares = sums * sums if is_column is None else jnp.where(is_column, sums * sums, 0)
    squares = jnp.where(runs.unique < placed.local_rows, jnp.sum(squares, axis=1), 0)
    tables = placed.tables_of(runs.unique, channel.index)
    return sum_by_table(squares, tables, len(placed.tables))


def clip_tables(placed: PlacedGroup, gradient: RowGradients, channel: Channel) -> RowGradients:
    """Return the gradient with the norm of each table's within the optimizer's ``clip_norm``.

    Args:
        placed: The group.
        gradient: The gradient of all devices' lookups of this device's rows.
        channel: Channel to the other devices.
    """
    optimizer, lookups = placed.group.optimizer, gradient.lookups
    if optimizer.clip_norm is None:
        return gradient
    squares = table_squares(placed, gradient, optimizer.clip_value, channel)
    factors = clip_factors(squares, optimizer.clip_norm, channel)
    factors = factors[placed.tables_of(lookups.rows, channel.index)]
    scales = factors if lookups.scales is None else factors * lookups.scales
    lookups = dataclasses.replace(lookups, scales=scales)
    return dataclasses.replace(gradient, lookups=lookups)


def clip_factors(
    squares: Float[Array, " tables"], clip_norm: float, channel: Channel
) -> Float[Array, " tables"]:
    """Return the factors that bring the norm of each table's gradient down to the bound.

    Args:
        squares: This device's part of the sum of squares of each table's gradient.
        clip_norm: The bound.
        channel: Channel to the other devices.
    """
    norms = root(jax.lax.psum(squares, channel.axes))
    return jnp.minimum(1, clip_norm / (norms + 1e-6))
