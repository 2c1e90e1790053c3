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
    sum for each bag of all devices, ``D b`` sums. A reduce-scatter adds the owners' sums and leaves
    each bag on its sample's device. Backward, an all-gather brings the bags' gradients to every
    owner. `ExchangeCosts` defines the letters.
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
        """Return ``sort(c) + copy(8 w D b)`` and the collectives of bags.

        Forward these are an all-to-all of ``4 D b`` bytes for bag lengths and a reduce-scatter of
        ``4 w D b``, backward an all-gather of ``4 w D b``.
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
        """Return ``all_to_all(4)`` forward, for an id, and ``sort(1)`` backward.

        A weight adds ``all_to_all(4)`` to both. Where column shards of a row are updated as one,
        ``2 all_to_all(4) + sort(1)`` are added backward.
        """
        weight, joins = WORD * self.group.is_weighted, self.group.joins_columns
        return Perf(
            forward_exchange=all_to_all(WORD + weight, self.topology),
            backward_compute=(1 + joins) * self.topology.sort.item,
            backward_exchange=all_to_all(weight + 2 * joins * WORD, self.topology),
        )

    def round_capacity(self, workload: TableWorkload) -> float:
        """Return ``L = 1.25 c``, the positions for ids of all owners."""
        return DEFAULT_CAPACITY_FACTOR * workload.capacity

    def empty_positions(self, demand: float, capacity: float) -> tuple[float, float]:
        """Return ``D c - A`` twice for ``A > L`` ids, which take ``D c`` positions."""
        if demand <= capacity * (1 + 1e-9):
            return 0.0, 0.0
        # No further rounds here: a demand that exceeds one round takes the size that holds any
        # demand.
        empty = max(0.0, capacity / DEFAULT_CAPACITY_FACTOR * self.topology.num_devices - demand)
        return empty, empty

    def overflow_steps(self, rounds: float) -> list[float]:
        """Return ``D c / L`` rounds if one does not fit: ``D c`` positions hold all ids.

        ``L = 1.25 c`` are the positions of one round.
        """
        return [self.topology.num_devices / DEFAULT_CAPACITY_FACTOR] if rounds > 1 + 1e-9 else []

    def route_bytes(self, workload: TableWorkload) -> float:
        """Return ``13 c + 4 D b`` bytes."""
        lengths = 4 * self.topology.num_devices * workload.bags
        return (8 + 4 * DEFAULT_CAPACITY_FACTOR) * workload.capacity + lengths

    def temporary_bytes(self, workload: TableWorkload) -> float:
        """Return ``4 w D b + 24 L + 32 c`` bytes; ``L`` is `round_capacity`."""
        sums = self.topology.num_devices * workload.bags * self.group.gradient_bytes
        return sums + 24 * self.round_capacity(workload) + 32 * workload.capacity
