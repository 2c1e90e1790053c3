"""Seconds and bytes of each exchange, one class each behind one interface.

Where this follows TorchRec's estimators and where it differs is in ``docs/planner.md``.
"""

from __future__ import annotations

from jaxrec.mesh.exchange import Exchange
from jaxrec.plan.costs.alone import AloneCosts
from jaxrec.plan.costs.bags import BagsCosts
from jaxrec.plan.costs.base import ExchangeCosts, Group
from jaxrec.plan.costs.forward import ForwardCosts
from jaxrec.plan.costs.pooled import PooledCosts
from jaxrec.plan.costs.pooled_by_host import PooledByHostCosts
from jaxrec.plan.costs.replicated import ReplicatedCosts
from jaxrec.plan.costs.rows import RowsCosts
from jaxrec.plan.topology import Topology

_COSTS: dict[Exchange, type[ExchangeCosts]] = {
    costs.exchange: costs
    for costs in (RowsCosts, PooledCosts, PooledByHostCosts, BagsCosts, ReplicatedCosts, AloneCosts)
}


def make_costs(group: Group, topology: Topology) -> ExchangeCosts:
    """Return the costs of a group's exchange on the given devices.

    Tables that are not trained, such as quantized ones, have no backward pass. Where devices
    differ, the costs are those of the slowest.

    Raises:
        ValueError: If the planner does not know the exchange.
    """
    if group.exchange not in _COSTS:
        names = ", ".join(exchange.name for exchange in _COSTS)
        raise ValueError(
            f"the planner has no costs for exchange {group.exchange.name!r}, only for {names}"
        )
    topology = topology.slowest
    costs = _COSTS[group.exchange](group, topology)
    return costs if group.optimizer.is_trained else ForwardCosts(group, topology, costs)
