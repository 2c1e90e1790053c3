"""The norm of each table's gradient, of which every device has a part."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrec.embed import kernels
from jaxrec.embed.kernels import Lookups
from jaxrec.embed.update import RowGradients
from jaxrec.mesh.collectives import Channel
from jaxrec.mesh.layout import PlacedGroup


def table_squares(
    placed: PlacedGroup,
    lookups: Lookups,
    gradients: Float[Array, "lines dim"],
    clip_value: float | None,
    channel: Channel,
) -> Float[Array, " tables"]:
    """The sum of squares of the gradients of this device's rows, table by table.

    Args:
        placed: Where the group lies.
        lookups: Lookups of this device's rows.
        gradients: Their gradients.
        clip_value: Bound on an element of a lookup's gradient.
        channel: The way to the other devices.
    """
    runs = kernels.build_runs(lookups.rows, placed.local_rows)
    at = dataclasses.replace(lookups, rows=runs.inverse)
    sums = kernels.sum_rows(at, gradients, runs.unique.size, clip_value)
    squares = jnp.where(runs.unique < placed.local_rows, jnp.sum(sums * sums, axis=1), 0)
    tables = placed.tables_of(runs.unique, channel.index)
    return jax.ops.segment_sum(squares, tables, len(placed.tables))


def clip_tables(placed: PlacedGroup, gradient: RowGradients, channel: Channel) -> RowGradients:
    """The gradient with the norm of each table's within the optimizer's bound, if it has one.

    Args:
        placed: Where the group lies.
        gradient: The gradient of all devices' lookups of this device's rows.
        channel: The way to the other devices.
    """
    optimizer, lookups = placed.group.optimizer, gradient.lookups
    if optimizer.clip_norm is None:
        return gradient
    squares = table_squares(placed, lookups, gradient.values, optimizer.clip_value, channel)
    factors = clip_factors(squares, optimizer.clip_norm, channel)
    factors = factors[placed.tables_of(lookups.rows, channel.index)]
    scales = factors if lookups.scales is None else factors * lookups.scales
    lookups = dataclasses.replace(lookups, scales=scales)
    return dataclasses.replace(gradient, lookups=lookups)


def clip_factors(
    squares: Float[Array, " tables"], clip_norm: float, channel: Channel
) -> Float[Array, " tables"]:
    """What brings the norm of each table's gradient down to the bound.

    Args:
        squares: This device's part of the sum of squares of each table.
        clip_norm: The bound.
        channel: The way to the other devices.
    """
    norms = jnp.sqrt(jax.lax.psum(squares, channel.axes))
    return jnp.minimum(1, clip_norm / (norms + 1e-6))
