"""Costs of tables that are looked up and never updated."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrec.plan.costs.base import ExchangeCosts, Load
from jaxrec.plan.perf import Perf
from jaxrec.plan.workload import TableWorkload


@dataclasses.dataclass(frozen=True)
class ForwardCosts(ExchangeCosts):
    """Costs of frozen and of quantized tables: those of an exchange without its backward pass.

    Arrays of the backward pass are counted nevertheless, since a model may train other tables.

    Attributes:
        whole: Costs of both passes.
    """

    whole: ExchangeCosts

    def launch(self) -> Perf:
        """Return the seconds to start the lookups."""
        return _forward(self.whole.launch())

    def home(self, workload: TableWorkload) -> Perf:
        """Return the seconds of the forward pass."""
        return _forward(self.whole.home(workload))

    def position(self) -> Perf:
        """Return the seconds of a position forward."""
        return _forward(self.whole.position())

    def perf(self, load: Load) -> Perf:
        """Return the seconds of a load forward."""
        return _forward(self.whole.perf(load))

    def load(self, workload: TableWorkload, rows: np.ndarray, *, is_cache: bool = False) -> Load:
        """Return the load of the whole step."""
        return self.whole.load(workload, rows, is_cache=is_cache)

    def temporary_bytes(self, workload: TableWorkload) -> float:
        """Return the bytes of the whole step."""
        return self.whole.temporary_bytes(workload)

    def route_bytes(self, workload: TableWorkload) -> float:
        """Return the bytes of the route."""
        return self.whole.route_bytes(workload)

    def round_capacity(self, workload: TableWorkload) -> float:
        """Return the positions of one round."""
        return self.whole.round_capacity(workload)

    def empty_positions(self, demand: float, capacity: float) -> tuple[float, float]:
        """Return the positions without a row; those backward cost nothing."""
        return self.whole.empty_positions(demand, capacity)

    def overflow_steps(self, rounds: float) -> list[float]:
        """Return the demands up to which overflowing rows take the same positions."""
        return self.whole.overflow_steps(rounds)


def _forward(perf: Perf) -> Perf:
    """Return the seconds without those of the backward pass, which are 0 times what they were."""
    return Perf(
        perf.forward_compute,
        perf.forward_exchange,
        0.0 * perf.backward_compute,
        0.0 * perf.backward_exchange,
        perf.prefetch,
    )
