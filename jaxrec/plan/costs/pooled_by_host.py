"""Costs of the exchange that sums bags within a table's host and sends them between hosts."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxrec.mesh.exchange import DEFAULT_CAPACITY_FACTOR, POOLED_BY_HOST
from jaxrec.plan.costs.base import WORD, ExchangeCosts
from jaxrec.plan.costs.collectives import all_gather, all_to_all, latency
from jaxrec.plan.load import Load
from jaxrec.plan.perf import Perf
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWorkload

# Bytes of a position for an id on its way to the owner of its row, beside those as received.
_ROUTED_ID_BYTES = 32


@dataclasses.dataclass(frozen=True)
class PooledByHostCosts(ExchangeCosts):
    """Costs of bags pooled on a table's host, of ``h`` devices, for all ``H`` hosts.

    A device sends its ids to one device of the host. There they are sorted by their rows' owners,
    which pool them; a reduce-scatter within the host adds the owners' sums up, and bags travel home
    between hosts. As in `BagsCosts`, hosts have capacity for the features of the fullest one, so
    that `Load.ids` and `Load.bags` count positions, and all devices move the largest count. Ids are
    taken to spread evenly over the host's devices.
    """

    exchange = POOLED_BY_HOST

    @functools.cached_property
    def within(self) -> Topology:
        """The devices of one host."""
        return dataclasses.replace(self.topology, hosts=1)

    @functools.cached_property
    def between(self) -> Topology:
        """One device of each host."""
        return dataclasses.replace(self.topology, devices_per_host=1)

    def launch(self) -> Perf:
        gather, sort, update = self.topology.gather, self.topology.sort, self.topology.update
        within, between = latency(self.within), latency(self.between)
        return Perf(
            forward_compute=2 * sort.call + 2 * gather.call,
            forward_exchange=2 * within + 2 * between,
            backward_compute=sort.call + gather.call + update.call,
            backward_exchange=self.gradient_passes * within + between,
        )

    def home(self, workload: TableWorkload) -> Perf:
        """Return ``copy(8 w b)`` in each pass."""
        copies = 2 * self.pool(workload)
        return Perf(forward_compute=copies, backward_compute=copies)

    def load(self, workload: TableWorkload, rows: np.ndarray, *, is_cache: bool = False) -> Load:
        """Return the load with ``H c`` positions for ids and ``H b`` bags on each device."""
        load, hosts = super().load(workload, rows, is_cache=is_cache), self.topology.hosts
        load.ids[:] = hosts * workload.capacity
        load.bags[:] = hosts * workload.bags
        return load

    def perf(self, load: Load) -> Perf:
        """Return the seconds of a load, with those of positions for ids and of bags.

        A position for an id takes an ``all_to_all(4)`` between hosts, one of 1.25 x 4 bytes within
        the host, and ``sort(1)`` in each pass; a weight adds as many bytes, within the host in both
        passes. A bag takes ``copy(8 w h)`` and within the host a reduce-scatter of ``4 w h`` and an
        ``all_to_all(4 h)``, then ``all_to_all(4 + 4 w)`` between hosts. Backward it takes
        ``all_to_all(4 w)`` between hosts and an all-gather of ``4 w h`` within.
        """
        per_host, weight = self.topology.devices_per_host, WORD * self.group.is_weighted
        sums, bag = per_host * self.group.gradient_bytes, self.group.gradient_bytes
        sent = self.group.sent_gradient_bytes
        of_id = Perf(
            forward_compute=self.topology.sort.item,
            forward_exchange=all_to_all(WORD + weight, self.between)
            + DEFAULT_CAPACITY_FACTOR * all_to_all(WORD + weight, self.within),
            backward_compute=self.topology.sort.item,
            backward_exchange=DEFAULT_CAPACITY_FACTOR * all_to_all(weight, self.within),
        )
        of_bag = Perf(
            forward_compute=2 * self.topology.copy.byte * sums,
            forward_exchange=self.sum_at_home(per_host, self.within)
            + all_to_all(WORD * per_host, self.within)
            + all_to_all(WORD + self.group.sent_bag_bytes, self.between),
            backward_compute=self.topology.copy.byte * bag,
            backward_exchange=all_to_all(sent, self.between)
            + all_gather(per_host * sent, self.within),
        )
        return super().perf(load) + of_id * load.ids + of_bag * load.bags

    def bytes(self, load: Load) -> np.ndarray:
        """Return the bytes of a load, with 32 more for an id and ``(4 + 4 w) h`` for a bag."""
        sums = self.topology.devices_per_host * (WORD + self.group.gradient_bytes)
        return super().bytes(load) + _ROUTED_ID_BYTES * load.ids + sums * load.bags

    def temporary_bytes(self, workload: TableWorkload) -> float:
        """Return ``32 c``."""
        return 32 * workload.capacity
