"""Lines that owners send ahead of an update, and send again where the update changed them.

A line is what an owner sends a device for its lookups: a row, or a pooled bag. Lines of the next
batch can be sent before the update of this batch, while the dense part of the model runs. Lines
that read a row which the update wrote are stale then. Their owner knows which, since it has the
rows of both batches' routes, and sends these lines once more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrec.embed import kernels
from jaxrec.mesh.channel import Channel, run_if

Lines: TypeAlias = Float[Array, "devices lines dim"]
"""Lines that each owner sends a device for the lookups of its batch: rows, or pooled bags."""


@dataclasses.dataclass(frozen=True)
class WrittenRows:
    """Rows of this device that the update of a batch writes, and maybe others.

    Attributes:
        rows: The rows, in any order and with repeats. Numbers outside the array are padding.
        is_all: Whether ``rows`` has every row that the update writes; equal on all devices.
        num_rows: Number of rows of this device's array.
    """

    rows: Int32[Array, " written"]
    is_all: Bool[Array, ""]
    num_rows: int

    @classmethod
    def of(cls, routes: Sequence[Any], num_rows: int) -> WrittenRows:
        """Return the rows that the update writes, given the routes of its lookups."""
        rows = jnp.concatenate([route.owned_rows.reshape(-1) for route in routes])
        is_all = jnp.stack([jnp.asarray(route.has_all_rows) for route in routes]).all()
        return cls(rows, is_all, num_rows)

    def contain(self, rows: Int32[Array, "..."]) -> Bool[Array, "..."]:
        """Return whether each of the given rows is among ``self.rows``."""
        # One sort of both lists. A mark for each row would grow with the table.
        flat = rows.reshape(-1)
        runs = kernels.build_runs(jnp.concatenate([self.rows, flat]), self.num_rows)
        of_written, of_rows = jnp.split(runs.inverse, [self.rows.size])
        marks = jnp.zeros(runs.inverse.size, bool).at[of_written].set(True)
        is_row = (flat >= 0) & (flat < self.num_rows)
        return (marks[of_rows] & is_row).reshape(rows.shape)


def replace_lines(
    lines: Lines,
    is_stale: Bool[Array, "devices lines"],
    read: Callable[[Int32[Array, "devices capacity"]], Float[Array, "devices capacity dim"]],
    send_all: Callable[[], Lines],
    written: WrittenRows,
    channel: Channel,
    capacity: int,
) -> tuple[Lines, Float[Array, ""]]:
    """Send stale lines again; return all lines, and the share of them that was stale.

    Args:
        lines: The lines that this device received.
        is_stale: Whether each line that this device sent is stale, by the device that received it.
        read: Function that returns the lines at some positions. The number of lines is padding.
        send_all: Function that sends all lines. It runs if a device has more than ``capacity``
            stale lines for another, or if it does not know which are stale.
        written: Rows that the update wrote.
        channel: Channel to the other devices.
        capacity: Number of stale lines that a message between two devices holds.

    Returns:
        The lines, and the largest share of the lines for one device that was stale.
    """
    size = is_stale.shape[1]
    counts = is_stale.sum(axis=1, dtype=jnp.int32)
    # The n-th stale line of a device gets the n-th position of its list.
    order = jnp.where(is_stale, jnp.cumsum(is_stale, axis=1, dtype=jnp.int32) - 1, size)
    devices = jnp.arange(order.shape[0], dtype=jnp.int32)[:, None]
    every = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), order.shape)
    positions = jnp.full((order.shape[0], capacity), size, jnp.int32)
    positions = positions.at[devices, order].set(every, mode="drop")
    received, lengths, (demands,) = channel.send_lists(
        positions,
        jnp.minimum(counts, capacity),
        jnp.broadcast_to(counts.max(), (counts.size, 1)),
        fill=size,
    )
    demand = demands.max()
    again = channel.send_rows(read(positions), lengths)
    lines = lines.at[devices, received].set(again, mode="drop")
    # All devices have the same demand, so all send their lines again, or none.
    is_known = written.is_all & (demand <= capacity)
    lines = run_if(~is_known, lambda _: send_all(), lines)
    return lines, demand / max(1, size)


def take_lines(values: Any, positions: Int32[Array, "devices capacity"], fill: Any) -> Any:
    """Return the values at positions of each device's line, ``fill`` at padding."""

    def take(values: Array, positions: Array) -> Array:
        return values.at[positions].get(mode="fill", fill_value=fill)

    return jax.vmap(take)(values, positions)
