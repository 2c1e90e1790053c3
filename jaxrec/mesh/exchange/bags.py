"""Exchanges of whole bags: ids travel to the devices that pool them, and whole bags travel back.

A bag's feature says where it is pooled. So all destinations are known when the program is compiled,
and ids need neither sorting nor counting.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxrec.embed import kernels
from jaxrec.embed.formats import TableArray
from jaxrec.embed.kernels import BagLayout
from jaxrec.embed.outputs import pool
from jaxrec.embed.row_gradients import RowGradients
from jaxrec.mesh.channel import Channel
from jaxrec.mesh.exchange.base import Cut, Exchange, Request, Workload, constant, update_owned
from jaxrec.mesh.exchange.column_slices import sums_of_bags, update_slices
from jaxrec.mesh.exchange.lines import replace_lines, take_lines
from jaxrec.mesh.exchange.owner_features import (
    BagsRoute,
    OwnerFeatures,
    received_lookups,
    send_bag_gradients,
    send_bags,
    send_lookups,
    send_scales,
    unpack_bags,
)
from jaxrec.mesh.exchange.pooled import Pooled, PooledRoute
from jaxrec.mesh.placed_group import PlacedGroup


@dataclasses.dataclass(frozen=True)
class Bags(Exchange):
    """Exchange of whole bags: a feature's ids go to the owner of its table, which pools them."""

    name: ClassVar[str] = "bags"

    def refuse(self, cut: Cut) -> str | None:
        if not cut.is_pooled:
            return "its rows are not pooled"
        if cut.row_parts > 1:
            return "its rows are cut over several devices"
        return None

    def traffic(self, work):
        # A bag costs its length, its values and its gradient.
        bag = 4 + 2 * 4 * work.dim
        return {"all-to-all": work.devices * (4 * work.owner_lookups + bag * work.owner_bags)}

    def route(self, placed, request, channel, capacity):
        slots = placed.slots(request.lookups.rows)
        rows = jnp.where(slots < placed.num_slots, slots % placed.local_rows, kernels.BAD_ROW)
        owned = OwnerFeatures.of_group(placed, request.layout)
        return send_lookups(owned, rows, request.lengths, request.layout, channel)

    def fetch(self, placed, table, request, route, channel):
        # Owners multiply by the weights, which a layer of the next step may compute.
        if request.weights is not None:
            return None
        owned = OwnerFeatures.of_group(placed, request.layout)
        scales = send_scales(owned, request.scales, request.layout, channel)
        return channel.send_rows(
            _pool_owned(placed, owned, table, route.rows, route, scales, channel)
        )

    def refetch(self, placed, table, request, route, channel, written, capacity):
        owned = OwnerFeatures.of_group(placed, request.layout)
        lookups = received_lookups(owned, route, placed.local_rows)
        is_written = written.contain(lookups.rows)
        is_stale = jnp.zeros(route.lengths.size, bool).at[lookups.bags].max(is_written)
        scales = send_scales(owned, request.scales, request.layout, channel)

        def read(positions):
            # The other bags read one row again and again, which stays in the cache.
            rows = jnp.where(is_stale[lookups.bags], route.rows, 0)
            bags = _pool_owned(placed, owned, table, rows, route, scales, channel)
            return take_lines(bags, positions, 0)

        return replace_lines(
            request.lines,
            is_stale.reshape(len(owned.features), -1),
            read,
            lambda: self.fetch(placed, table, request, route, channel),
            written,
            channel,
            math.ceil(capacity * request.lines.shape[1]),
        )

    def pool(self, placed, table, request, route, channel, dtype):
        layout, lines = request.layout, request.lines
        owned = OwnerFeatures.of_group(placed, layout)
        scales = send_scales(owned, request.scales, layout, channel)
        if lines is None:
            bags = _pool_owned(placed, owned, table, route.rows, route, scales, channel)
            lines = channel.send_rows(bags)
        lookups = received_lookups(owned, route, placed.local_rows, constant(scales))
        return unpack_bags(owned, lines, layout), lookups

    def send_gradients(self, placed, gradient, channel):
        (layout,) = gradient.layouts
        return send_bag_gradients(OwnerFeatures.of_group(placed, layout), gradient, channel)

    def owned_gradients(self, placed, gradient, channel, capacity):
        return gradient

    def update(self, placed, table, state, gradient, step, channel, capacity):
        if placed.joins_slices:
            layouts = gradient.layouts
            sums = functools.partial(sums_of_bags, placed=placed, layouts=layouts, channel=channel)
            return update_slices(placed, table, state, gradient, step, channel, sums)
        return update_owned(placed, table, state, gradient, step, channel, **channel.received)


def _pool_owned(
    placed: PlacedGroup,
    owned: OwnerFeatures,
    table: Float[TableArray, "local_rows dim"],
    rows: Int32[Array, " received"],
    route: BagsRoute,
    scales: Float[Array, " received"] | None,
    channel: Channel,
) -> Float[Array, "devices bags dim"]:
    """Pool rows into the bags that this device sends to each device."""
    layout, float32 = owned.received(placed.local_rows), jnp.dtype("float32")
    bags = pool(table, rows, route.lengths, scales, layout, float32, **channel.sent)
    return bags.reshape(len(owned.features), -1, bags.shape[1])


@dataclasses.dataclass(frozen=True)
class HostGroup(PlacedGroup):
    """A group as one host sees it: its slots are those of the host's devices, from 0.

    Rows that lie on other hosts have no slot.

    Attributes:
        whole: The group on all devices.
        host: Number of this device's host. A traced value, inside `jax.shard_map`.
    """

    whole: PlacedGroup
    host: Int32[Array, ""]

    @classmethod
    def of(cls, placed: PlacedGroup, channel: Channel) -> HostGroup:
        """Return a group as this device's host sees it, given the channel of all devices."""
        fields = {field.name: getattr(placed, field.name) for field in dataclasses.fields(placed)}
        fields["num_devices"] = channel.within.size
        return cls(**fields, whole=placed, host=channel.across.index)

    def slots(self, rows: Int32[Array, " n"]) -> Int32[Array, " n"]:
        slots = self.whole.slots(rows) - self.host * self.num_slots
        return jnp.where((slots >= 0) & (slots < self.num_slots), slots, self.num_slots)

    def tables_of(
        self, local_rows: Int32[Array, " n"], device: Int32[Array, ""]
    ) -> Int32[Array, " n"]:
        return self.whole.tables_of(local_rows, self.host * self.num_devices + device)


_WITHIN = Pooled()


@dataclasses.dataclass(frozen=True)
class PooledByHost(Exchange):
    """Exchange in two stages: a table's host pools each bag, then sends it to another host.

    The rows of a table lie over the devices of one host, as `table_row_wise` and `grid` place them.

    1. Device ``d`` of a host receives the ids of the host's tables from device ``d`` of each host.
    2. Within the host these ids go on to the rows' owners, which pool them. A reduce-scatter adds
       the owners' sums on device ``d``, as in `Pooled`.
    3. Whole bags travel back between hosts.

    Gradients take the same way. TorchRec's two-level sharding (TWRW) sums in this order, too.
    """

    # Between hosts each bag travels once in each direction. `Pooled` over all devices would send
    # every owner's sum of every bag of the group to every host, even for tables of other hosts.

    name: ClassVar[str] = "pooled_by_host"
    sends_gradients_first: ClassVar[bool] = True

    def refuse(self, cut: Cut) -> str | None:
        if not cut.is_pooled:
            return "its rows are not pooled"
        if cut.hosts == 1:
            return "the mesh has one host"
        if cut.row_hosts > 1:
            return "its rows are cut over several hosts"
        needs_all = cut.optimizer.needs_whole_rows or cut.optimizer.clip_norm is not None
        if cut.column_parts > 1 and needs_all:
            return (
                f"its optimizer {type(cut.optimizer).__name__} with these settings needs whole "
                "rows, and its columns lie on several hosts"
            )
        return None

    def traffic(self, work):
        # Between hosts as in `Bags`: ids and bag lengths, bags and their gradients. Within a host
        # as in `Pooled`, for the bags of all hosts' samples.
        bags, ids = work.hosts * work.owner_bags, work.hosts * work.owner_lookups
        within = dataclasses.replace(
            work,
            devices=work.devices // work.hosts,
            bags=bags,
            capacity=min(ids, _capacity_within(work.capacity, ids / work.lookups, work.hosts)),
            lookups=ids,
            hosts=1,
        )
        bytes = _WITHIN.traffic(within)
        bytes["all-to-all"] += 4 * ids + (4 + 2 * 4 * work.dim) * bags
        return bytes

    def sent_between_hosts(self, work: Workload) -> float:
        """Return the bytes that each device sends to other hosts in a step, as `traffic` counts."""
        lines = 4 * work.owner_lookups + (4 + 2 * 4 * work.dim) * work.owner_bags
        return (work.hosts - 1) * lines

    def route(self, placed, request, channel, capacity):
        owned = _features_of_hosts(placed, request.layout, channel)
        layout, rows = request.layout, request.lookups.rows
        received = send_lookups(owned, rows, request.lengths, layout, channel.across)
        inner = _received_request(placed, owned, received, None)
        growth = inner.lookups.rows.size / max(1, rows.size)
        capacity = _capacity_within(capacity, growth, channel.across.size)
        within = _WITHIN.route(HostGroup.of(placed, channel), inner, channel.within, capacity)
        return HostRoute(received, within)

    def pool(self, placed, table, request, route, channel, dtype):
        owned = _features_of_hosts(placed, request.layout, channel)
        scales = send_scales(owned, request.scales, request.layout, channel.across)
        inner = _received_request(placed, owned, route.received, scales)
        on_host = HostGroup.of(placed, channel)
        bags, lookups = _WITHIN.pool(on_host, table, inner, route.within, channel.within, dtype)
        return send_bags(owned, bags, request.layout, channel.across), lookups

    def send_gradients(self, placed, gradient, channel):
        (layout,) = gradient.layouts
        owned = _features_of_hosts(placed, layout, channel)
        return send_bag_gradients(owned, gradient, channel.across)

    def update(self, placed, table, state, gradient, step, channel, capacity):
        on_host, gradient, capacity = _on_host(placed, gradient, channel, capacity)
        return _WITHIN.update(on_host, table, state, gradient, step, channel.within, capacity)

    def squares(self, placed, gradient, channel, capacity):
        on_host, gradient, capacity = _on_host(placed, gradient, channel, capacity)
        return _WITHIN.squares(on_host, gradient, channel.within, capacity)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostRoute:
    """Route of `PooledByHost`.

    Attributes:
        received: Lookups of this host's tables that this device received from its peers, the
            devices of the same number on all hosts.
        within: Route of these lookups between the devices of the host.
    """

    received: BagsRoute
    within: PooledRoute

    @property
    def demand(self) -> Float[Array, "..."]:
        """Capacity factor that the batch needs within the host; see `PooledRoute.demand`."""
        return self.within.demand


def _features_of_hosts(placed: PlacedGroup, layout: BagLayout, channel: Channel) -> OwnerFeatures:
    """Return the features of each host's tables, given the channel of all devices."""
    return OwnerFeatures.of_group(placed, layout, channel.within.size)


def _received_request(
    placed: PlacedGroup,
    owned: OwnerFeatures,
    received: BagsRoute,
    scales: Float[Array, " received"] | None,
) -> Request:
    """Return the request of the lookups that this device received from its peers."""
    # The scales are mean scales times weights by now, and a request takes them as weights.
    num_rows = placed.group.num_rows
    layout, lookups = owned.received(num_rows), received_lookups(owned, received, num_rows)
    return Request(lookups, received.rows, received.lengths, scales, layout)


def _capacity_within(capacity: int, growth: float, hosts: int) -> int:
    """Return the capacity of a message within a host.

    ``capacity`` is that of a message between all devices. ``growth`` is the ratio of the lookups
    that a device receives from its peers to its own.
    """
    # An even share is larger by the number of hosts, since only a host's devices share the lookups.
    return math.ceil(capacity * growth * hosts)


def _on_host(
    placed: PlacedGroup, gradient: RowGradients, channel: Channel, capacity: int
) -> tuple[HostGroup, RowGradients, int]:
    """Return the arguments of the exchange within a host: group, gradient and capacity."""
    if gradient.route is not None:
        gradient = dataclasses.replace(gradient, route=gradient.route.within)
    capacity = _capacity_within(capacity, 1, channel.across.size)
    return HostGroup.of(placed, channel), gradient, capacity
