"""Costs of the exchange that pools whole bags at the owner of a table."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrec.mesh.exchange import BAGS
from jaxrec.plan.costs.base import WORD, ExchangeCosts
from jaxrec.plan.costs.collectives import all_gather, all_to_all, reduce_scatter
from jaxrec.plan.load import Load
from jaxrec.plan.perf import Perf
from jaxrec.plan.workload import TableWorkload


@dataclasses.dataclass(frozen=True)
class BagsCosts(ExchangeCosts):
    """Costs of whole bags pooled by the one owner of a table.

    A device sends its ids to the owner, which it knows without a sort. The owner pools the bags
    and sends them home. Between two devices there is capacity for the ids and bags of the features
    on the fullest device, since all run one program. So `Load.ids` and `Load.bags` count positions
    at the owner, and all devices move the largest count.
    """

    exchange = BAGS

    def launch(self) -> Perf:
        gather, sort, update = self.topology.gather, self.topology.sort, self.topology.update
        return Perf(
            forward_compute=2 * gather.call,
            forward_exchange=2 * self.latency,
            backward_compute=sort.call + gather.call + update.call,
            backward_exchange=(self.gradient_passes + self.group.joins_columns) * self.latency,
        )

    def home(self, workload: TableWorkload) -> Perf:
        """Return ``copy(8 w b)`` in each pass.

        Where column shards of a row are updated as one, an all-reduce of a number for each of the
        ``D c`` lookups is added; the column shards share it.
        """
        joined = 0.0
        if self.group.joins_columns:
            lookups = self.topology.num_devices * workload.capacity
            bytes = WORD * lookups * self.group.width / self.group.whole_width
            joined = reduce_scatter(bytes, self.topology) + all_gather(bytes, self.topology)
        copies = 2 * self.pool(workload)
        return Perf(forward_compute=copies, backward_compute=copies, backward_exchange=joined)

    def load(self, workload: TableWorkload, rows: np.ndarray, *, is_cache: bool = False) -> Load:
        """Return the load with ``D c`` positions for ids and ``D b`` bags at the owner."""
        load, devices = super().load(workload, rows, is_cache=is_cache), self.topology.num_devices
        load.ids[:] = devices * workload.capacity
        load.bags[:] = devices * workload.bags
        return load

    def perf(self, load: Load) -> Perf:
        """Return the seconds of a load, with those of positions for ids and of bags.

        A position for an id takes ``all_to_all(4)`` forward, 4 bytes more with a weight, and
        ``sort(1)`` backward, again for clipping and for joined columns. A bag takes ``copy(4 w)``
        in each pass, ``all_to_all(4 + 4 w)`` forward and ``all_to_all(4 w)`` backward.
        """
        copy = self.topology.copy.byte * self.group.gradient_bytes
        sorts = self.gradient_passes + self.group.joins_columns
        id_bytes = WORD + WORD * self.group.is_weighted
        of_id = Perf(
            forward_exchange=all_to_all(id_bytes, self.topology),
            backward_compute=sorts * self.topology.sort.item,
        )
        of_bag = Perf(
            forward_compute=copy,
            forward_exchange=all_to_all(WORD + self.group.sent_bag_bytes, self.topology),
            backward_compute=copy,
            backward_exchange=all_to_all(self.group.sent_gradient_bytes, self.topology),
        )
        return super().perf(load) + of_id * load.ids + of_bag * load.bags

    def temporary_bytes(self, workload: TableWorkload) -> float:
        """Return ``32 c``."""
        return 32 * workload.capacity
