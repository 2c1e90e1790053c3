"""The exchange of a mesh of one device: nothing travels."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxrec.embed import kernels
from jaxrec.embed.outputs import pool
from jaxrec.mesh.exchange.base import Cut, Exchange


@dataclasses.dataclass(frozen=True)
class Alone(Exchange):
    """Lookups and updates of a device's own rows, by the same kernels as tables without a mesh.

    Placements do not name this exchange: `choose_exchange` puts it in the place of "rows", "pooled"
    and "bags" where the mesh has one device.
    """

    name: ClassVar[str] = "alone"

    def refuse(self, cut: Cut) -> str | None:
        if not cut.is_alone:
            return "the mesh has several devices"
        if cut.column_parts > 1:
            return "its columns are cut"
        return None

    def traffic(self, work):
        return {}

    def route(self, placed, request, channel, capacity):
        return None

    def pool(self, placed, table, request, route, channel, dtype):
        ids, lengths, weights = request.ids, request.lengths, request.weights
        pooled = pool(table, ids, lengths, weights, request.layout, dtype)
        return pooled, request.scaled_lookups

    def rows(self, placed, table, request, route, channel):
        return kernels.row_lookup(table, request.lookups.rows)

    def owned_gradients(self, placed, gradient, channel, capacity):
        return gradient

    def update(self, placed, table, state, gradient, step, channel, capacity):
        optimizer, starts = placed.group.optimizer.of_batch, placed.group.row_offsets
        rows = gradient.rows_to_write(gradient.lookups.rows, placed.local_rows)
        lookups = dataclasses.replace(gradient.lookups, rows=rows)
        return kernels.fused_update(table, state, lookups, gradient.values, optimizer, step, starts)
