"""Costs of the exchange that sends distinct rows to the samples."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxrec.mesh.exchange import DEFAULT_CAPACITY_FACTOR, ROWS
from jaxrec.plan.costs.base import WORD, ExchangeCosts, all_to_all
from jaxrec.plan.quantities import Perf
from jaxrec.plan.workload import TableWorkload


@dataclasses.dataclass(frozen=True)
class RowsCosts(ExchangeCosts):
    """Costs of the exchange that sends distinct rows to the devices of the samples.

    A device drops repeated ids, requests rows from their owners, and pools the rows that it gets.
    Backward, it sums gradients by row and sends the sums to the owners. A round has positions for
    ``1.25 * capacity / devices`` rows from one device to another; rows that do not fit take more
    rounds.
    """

    exchange = ROWS

    def launch(self) -> Perf:
        gather, sort, update = self.topology.gather, self.topology.sort, self.topology.update
        return Perf(
            forward_compute=sort.call + 3 * gather.call,
            forward_exchange=2 * self.latency,
            backward_compute=2 * sort.call + 3 * gather.call + update.call,
            backward_exchange=self.gradient_passes * self.latency,
        )

    def home(self, workload: TableWorkload) -> Perf:
        """Return the seconds to drop repeated ids and pool rows, and to sum gradients by row.

        Forward they are ``sort(capacity) + gather(lookups, row bytes) + copy(4 * width * bags)``,
        backward ``sort(capacity) + gather(lookups, 4 * width)``, and with max pooling `spread`.
        """
        sort = self.topology.sort.item * workload.capacity
        return Perf(
            forward_compute=sort
            + workload.lookups * self.gather(self.group.row_bytes)
            + self.pool(workload),
            backward_compute=sort
            + workload.lookups * self.gather(self.group.gradient_bytes)
            + self.spread(workload),
        )

    def position(self) -> Perf:
        """Return the seconds of a request and its row forward, and of a gradient backward.

        Forward they are ``all_to_all(4 + row bytes) + copy(row bytes)``, backward ``all_to_all(4 *
        width) + copy(4 * width) + sort(1)``. Gradients travel twice where a table's norm is
        clipped. Where column shards of a row are updated as one, ``2 * all_to_all(4) + sort(1)``
        are added backward.
        """
        copy, sort = self.topology.copy.byte, self.topology.sort.item
        row, gradient = self.group.looked_up_bytes, self.group.gradient_bytes
        sent = self.group.sent_gradient_bytes
        position = Perf(
            forward_compute=copy * row,
            forward_exchange=all_to_all(WORD + self.group.sent_row_bytes, self.topology),
            backward_compute=self.gradient_passes * copy * gradient + sort,
            backward_exchange=self.gradient_passes * all_to_all(sent, self.topology),
        )
        if self.group.joins_columns:
            position += Perf(
                backward_compute=sort, backward_exchange=2 * all_to_all(WORD, self.topology)
            )
        return position

    def shares(self, workload: TableWorkload, rows: np.ndarray) -> np.ndarray:
        # Repeats travel once, so hot rows weigh no more than others.
        return workload.shares(rows, of_rows=True)

    def exchanged_rows(self, workload: TableWorkload) -> float:
        """Return the distinct rows of each device, added up: each device requests a row once."""
        return self.topology.num_devices * workload.distinct()

    def round_capacity(self, workload: TableWorkload) -> float:
        """Return ``1.25 * capacity``, the positions for rows of all owners in one round."""
        return DEFAULT_CAPACITY_FACTOR * workload.capacity

    def empty_positions(self, demand: float, capacity: float) -> tuple[float, float]:
        """Return the positions moved without a row, forward and backward, if one round overflows.

        With ``rounds = ceil(demand / capacity)`` they are ``(1 + rounds) * capacity - demand`` and
        ``rounds * capacity - demand``.
        """
        # Demands and capacities are sums that the search adds to and subtracts from. Their rounding
        # must not cost a round.
        if demand <= capacity * (1 + 1e-9):
            return 0.0, 0.0
        rounds = math.ceil(demand / capacity - 1e-9)
        # An exchange that overflows starts over forward, after a first round in vain.
        return (1 + rounds) * capacity - demand, rounds * capacity - demand

    def overflow_steps(self, rounds: float) -> list[float]:
        """Return the rounds that run after each overflow: ``[2, 3, 4]`` if ``rounds`` is 3.2."""
        return [float(count) for count in range(2, math.ceil(rounds - 1e-9) + 1)]

    def route_bytes(self, workload: TableWorkload) -> float:
        """Return the bytes of a table's route, ``17 * capacity``."""
        return (12 + 4 * DEFAULT_CAPACITY_FACTOR) * workload.capacity

    def temporary_bytes(self, workload: TableWorkload) -> float:
        """Return the bytes of rows on their samples' device and in messages.

        They are ``2 * capacity * (4 * width + 32) + 2 * round_capacity * (4 * width + 4)``.
        """
        gradient = self.group.gradient_bytes
        rows = 2 * workload.capacity * (gradient + 32)
        return rows + 2 * self.round_capacity(workload) * (gradient + WORD)
