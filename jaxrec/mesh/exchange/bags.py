"""The exchange of bags: ids travel to tables that lie whole on a device, whole bags travel back.

A bag's feature says on which device it is pooled, so nothing is sorted or counted: all destinations
are known when the program is compiled. Each device sends the ids of a feature to the owner of its
table, which pools them and sends the bags back; their gradients travel the same way.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp

from jaxrec.embed import kernels
from jaxrec.embed.outputs import pool
from jaxrec.mesh.exchange.base import Cut, Exchange, constant, update_owned
from jaxrec.mesh.exchange.column_slices import sums_of_bags, update_slices
from jaxrec.mesh.exchange.owner_features import (
    OwnerFeatures,
    received_lookups,
    send_bag_gradients,
    send_bags,
    send_lookups,
    send_scales,
)


@dataclasses.dataclass(frozen=True)
class Bags(Exchange):
    """Ids travel to whole tables, and pooled bags come back."""

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
