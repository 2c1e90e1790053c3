"""Seconds and bytes of each exchange, one class for each behind one interface.

Where this follows TorchRec's estimators and where it differs is in ``docs/planner.md``.
"""

from __future__ import annotations

from jaxrec.plan.costs import bags, local, pooled, rows  # noqa: F401 (each adds its costs)
from jaxrec.plan.costs.base import COSTS, ExchangeCosts, Group, forward_costs
from jaxrec.plan.topology import Topology


def make_costs(group: Group, topology: Topology) -> ExchangeCosts:
    """Return the costs of a group's exchange on the given devices, at the speed of the slowest."""
    if group.exchange not in COSTS:
        names = ", ".join(exchange.name for exchange in COSTS)
        raise ValueError(
            f"the planner has no costs for exchange {group.exchange.name!r}, only for {names}"
        )
    costs = COSTS[group.exchange]
    # Tables that are not trained, such as quantized ones, have no backward pass.
    if not group.optimizer.is_trained:
        costs = forward_costs(costs)
    return costs(group, topology.slowest)
