"""The pooled exchange: ids travel to the rows' owners, and sums of bags travel back.

Each device sends every id, repeats included, to the row's owner. An owner pools its rows of every
bag of all devices, and a reduce-scatter adds the owners' sums on the bag's own device. Backward, an
all-gather sends the gradients of all bags to all owners. This moves ``bags x dim`` numbers of the
whole batch however long the bags are; the exchange of rows moves ``distinct ids x dim``.

A message between two devices holds ``capacity`` ids, and each device sends its demand along. A
batch with a higher demand takes the other branch of the program, whose messages hold all ids. Ids
can be sent ahead of the step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Shaped

from jaxrec.embed import kernels
from jaxrec.embed.config import MAX_ROWS
from jaxrec.embed.kernels import BagLayout, Lookups
from jaxrec.embed.outputs import pool
from jaxrec.embed.row_gradients import RowGradients
from jaxrec.mesh.channel import Channel, ListLengths, run_if
from jaxrec.mesh.exchange.base import Cut, Exchange, table_squares, update_owned
from jaxrec.mesh.exchange.column_slices import update_slices
from jaxrec.mesh.exchange.owner_features import received_layout
from jaxrec.mesh.placed_group import PlacedGroup


@dataclasses.dataclass(frozen=True)
class Pooled(Exchange):
    """Exchange that sends ids to the rows' owners, and the owners' sums of bags back."""

    name: ClassVar[str] = "pooled"
    takes_large_groups: ClassVar[bool] = True
    sends_gradients_first: ClassVar[bool] = True

    def refuse(self, cut: Cut) -> str | None:
        if not cut.is_pooled:
            return "its rows are not pooled"
        return None

    def traffic(self, work):
        # All-to-all: ids, bag lengths, and for each device the length of its list and the demand.
        # Reduce-scatter: bags. All-gather: their gradients.
        bags = 4 * work.dim * work.bags
        return {
            "all-to-all": work.devices * (4 * work.capacity + 4 * work.bags + 2 * 4),
            "reduce-scatter": work.devices * bags,
            "all-gather": work.devices * bags,
        }

    def route(self, placed, request, channel, capacity):
        return route_ids(placed, request.lookups, request.layout.num_bags, channel, capacity)

    def pool(self, placed, table, request, route, channel, dtype):
        scales = request.scales
        devices, num_bags = route.lengths.shape

        def pooled(rows: Int32[Array, "devices _"]) -> Float[Array, "devices bags dim"]:
            capacity = rows.shape[1]
            received = route.send_scales(scales, capacity, channel)
            layout = received_layout(devices, (capacity,), (num_bags,), placed.local_rows)
            ids, lengths = rows.reshape(-1), route.lengths.reshape(-1)
            # In float32 whatever the result's type, since these are sums of parts yet to be added.
            sums = pool(table, ids, lengths, received, layout, jnp.dtype("float32"))
            return sums.reshape(devices, num_bags, -1)

        return channel.sum_rows(route.apply(pooled, placed, channel)), request.scaled_lookups

    def update(self, placed, table, state, gradient, step, channel, capacity):
        route = _route_of(placed, gradient, channel, capacity)
        owned = _gather_gradients(placed, gradient, channel, route)

        def update(carried: Any, rows: Int32[Array, "devices _"]) -> Any:
            table, state = carried
            if not placed.joins_slices:
                return update_owned(placed, table, state, owned(rows), step, channel)
            layouts = gradient.layouts
            sums = functools.partial(
                _whole_sums, placed=placed, layouts=layouts, route=route, channel=channel
            )
            return update_slices(placed, table, state, owned(rows), step, channel, sums)

        if route.has_space_for_all:
            return update((table, state), route.rows)
        # Two loops, of which one runs its body once: `cond` would copy the table.
        new = run_if(~route.overflows, lambda carried: update(carried, route.rows), (table, state))
        return run_if(
            route.overflows, lambda carried: update(carried, route.all_rows(placed, channel)), new
        )

    def squares(self, placed, gradient, channel, capacity):
        route = _route_of(placed, gradient, channel, capacity)
        owned = _gather_gradients(placed, gradient, channel, route)

        def squares(rows: Int32[Array, "devices _"]) -> Float[Array, " tables"]:
            return table_squares(placed, owned(rows), None, channel)

        return route.apply(squares, placed, channel)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PooledRoute:
    """Route of `Pooled`.

    Attributes:
        local_rows: Row of each of this device's lookups in its owner's array; `BAD_ROW` for a bad
            id.
        order: Positions of these lookups, by owner and then by bag; padding is last.
        counts: Number of this device's lookups at each owner.
        rows: Rows of this device's array that each device looks up, padded with
            `PlacedGroup.local_rows`. Incomplete if the route overflows.
        list_lengths: Number of lookups sent to each device, and received from it.
        lengths: Number of ids of each device's bags whose rows are on this device.
        largest: Largest number of lookups that one device has at one owner.
    """

    local_rows: Int32[Array, " n"]
    order: Int32[Array, " n"]
    counts: Int32[Array, " devices"]
    rows: Int32[Array, "devices capacity"]
    list_lengths: ListLengths
    lengths: Int32[Array, "devices bags"]
    largest: Int32[Array, ""]

    @property
    def demand(self) -> Float[Array, "..."]:
        """Capacity factor that the batch needs: `largest` over an even share of the lookups."""
        return self.largest * (self.counts.shape[-1] / self.order.shape[-1])

    @property
    def overflows(self) -> Bool[Array, ""]:
        """Whether some device has more lookups at one owner than a message holds."""
        return self.largest > self.rows.shape[1]

    @property
    def has_space_for_all(self) -> bool:
        """Whether a route of this capacity can never overflow."""
        return self.rows.shape[1] == self.order.size

    def send_scales(
        self, scales: Float[Array, " n"] | None, capacity: int, channel: Channel
    ) -> Float[Array, " received"] | None:
        """Send the lookups' scales to the owners; a message holds ``capacity`` of them."""
        if scales is None:
            return None
        return channel.send(_pack(self.order, self.counts, scales, capacity, 0)).reshape(-1)

    def all_rows(self, placed: PlacedGroup, channel: Channel) -> Int32[Array, "devices n"]:
        """Send the lookups again, in messages that hold them all; return the complete `rows`."""
        capacity = self.order.size
        rows = _pack(self.order, self.counts, self.local_rows, capacity, placed.local_rows)
        return channel.send_lists(rows, self.counts, fill=placed.local_rows)[0]

    def apply(
        self,
        function: Callable[[Int32[Array, "devices _"]], Array],
        placed: PlacedGroup,
        channel: Channel,
    ) -> Array:
        """Call ``function`` with `rows`, or with `all_rows` if the route overflows."""
        if self.has_space_for_all:
            return function(self.rows)
        return jax.lax.cond(
            self.overflows,
            lambda: function(self.all_rows(placed, channel)),
            lambda: function(self.rows),
        )


def route_ids(
    placed: PlacedGroup, lookups: Lookups, num_bags: int, channel: Channel, capacity: int
) -> PooledRoute:
    """Send each owner the lookups that this device has of its rows."""
    devices = placed.num_devices
    if devices * num_bags > MAX_ROWS:
        raise ValueError(
            f"tables {', '.join(placed.tables)}: {num_bags} bags of each of {devices} devices "
            f"are more than int32 can number ({MAX_ROWS}); use smaller batches"
        )
    assert lookups.bags is not None
    owners, local_rows = placed.locate(lookups)
    has_row = owners < devices
    # An id outside its table has no owner. It goes to device 0, which makes its bag NaN.
    is_padding = lookups.rows == placed.padding
    owners = jnp.where(has_row | is_padding, owners, 0)
    local_rows = jnp.where(has_row, local_rows, kernels.BAD_ROW)
    # One stable sort by (owner, bag) as a single number, which int32 holds by the check above.
    keys = jnp.where(is_padding, devices * num_bags, owners * num_bags + lookups.bags)
    buckets = kernels.bucket(keys, devices * num_bags)
    lengths = buckets.counts.reshape(devices, num_bags)
    counts = lengths.sum(axis=1, dtype=jnp.int32)
    capacity = min(capacity, local_rows.size)
    rows = _pack(buckets.order, counts, local_rows, capacity, placed.local_rows)
    rows, list_lengths, (lengths, largest) = channel.send_lists(
        rows,
        jnp.minimum(counts, capacity),
        lengths,
        jnp.broadcast_to(counts.max(), (devices, 1)),
        fill=placed.local_rows,
    )
    return PooledRoute(
        local_rows, buckets.order, counts, rows, list_lengths, lengths, largest.max()
    )


def _route_of(
    placed: PlacedGroup, gradient: RowGradients, channel: Channel, capacity: int
) -> PooledRoute:
    """Return a gradient's route; a gradient of merged lookups has none, and is routed now."""
    if gradient.route is not None:
        return gradient.route
    return route_ids(placed, gradient.lookups, gradient.values.shape[0], channel, capacity)


def _pack(
    order: Int32[Array, " n"],
    counts: Int32[Array, " devices"],
    values: Shaped[Array, " n"],
    capacity: int,
    fill: int,
) -> Shaped[Array, "devices capacity"]:
    """Copy each lookup's value to the line of its owner, padded with ``fill``.

    ``order`` and ``counts`` are those of `PooledRoute`.
    """
    begins = jnp.cumsum(counts, dtype=jnp.int32) - counts
    index = jnp.arange(capacity, dtype=jnp.int32)[None]
    lookups = order.at[begins[:, None] + index].get(mode="clip")
    lookups = jnp.where(index < counts[:, None], lookups, order.size)
    return values.at[lookups].get(mode="fill", fill_value=fill)


def _gather_gradients(
    placed: PlacedGroup, gradient: RowGradients, channel: Channel, route: PooledRoute
) -> Callable[[Int32[Array, "devices _"]], RowGradients]:
    """Gather all devices' bag gradients; return a function that makes the gradient of rows.

    The function takes `PooledRoute.rows`, or `PooledRoute.all_rows`.
    """
    # A function, because both branches of an update need the gathered gradients. They are sent
    # once, outside of the branches.
    gradients = channel.gather_gradients(gradient.values)
    scales, num_bags = gradient.lookups.scales, route.lengths.shape[1]

    def owned(rows: Int32[Array, "devices _"]) -> RowGradients:
        capacity = rows.shape[1]
        received = route.send_scales(scales, capacity, channel)
        layout = received_layout(placed.num_devices, (capacity,), (num_bags,), placed.local_rows)
        lookups = kernels.flatten_bags(
            rows.reshape(-1), route.lengths.reshape(-1), received, layout, placed.local_rows
        )
        return dataclasses.replace(gradient, lookups=lookups, values=gradients)

    return owned


def _whole_sums(
    partial: Float[Array, " received"],
    *,
    placed: PlacedGroup,
    layouts: Sequence[BagLayout],
    route: PooledRoute,
    channel: Channel,
) -> Float[Array, " received"]:
    """Turn partial sums into whole ones for `update_slices`, if rows and columns are cut."""
    # The device of a lookup sent it to the owners of all the row's slices. So their partial sums go
    # back to it, one per lookup, it adds them up, and the totals go out again.
    count = route.order.size
    index = jnp.arange(count, dtype=jnp.int32)
    parts = channel.send(partial.reshape(placed.num_devices, -1))
    lookups = _pack(route.order, route.counts, index, parts.shape[1], count)
    of_lookups = jnp.zeros(count, partial.dtype).at[lookups].set(parts, mode="drop")
    table = {each.first_row: each.table for each in placed.shards}
    # Slices of a table that read the same ids of a batch have the same lookups.
    keys = [
        (batch, table[row], start, capacity)
        for batch, layout in enumerate(layouts)
        for row, start, capacity in zip(
            layout.row_offsets, layout.id_starts, layout.capacities, strict=True
        )
    ]
    ends = tuple(itertools.accumulate(capacity for *_, capacity in keys))
    by_feature = jnp.split(of_lookups, np.array(ends[:-1], int))
    sums: dict[tuple, Array] = {}
    for key, of_slice in zip(keys, by_feature, strict=True):
        sums[key] = sums[key] + of_slice if key in sums else of_slice
    whole = jnp.concatenate([sums[key] for key in keys])
    return channel.send(whole.at[lookups].get(mode="fill", fill_value=0)).reshape(-1)
