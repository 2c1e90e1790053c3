"""The devices of a run: one device, or a mesh with a plan for the tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxrec.arguments import ConfigError
from jaxrec.data import DataError, TableEncoder
from jaxrec.embed.config import TableConfig
from jaxrec.mesh import shard, shard_batch
from jaxrec.mesh.dense import DenseName
from jaxrec.plan import Fingerprint, Planner, ShardingPlan, Topology
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.ragged.capacity import capacity_for
from jaxrec.train.placed_batches import put_batch
from jaxrec.train.requests import RequestBatch

Model = TypeVar("Model", bound=nnx.Module)

# Time limit of the planner in seconds.
PLAN_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Devices:
    """One device, or a mesh of several devices with a sharding plan.

    ``encoder`` knows the lengths of lists; None: a sample has at most one id of each feature.
    ``dense`` says where dense layers lie.
    """

    mesh: Mesh | None = None
    plan: ShardingPlan | None = None
    encoder: TableEncoder | None = None
    dense: DenseName = "replicated"

    def make_model(self, make: Callable[[], Model]) -> Model:
        """Make a model on the devices."""
        if self.mesh is None or self.plan is None:
            return make()
        return shard(make, self.plan, self.mesh, dense=self.dense)

    def changes_since(self, saved: str) -> list[str]:
        """Return what differs from the plan in a checkpoint; see `ShardingPlan.changes_since`."""
        if self.plan is not None:
            return self.plan.changes_since(saved)
        one = dataclasses.replace(Fingerprint.of(None), machine="one device, without a plan")
        fingerprint = Fingerprint.read(saved)
        return [] if fingerprint is None else fingerprint.differences(one)

    def put_batch(self, batch: Any) -> Any:
        """Put a host batch on the devices; each of several processes puts its own part.

        The ids are ``batch.features``.
        """
        if self.mesh is None:
            return put_batch(batch)
        if isinstance(batch, RequestBatch):
            capacities: dict[str, int] | None = batch.capacities_of(len(self.mesh.local_devices))
        else:
            capacities = self._capacities(self.mesh, batch.features)
        return shard_batch(batch, self.mesh, capacities=capacities)

    def _capacities(self, mesh: Mesh, features: KeyedJaggedArray) -> dict[str, int] | None:
        """Return each key's capacity on one device; None: the packer of the batch chooses it."""
        devices = len(mesh.local_devices)
        samples = features.batch_size // devices
        if self.encoder is None:
            return dict.fromkeys(features.keys, capacity_for(samples))
        if jax.process_count() == 1:
            return None
        # With known capacities, `shard_batch` exchanges nothing among processes.
        capacities = self.encoder.capacities(samples, certain=True)
        lengths = np.asarray(features.lengths).reshape(len(features.keys), devices, samples)
        for key, demand in zip(
            features.keys, lengths.sum(axis=2).max(axis=1).tolist(), strict=True
        ):
            if demand > capacities[key]:
                raise DataError(
                    f"column {key!r} has {demand} ids in a batch on one device, more than its rows "
                    "had when the run began; use one process, or begin a new run with them"
                )
        return capacities


def simulate_cpus(count: int) -> None:
    """Simulate ``count`` devices on a CPU, unless JAX has already started."""
    if count > 1:
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            return  # initialized; `plan_devices` reports too few devices


def plan_devices(count: int, tables: Sequence[TableConfig], batch_size: int) -> Devices:
    """Plan the tables for ``count`` devices of each process; one device needs no plan."""
    processes = jax.process_count()
    total = processes * count
    if total == 1:
        return Devices()
    here = jax.local_devices()
    if count > len(here):
        raise ConfigError(f"devices is {count}, but there are {len(here)} ({here[0].platform})")
    if batch_size % total:
        raise ConfigError(
            f"data.batch-size is {batch_size}, which does not divide by {total} devices"
        )
    mesh = _mesh(processes, count)
    planner = Planner(Topology.from_mesh(mesh), time_limit=PLAN_SECONDS)
    return Devices(mesh, planner.plan(tables, batch_size=batch_size))


def _mesh(processes: int, count: int) -> Mesh:
    """Make a mesh of ``count`` devices of each process."""
    devices = [
        device
        for process in range(processes)
        for device in [d for d in jax.devices() if d.process_index == process][:count]
    ]
    # The planner takes a process for a host. One host, or hosts of one device, need no second axis.
    axes = {"host": processes, "device": count}
    if 1 in axes.values():
        axes = {"data": len(devices)}
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), auto, devices=devices)
