"""Costs of the exchanges of whole bags."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxrec.mesh.exchange import BAGS, DEFAULT_CAPACITY_FACTOR, POOLED_BY_HOST
from jaxrec.plan.costs.base import (
    WORD,
    ExchangeCosts,
    all_gather,
    all_to_all,
    latency,
    reduce_scatter,
)
from jaxrec.plan.quantities import Load, Perf
from jaxrec.plan.topology import Topology
from jaxrec.plan.workload import TableWorkload


@dataclasses.dataclass(frozen=True)
class BagsCosts(ExchangeCosts):
    """Costs of the exchange in which the one owner of a table pools whole bags.

    A device sends its ids to the owner, which it knows without a sort. The owner pools the bags
    and sends them to their samples' devices. `Load.ids` and `Load.bags` count positions of messages
    at the owner.
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
        """Return the seconds to copy a device's bags, ``copy(8 * width * bags)`` in each pass.

        Column shards of a row that are updated together also share an all-reduce of ``devices *
        capacity`` numbers, one for each position for an id.
        """
        joined = 0.0
        if self.group.joins_columns:
            lookups = self.topology.num_devices * workload.capacity
            bytes = WORD * lookups * self.group.width / self.group.whole_width
            joined = reduce_scatter(bytes, self.topology) + all_gather(bytes, self.topology)
        copies = 2 * self.pool(workload)
        return Perf(forward_compute=copies, backward_compute=copies, backward_exchange=joined)

    def load(self, workload: TableWorkload, rows: np.ndarray, *, is_cache: bool = False) -> Load:
        """Return the load of the owner, which receives the ids and bags of all devices.

        It has ``devices * capacity`` positions for ids and ``devices * bags`` bags.
        """
        load, devices = super().load(workload, rows, is_cache=is_cache), self.topology.num_devices
        # Between any two devices there is capacity for the ids and bags of the features on the
        # fullest device, since all devices run one program. So these are positions, not ids, and
        # all devices move the largest count.
        load.ids[:] = devices * workload.capacity
        load.bags[:] = devices * workload.bags
        return load

    def perf(self, load: Load) -> Perf:
        """Return the seconds of a load, with the time of positions for ids and of bags.

        A position for an id takes ``all_to_all(4)`` forward, 4 bytes more with a weight. Backward
        it takes ``sort(1)``, again for clipping and for joined columns. A bag takes ``copy(4 *
        width)`` in each pass, ``all_to_all(4 + 4 * width)`` forward and ``all_to_all(4 * width)``
        backward.
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


# Bytes of a position for an id on its way to the owner of its row, beside those as received.
_ROUTED_ID_BYTES = 32


@dataclasses.dataclass(frozen=True)
class PooledByHostCosts(ExchangeCosts):
    """Costs of the exchange in which the devices of a table's host pool bags for all hosts.

    A device sends its ids to one device of the table's host. That device sorts them by the owners
    of their rows, which pool them. A reduce-scatter within the host adds the owners' sums up, and
    bags travel between hosts to their samples' devices.
    """

    exchange = POOLED_BY_HOST

    @functools.cached_property
    def within(self) -> Topology:
        """Topology of the devices of one host."""
        return dataclasses.replace(self.topology, hosts=1)

    @functools.cached_property
    def between(self) -> Topology:
        """Topology of one device of each host."""
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
        """Return the seconds to copy a device's bags, ``copy(8 * width * bags)`` in each pass."""
        copies = 2 * self.pool(workload)
        return Perf(forward_compute=copies, backward_compute=copies)

    def load(self, workload: TableWorkload, rows: np.ndarray, *, is_cache: bool = False) -> Load:
        """Return the load of a device that pools for one device of each host.

        It holds ``hosts * capacity`` positions for ids and ``hosts * bags`` bags.
        """
        load, hosts = super().load(workload, rows, is_cache=is_cache), self.topology.hosts
        # Positions, as in `BagsCosts.load`, with capacity for the features of the fullest host. Ids
        # are taken to spread evenly over the host's devices.
        load.ids[:] = hosts * workload.capacity
        load.bags[:] = hosts * workload.bags
        return load

    def perf(self, load: Load) -> Perf:
        """Return the seconds of a load, with the time of positions for ids and of bags.

        A position for an id takes ``all_to_all(4)`` between hosts, 1.25 times as many bytes within
        the host, and ``sort(1)`` in each pass. A weight adds as many bytes forward, and 1.25 * 4
        within the host backward. With ``sums = 4 * width * devices_per_host`` a bag takes:

        - forward ``copy(2 * sums)``, within the host ``reduce_scatter(sums)`` and ``all_to_all(4 *
          devices_per_host)``, and between hosts ``all_to_all(4 + 4 * width)``;
        - backward ``copy(4 * width)``, ``all_to_all(4 * width)`` between hosts, and within the host
          ``all_gather(sums)``.
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
        """Return the bytes of a load, with more for ids and bags than `ExchangeCosts.bytes`.

        A position for an id has 32 bytes more, a bag ``(4 + 4 * width) * devices_per_host``.
        """
        sums = self.topology.devices_per_host * (WORD + self.group.gradient_bytes)
        return super().bytes(load) + _ROUTED_ID_BYTES * load.ids + sums * load.bags
