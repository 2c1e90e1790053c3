"""The devices of a run, and how models and batches get there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxrec.arguments import ConfigError
from jaxrec.embed.config import TableConfig
from jaxrec.mesh import shard, shard_batch
from jaxrec.plan import Planner, ShardingPlan, Topology

# Seconds that the search for a plan may take.
PLAN_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Devices:
    """One device, or a mesh of several.

    Attributes:
        mesh: The devices; None: the first.
        plan: Where tables go on the mesh.
    """

    mesh: Mesh | None = None
    plan: ShardingPlan | None = None

    def put_model(self, model: nnx.Module) -> None:
        """Moves the model there."""
        if self.mesh is not None and self.plan is not None:
            shard(model, self.plan, self.mesh)

    def put_batch(self, batch: Any) -> Any:
        """Puts a host batch there."""
        return jax.device_put(batch) if self.mesh is None else shard_batch(batch, self.mesh)


def simulate_cpus(count: int) -> None:
    """Makes a CPU that many devices, if JAX has not begun; of no effect elsewhere."""
    if count > 1:
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            return  # JAX has begun; `plan_devices` says if there are too few


def plan_devices(count: int, tables: Sequence[TableConfig], batch_size: int) -> Devices:
    """That many devices, with the fastest plan for the tables.

    Raises:
        ConfigError: There are not so many, or the batch does not divide by them.
        PlanError: The tables do not fit.
    """
    if count == 1:
        return Devices()
    found = jax.devices()
    if count > len(found):
        raise ConfigError(f"devices is {count}, but there are {len(found)} ({found[0].platform})")
    if batch_size % count:
        raise ConfigError(
            f"data.batch-size is {batch_size}, which does not divide by {count} devices"
        )
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((count,), ("data",), axis_types, devices=found[:count])
    planner = Planner(Topology.from_mesh(mesh), time_limit=PLAN_SECONDS)
    return Devices(mesh, planner.plan(tables, batch_size=batch_size))
