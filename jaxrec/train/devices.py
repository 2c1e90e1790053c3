"""The devices of a run, and how models and batches get there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxrec.arguments import ConfigError
from jaxrec.data import ClickBatch, DataError, TableEncoder
from jaxrec.embed.config import TableConfig
from jaxrec.mesh import shard, shard_batch
from jaxrec.mesh.agree import gather_texts
from jaxrec.plan import PlanError, Planner, ShardingPlan, Topology
from jaxrec.ragged import KeyedJaggedArray, rung
from jaxrec.train.place import put

Model = TypeVar("Model", bound=nnx.Module)

# Seconds that the search for a plan may take.
PLAN_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Devices:
    """One device, or a mesh of several.

    Attributes:
        mesh: The devices; None: the first.
        plan: Where tables go on the mesh.
        encoder: What batches are made by; None: a sample has an id at most of each feature.
    """

    mesh: Mesh | None = None
    plan: ShardingPlan | None = None
    encoder: TableEncoder | None = None

    def make_model(self, make: Callable[[], Model]) -> Model:
        """Makes a model there."""
        if self.mesh is None or self.plan is None:
            return make()
        return shard(make, self.plan, self.mesh)

    def put_batch(self, batch: ClickBatch) -> ClickBatch:
        """Puts a host batch there; with several processes, this one's part of it."""
        if self.mesh is None:
            return put(batch)
        return shard_batch(batch, self.mesh, capacities=self._capacities(self.mesh, batch.features))

    def _capacities(self, mesh: Mesh, features: KeyedJaggedArray) -> dict[str, int]:
        """The capacity of each key on a device.

        Raises:
            DataError: Lists are longer than those that were learned from, and there are several
                processes.
        """
        devices = len(mesh.local_devices)
        samples = features.batch_size // devices
        if self.encoder is None:
            return dict.fromkeys(features.keys, rung(samples))
        # As the capacity is known, no process need wait for another.
        is_one = jax.process_count() == 1
        capacities = self.encoder.capacities(samples, certain=not is_one)
        lengths = np.asarray(features.lengths).reshape(len(features.keys), devices, samples)
        for key, need in zip(features.keys, lengths.sum(axis=2).max(axis=1).tolist(), strict=True):
            if is_one:
                capacities[key] = max(capacities[key], rung(need))
            elif need > capacities[key]:
                raise DataError(
                    f"column {key!r} has {need} ids in a batch on one device, more than its rows "
                    "had when the run began; use one process, or begin a new run with them"
                )
        return capacities


def simulate_cpus(count: int) -> None:
    """Makes a CPU that many devices, if JAX has not begun; of no effect elsewhere."""
    if count > 1:
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            return  # JAX has begun; `plan_devices` says if there are too few


def plan_devices(count: int, tables: Sequence[TableConfig], batch_size: int) -> Devices:
    """That many devices of each process, with the fastest plan for the tables.

    Raises:
        ConfigError: There are not so many, or the batch does not divide by them.
        PlanError: The tables do not fit.
    """
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
    made = problem = ""
    if jax.process_index() == 0:
        planner = Planner(Topology.from_mesh(mesh), time_limit=PLAN_SECONDS)
        try:
            made = planner.plan(tables, batch_size=batch_size).to_json()
        except PlanError as error:
            problem = str(error)
    if processes > 1:
        # How far a search comes is not the same everywhere, so that one plans for all.
        made, problem = json.loads(gather_texts(json.dumps([made, problem]))[0])
    if problem:
        raise PlanError(problem)
    return Devices(mesh, ShardingPlan.from_json(made))


def _mesh(processes: int, count: int) -> Mesh:
    """Some devices of each process; a process of several devices is a host to the planner."""
    devices = [
        device
        for process in range(processes)
        for device in [d for d in jax.devices() if d.process_index == process][:count]
    ]
    axes = {"host": processes, "device": count}
    if 1 in axes.values():
        axes = {"data": len(devices)}
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), auto, devices=devices)
