"""The exchange of replicated tables: rows are on every device, and gradients are gathered."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from jaxrec.embed import kernels
from jaxrec.embed.kernels import BAD_ROW, Lookups
from jaxrec.mesh.exchange.alone import Alone
from jaxrec.mesh.exchange.base import Cut


@dataclasses.dataclass(frozen=True)
class Replicated(Alone):
    """Lookups of a device's own rows, and an update by all devices' gathered gradients."""

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
        # A bad id sorts behind all rows, and its gradient must not be added to padding's.
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
        # All devices find the same squares; those of the first count.
        squares = super().squares(placed, gradient, channel, capacity)
        return jnp.where(channel.index == 0, squares, 0)
