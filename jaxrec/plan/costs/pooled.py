"""Costs of the exchange that pools at the owners of rows and adds up their parts of each bag."""

from __future__ import annotations

import dataclasses

from jaxrec.mesh.exchange import DEFAULT_CAPACITY_FACTOR, POOLED
from jaxrec.plan.costs.base import WORD, ExchangeCosts, all_gather, all_to_all
from jaxrec.plan.quantities import Perf
from jaxrec.plan.workload import TableWorkload


@dataclasses.dataclass(frozen=True)
class PooledCosts(ExchangeCosts):
    """Costs of the pooled exchange, where each owner sums its own rows of every bag.

    A device sends all its ids, repeated ones too, to the owners of their rows. An owner makes one
    sum for each bag of all devices. A reduce-scatter adds the owners' sums and leaves each bag on
    its sample's device. Backward, an all-gather brings the bags' gradients to every owner.
    """

    exchange = POOLED

    def launch(self) -> Perf:
        gather, sort, update = self.topology.gather, self.topology.sort, self.topology.update
        return Perf(
            forward_compute=2 * sort.call + 2 * gather.call,
            forward_exchange=2 * self.latency,
            backward_compute=sort.call + gather.call + update.call,
            backward_exchange=self.gradient_passes * self.latency,
        )

    def home(self, workload: TableWorkload) -> Perf:
        """Return the seconds to sort ids, and to copy and exchange the sums of all devices' bags.

        These sums have ``sums = 4 * width * bags * devices`` bytes. Forward it takes
        ``sort(capacity) + copy(2 * sums) + reduce_scatter(sums)`` and, for the lengths of bags,
        ``all_to_all(4 * bags * devices)``. Backward it takes ``all_gather(sums)``.
        """
        bags = self.topology.num_devices * workload.bags
        bytes = bags * self.group.gradient_bytes
        return Perf(
            forward_compute=workload.capacity * self.topology.sort.item
            + 2 * self.topology.copy.byte * bytes,
            forward_exchange=self.sum_at_home(bags, self.topology)
            + all_to_all(WORD * bags, self.topology),
            backward_exchange=all_gather(bags * self.group.sent_gradient_bytes, self.topology),
        )

    def position(self) -> Perf:
        """Return the seconds to send an id and, backward, to sort its row number.

        They are ``all_to_all(4)`` forward and ``sort(1)`` backward. A weight adds ``all_to_all(4)``
        to both. Where column shards of a row are updated as one, ``2 * all_to_all(4) + sort(1)``
        are added backward.
        """
        weight, joins = WORD * self.group.is_weighted, self.group.joins_columns
        return Perf(
            forward_exchange=all_to_all(WORD + weight, self.topology),
            backward_compute=(1 + joins) * self.topology.sort.item,
            backward_exchange=all_to_all(weight + 2 * joins * WORD, self.topology),
        )

    def round_capacity(self, workload: TableWorkload) -> float:
        """Return ``1.25 * capacity``, the positions for ids of all owners in one round."""
        return DEFAULT_CAPACITY_FACTOR * workload.capacity

    def empty_positions(self, demand: float, capacity: float) -> tuple[float, float]:
        """Return the positions moved without an id, forward and backward, if one round overflows.

        The exchange is then repeated with ``capacity / 1.25 * devices`` positions, which hold any
        demand.
        """
        if demand <= capacity * (1 + 1e-9):
            return 0.0, 0.0
        empty = max(0.0, capacity / DEFAULT_CAPACITY_FACTOR * self.topology.num_devices - demand)
        return empty, empty

    def overflow_steps(self, rounds: float) -> list[float]:
        """Return the rows that fit after an overflow, in units of a round's: ``[devices / 1.25]``.

        A round has 1.25 times as many positions as a device has for its ids, and the positions for
        the ids of all devices hold any demand. The list is empty if one round is enough.
        """
        return [self.topology.num_devices / DEFAULT_CAPACITY_FACTOR] if rounds > 1 + 1e-9 else []

    def route_bytes(self, workload: TableWorkload) -> float:
        """Return the bytes of a table's route, ``13 * capacity + 4 * bags * devices``."""
        lengths = 4 * self.topology.num_devices * workload.bags
        return (8 + 4 * DEFAULT_CAPACITY_FACTOR) * workload.capacity + lengths

    def temporary_bytes(self, workload: TableWorkload) -> float:
        """Return the bytes of the sums of all devices' bags, of messages, and of row numbers.

        They are ``4 * width * bags * devices + 24 * round_capacity + 32 * capacity``.
        """
        sums = self.topology.num_devices * workload.bags * self.group.gradient_bytes
        messages = 24 * self.round_capacity(workload)
        return sums + messages + super().temporary_bytes(workload)
