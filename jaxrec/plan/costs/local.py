"""Costs of lookups that read a device's own rows: of replicated tables, and of one device."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrec.mesh.exchange import ALONE, REPLICATED
from jaxrec.plan.costs.base import WORD, ExchangeCosts, all_gather
from jaxrec.plan.quantities import Load, Perf
from jaxrec.plan.workload import TableWorkload


@dataclasses.dataclass(frozen=True)
class ReplicatedCosts(ExchangeCosts):
    """Costs of lookups in replicated tables, and of the same update on every device."""

    exchange = REPLICATED

    def launch(self) -> Perf:
        gather, sort, update = self.topology.gather, self.topology.sort, self.topology.update
        return Perf(
            forward_compute=gather.call,
            backward_compute=3 * sort.call + 2 * gather.call + update.call,
            backward_exchange=2 * self.latency,
        )

    def home(self, workload: TableWorkload) -> Perf:
        """Return ``gather(n, w s) + copy(4 w b)`` forward, and backward the sum of three steps.

        1. Gradients are summed by row, with a sort to number the rows and one for the sum:
           ``2 sort(c) + gather(n, 4 w) + copy(4 w c)``.
        2. An all-gather of ``D c (4 + 4 w)`` bytes brings every device all sums.
        3. Each device updates ``U`` rows: ``sort(D c) + gather(D u, 4 w) + update(U, w s + m)``,
           and `packed_update` for each of ``D u`` rows.
        """
        capacity, lookups = workload.capacity, workload.lookups
        devices, gradient = self.topology.num_devices, self.group.gradient_bytes
        sent = WORD + self.group.sent_gradient_bytes
        return Perf(
            forward_compute=lookups * self.gather(self.group.row_bytes) + self.pool(workload),
            backward_compute=(2 + devices) * capacity * self.topology.sort.item
            + self.topology.copy.byte * capacity * gradient
            + (lookups + devices * workload.distinct()) * self.gather(gradient)
            + devices * workload.distinct() * self.packed_update
            + workload.distinct(devices) * self.update,
            backward_exchange=all_gather(devices * capacity * sent, self.topology),
        )

    def load(self, workload: TableWorkload, rows: np.ndarray, *, is_cache: bool = False) -> Load:
        # Held rows alone: all other work is the same on every device, and `home` counts it.
        load = Load.zeros(len(rows))
        load.held[:] = rows
        return load

    def perf(self, load: Load) -> Perf:
        # No seconds, in the shape of the load.
        return Perf(prefetch=0.0 * load.held)

    def temporary_bytes(self, workload: TableWorkload) -> float:
        """Return ``c (4 w + 32) (1 + D)``, for a device's own sums and those of all devices."""
        sums = workload.capacity * (self.group.gradient_bytes + 32)
        return sums + self.topology.num_devices * sums


@dataclasses.dataclass(frozen=True)
class AloneCosts(ExchangeCosts):
    """Costs of lookups and updates on a single device."""

    exchange = ALONE

    def launch(self) -> Perf:
        gather, sort, update = self.topology.gather, self.topology.sort, self.topology.update
        return Perf(
            forward_compute=gather.call, backward_compute=sort.call + gather.call + update.call
        )

    def home(self, workload: TableWorkload) -> Perf:
        """Return ``copy(4 w b)`` forward, and ``sort(c)`` backward, again for clipping."""
        sorts = self.gradient_passes * workload.capacity
        return Perf(
            forward_compute=self.pool(workload), backward_compute=sorts * self.topology.sort.item
        )

    def temporary_bytes(self, workload: TableWorkload) -> float:
        """Return ``32 c`` bytes: eight arrays of int32 row numbers."""
        return 32 * workload.capacity
