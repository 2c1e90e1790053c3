"""One plan for all processes of a job: process 0 searches, and the others receive its plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from jaxrec.mesh.agree import gather_texts, on_process_zero, require_same
from jaxrec.plan.model_tables import ModelTables
from jaxrec.plan.plan import ShardingPlan
from jaxrec.plan.shortage import PlanError
from jaxrec.plan.topology import Topology

# Errors that all processes raise alike, the narrowest first.
_ERRORS = (PlanError, ValueError)


def with_least_memory(topology: Topology) -> Topology:
    """Return a topology with the memory of the process that has the least.

    Every process calls this. Arrays have equal parts on all devices.
    """
    if jax.process_count() == 1:
        return topology
    least = min(map(int, gather_texts(str(topology.memory))))
    return dataclasses.replace(topology, memory=least, device_memory=())


def plan_once(
    search: Callable[[], ShardingPlan], tables: ModelTables, batch_size: int
) -> ShardingPlan:
    """Return the plan that process 0 finds; every process calls this.

    A search with a time limit may end elsewhere in each process, and sampled statistics and
    calibrated devices differ.

    Args:
        search: Finds the plan.
        tables: The tables.
        batch_size: Samples of all devices in a step.

    Raises:
        PlanError: Process 0 found no plan that fits.
        ValueError: Constraints do not fit the tables or the devices, or processes plan different
            tables.
        RuntimeError: Another error of process 0, which raises the error itself.
    """
    if jax.process_count() == 1:
        return search()
    facts = {
        f"table {table.name!r}": f"{table.num_embeddings} x {table.embedding_dim} {table.dtype}"
        for _, layout, _ in tables.collections
        for table in layout.configs
    }
    require_same("model to plan", {"batch_size": str(batch_size)} | facts)
    return ShardingPlan.from_json(on_process_zero(lambda: search().to_json(), _ERRORS))
