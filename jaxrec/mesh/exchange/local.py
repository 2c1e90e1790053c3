"""Exchanges of lookups that read the device's own rows: one device, and replicated tables."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from jaxrec.embed import kernels
from jaxrec.embed.kernels import BAD_ROW, Lookups
from jaxrec.embed.outputs import pool_lookups
from jaxrec.mesh.exchange.base import Cut, Exchange


@dataclasses.dataclass(frozen=True)
class Alone(Exchange):
    """Exchange on a mesh of one device, which looks up and updates its own rows."""

    # Placements do not name this exchange. On a mesh of one device `choose_exchange` takes it
    # instead of "rows", "pooled" and "bags", which would sort ids by owner for nothing.

    name: ClassVar[str] = "alone"
    pools_max: ClassVar[bool] = True

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
        lookups, is_trained = request.scaled_lookups, placed.is_trained
        return pool_lookups(
            table, ids, lengths, weights, request.layout, dtype, lookups, is_trained
        )

    def rows(self, placed, table, request, route, channel):
        return kernels.row_lookup(table, request.lookups.rows)

    def owned_gradients(self, placed, gradient, channel, capacity):
        return gradient

    def update(self, placed, table, state, gradient, step, channel, capacity):
        optimizer, starts = placed.group.optimizer.of_batch, placed.group.row_offsets
        rows = gradient.rows_to_write(gradient.lookups.rows, placed.local_rows)
        lookups = dataclasses.replace(gradient.lookups, rows=rows)
        return kernels.fused_update(table, state, lookups, gradient.values, optimizer, step, starts)


@dataclasses.dataclass(frozen=True)
class Replicated(Alone):
    """Exchange of replicated tables: lookups are local, and gradients go to all devices."""

    name: ClassVar[str] = "replicated"
    is_replicated: ClassVar[bool] = True

    def refuse(self, cut: Cut) -> str | None:
        if cut.column_parts * cut.row_parts > 1:
            return "it is cut, and replicated tables lie whole on every device"
        return None

    def traffic(self, work):
        return {"all-gather": work.devices * work.lookups * (4 + 4 * work.dim)}

    def owned_gradients(self, placed, gradient, channel, capacity):
        lookups, num_slots = gradient.lookups, placed.num_slots
        # Gradients of a row are summed before they travel. All devices then sum the same list in
        # the same order, so their rows stay equal to the bit.
        # A bad id sorts behind all rows. Its gradient must not be added to padding's.
        is_row = (lookups.rows >= 0) & (lookups.rows < num_slots)
        runs = kernels.build_runs(lookups.rows, num_slots)
        by_run = dataclasses.replace(lookups, rows=jnp.where(is_row, runs.inverse, BAD_ROW))
        clip_value = placed.group.optimizer.clip_value
        sums = kernels.sum_rows(by_run, gradient.values, runs.unique.size, clip_value)
        slots = Lookups(channel.gather(runs.unique), None, None)
        return dataclasses.replace(gradient, lookups=slots, values=channel.gather_gradients(sums))

    def update(self, placed, table, state, gradient, step, channel, capacity):
        owned = self.owned_gradients(placed, gradient, channel, capacity)
        optimizer = dataclasses.replace(placed.group.optimizer.of_batch, clip_value=None)
        slots = gradient.rows_to_write(owned.lookups.rows, placed.num_slots)
        lookups, starts = Lookups(slots, None, None), placed.group.row_offsets
        return kernels.fused_update(table, state, lookups, owned.values, optimizer, step, starts)

    def squares(self, placed, gradient, channel, capacity):
        # All devices have the same squares, and the caller adds them over devices.
        squares = super().squares(placed, gradient, channel, capacity)
        return jnp.where(channel.index == 0, squares, 0)
