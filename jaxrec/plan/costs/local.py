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
        """Return the seconds of a table's lookups, gradients and updates.

        Forward they are ``gather(lookups, row bytes) + copy(4 * width * bags)``. Backward:

        1. Gradients are summed by row, with a sort to number the rows and one for the sum:
           ``2 * sort(capacity) + gather(lookups, 4 * width) + copy(4 * width * capacity)``.
        2. An all-gather of ``devices * capacity * (4 + 4 * width)`` bytes brings every device the
           sums of all.
        3. Each device adds up these sums in ``sort(devices * capacity) + gather(sums, 4 * width)``.
           It takes `packed_update` for each sum and `update` for each distinct row. The ``sums``
           are the distinct rows of each device, added up over devices.

        Max pooling adds `spread` backward.
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
            + workload.distinct(devices) * self.update
            + self.spread(workload),
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
        """Return the bytes of gradients summed by row: a device's own, and those of all devices.

        A device's own take ``capacity * (4 * width + 32)``.
        """
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
        """Return the seconds to write pooled bags forward, and to sort row numbers backward.

        They are ``copy(4 * width * bags)`` and ``sort(capacity)``, the latter twice where a table's
        gradient norm is clipped. Max pooling adds `spread` backward.
        """
        sorts = self.gradient_passes * workload.capacity
        return Perf(
            forward_compute=self.pool(workload),
            backward_compute=sorts * self.topology.sort.item + self.spread(workload),
        )
