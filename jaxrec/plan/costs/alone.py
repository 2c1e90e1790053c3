"""Costs of tables on a mesh of one device."""

from __future__ import annotations

import dataclasses

from jaxrec.mesh.exchange import ALONE
from jaxrec.plan.costs.base import ExchangeCosts
from jaxrec.plan.perf import Perf
from jaxrec.plan.workload import TableWorkload


@dataclasses.dataclass(frozen=True)
class AloneCosts(ExchangeCosts):
    """Costs of a lookup and an update without exchange."""

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
        """Return ``32 c``."""
        return 32 * workload.capacity
