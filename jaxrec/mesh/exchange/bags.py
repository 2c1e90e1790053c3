"""Exchanges of whole bags: ids travel to the devices that pool them, whole bags travel back.

A bag's feature says where it is pooled, so nothing is sorted or counted: all destinations are known
when the program is compiled.
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
from jaxrec.embed.outputs import pool
from jaxrec.embed.row_gradients import RowGradients
from jaxrec.mesh.channel import Channel
from jaxrec.mesh.exchange.base import Cut, Exchange, Request, Workload, constant, update_owned
from jaxrec.mesh.exchange.column_slices import sums_of_bags, update_slices
from jaxrec.mesh.exchange.owner_features import (
    BagsRoute,
    OwnerFeatures,
    received_lookups,
    send_bag_gradients,
    send_bags,
    send_lookups,
    send_scales,
)
from jaxrec.mesh.exchange.pooled import Pooled, PooledRoute
from jaxrec.mesh.placed_group import PlacedGroup


@dataclasses.dataclass(frozen=True)
class Bags(Exchange):
    """Ids travel to tables that lie whole on a device, and pooled bags come back.

    Each device sends the ids of a feature to the owner of its table, which pools them and sends the
    bags back; their gradients travel the same way.
    """

    name: ClassVar[str] = "bags"

    def refuse(self, cut: Cut) -> str | None:
        if not cut.is_pooled:
            return "its rows are not pooled"
        if cut.row_parts > 1:
            return "its rows are cut over several devices"
        return None

    def traffic(self, work):
        # Ids and bag lengths; bags and their gradients.
        bag = 4 + 2 * 4 * work.dim
        return {"all-to-all": work.devices * (4 * work.owner_lookups + bag * work.owner_bags)}

    def route(self, placed, request, channel, capacity):
        slots = placed.slots(request.lookups.rows)
        rows = jnp.where(slots < placed.num_slots, slots % placed.local_rows, kernels.BAD_ROW)
        owned = OwnerFeatures.of_group(placed, request.layout)
        return send_lookups(owned, rows, request.lengths, request.layout, channel)

    def pool(self, placed, table, request, route, channel, dtype):
        layout = request.layout
        owned = OwnerFeatures.of_group(placed, layout)
        scales = send_scales(owned, request.scales, layout, channel)
        received, num_rows = owned.received(placed.local_rows), placed.local_rows
        float32 = jnp.dtype("float32")
        pooled = pool(table, route.rows, route.lengths, scales, received, float32, **channel.sent)
        bags = send_bags(owned, pooled, layout, channel)
        return bags, received_lookups(owned, route, num_rows, constant(scales))

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


@dataclasses.dataclass(frozen=True)
class HostGroup(PlacedGroup):
    """A group on one host: slots count from the host's first, and rows elsewhere have none.

    Attributes:
        whole: The group on all devices.
        host: The host; known to the devices alone, inside `jax.shard_map`.
    """

    whole: PlacedGroup
    host: Int32[Array, ""]

    @classmethod
    def of(cls, placed: PlacedGroup, channel: Channel) -> HostGroup:
        """Return a group on this device's host.

        Args:
            placed: The group on all devices.
            channel: Channel between all devices.
        """
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
    """Sums of bags within the hosts of tables, and whole bags between hosts.

    For tables whose rows lie over the devices of one host, as `table_row_wise` and `grid` place
    them. Device ``d`` of a host takes the ids that the host's tables have in the samples of device
    ``d`` of every host. Within the host ids travel on to the rows, owners pool them, and a
    reduce-scatter adds their sums up at device ``d``, as in `Pooled`. Whole bags then travel home
    between hosts. Gradients take the same way back. TorchRec's two-level sharding (TWRW) sums in
    this order, too.

    Between hosts each bag travels once in each direction. In the pooled exchange over all devices
    every owner sends its sum of every bag of the group to every host, those of other hosts' tables
    included.
    """

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
        # Between hosts ids and bag lengths, bags and their gradients; within a host what the pooled
        # exchange sends of the bags of all hosts.
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
        """Return the bytes that each device sends to other hosts in a training step.

        In float32, without weights.

        Args:
            work: Sizes of the lookups.
        """
        lines = 4 * work.owner_lookups + (4 + 2 * 4 * work.dim) * work.owner_bags
        return (work.hosts - 1) * lines

    def route(self, placed, request, channel, capacity):
        owned = _features_of_hosts(placed, request, channel)
        layout, rows = request.layout, request.lookups.rows
        received = send_lookups(owned, rows, request.lengths, layout, channel.across)
        inner = _received_request(placed, owned, received, None)
        growth = inner.lookups.rows.size / max(1, rows.size)
        capacity = _capacity_within(capacity, growth, channel.across.size)
        within = _WITHIN.route(HostGroup.of(placed, channel), inner, channel.within, capacity)
        return HostRoute(received, within)

    def pool(self, placed, table, request, route, channel, dtype):
        owned = _features_of_hosts(placed, request, channel)
        scales = send_scales(owned, request.scales, request.layout, channel.across)
        inner = _received_request(placed, owned, route.received, scales)
        on_host = HostGroup.of(placed, channel)
        bags, lookups = _WITHIN.pool(on_host, table, inner, route.within, channel.within, dtype)
        return send_bags(owned, bags, request.layout, channel.across), lookups

    def send_gradients(self, placed, gradient, channel):
        (layout,) = gradient.layouts
        devices = channel.within.size
        owned = OwnerFeatures.of_group(placed, layout, devices)
        return send_bag_gradients(owned, gradient, channel.across)

    def update(self, placed, table, state, gradient, step, channel, capacity):
        capacity = _capacity_within(capacity, 1, channel.across.size)
        on_host, gradient = HostGroup.of(placed, channel), _of_host(gradient)
        return _WITHIN.update(on_host, table, state, gradient, step, channel.within, capacity)

    def squares(self, placed, gradient, channel, capacity):
        capacity = _capacity_within(capacity, 1, channel.across.size)
        on_host, gradient = HostGroup.of(placed, channel), _of_host(gradient)
        return _WITHIN.squares(on_host, gradient, channel.within, capacity)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostRoute:
    """Route of a pooled exchange in two stages.

    Attributes:
        received: Lookups of the samples of this device's peers in the tables of its host.
        within: Route of these among the devices of the host.
    """

    received: BagsRoute
    within: PooledRoute

    @property
    def demand(self) -> Float[Array, "..."]:
        """`PooledRoute.demand` among the devices of the host."""
        return self.within.demand


def _features_of_hosts(placed: PlacedGroup, request: Request, channel: Channel) -> OwnerFeatures:
    return OwnerFeatures.of_group(placed, request.layout, channel.within.size)


def _received_request(
    placed: PlacedGroup,
    owned: OwnerFeatures,
    received: BagsRoute,
    scales: Float[Array, " received"] | None,
) -> Request:
    """Return the lookups of peers as those of a batch, with their scales as weights."""
    num_rows = placed.group.num_rows
    layout, lookups = owned.received(num_rows), received_lookups(owned, received, num_rows)
    return Request(lookups, received.rows, received.lengths, scales, layout)


def _capacity_within(capacity: int, growth: float, hosts: int) -> int:
    """Return the space for ids in a message between two devices of a host.

    Args:
        capacity: The space in a message between two devices of all.
        growth: Lookups of a device's peers on its host, over its own.
        hosts: Number of hosts.
    """
    return math.ceil(capacity * growth * hosts)


def _of_host(gradient: RowGradients) -> RowGradients:
    """Return a gradient with the route within its host."""
    route = gradient.route
    return gradient if route is None else dataclasses.replace(gradient, route=route.within)
