"""The planner's choice of caches: predicted beside measured times of a step."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxrec
from jaxrec.data import Pipeline
from jaxrec.plan import Planner, ShardingPlan, Topology
from jaxrec.plan.calibration import calibrate
from jaxrec.plan.model_tables import read_model
from jaxrec.plan.workload import measure_workloads
from jaxrec.tier.calibration import calibrate_caches
from jaxrec.train import compile_step

# Rows, columns and ids of a sample.
TABLES = {
    "user": (1_000_000, 32, 1),
    "item": (500_000, 64, 8),
    "word": (200_000, 32, 20),
    "shop": (100_000, 64, 2),
    "page": (500_000, 64, 3),
    "city": (2_000, 32, 1),
}
_POOL = 96


@dataclasses.dataclass(frozen=True)
class Plans:
    """Steps of plans for machines too small for a model."""

    batch: int = 4096
    """Samples of a step."""
    memories: tuple[float, ...] = (2.0, 0.7, 0.4, 0.25)
    """Memory of each machine, over the bytes of the tables with their optimizer state."""
    steps: int = 40
    """Steps of a round."""
    rounds: int = 7
    """Rounds, in which the plans take turns."""
    warm_up: int = 200
    """Steps before the first round, in which caches fill."""
    topology: pathlib.Path | None = None
    """Topology that was measured before; measured now if not given."""
    processor_time: bool = False
    """Count processor time alone, in the calibration as well: for machines that others use, on one
    core (taskset -c 0)."""
    output: pathlib.Path = pathlib.Path("benchmarks/results/plan_caches.json")
    """File of the figures."""

    def run(self) -> None:
        jaxrec.keep_freed_memory()
        if self.processor_time:
            time.perf_counter = time.process_time
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        if self.topology is None:
            topology = calibrate_caches(calibrate(mesh), mesh)
        else:
            topology = Topology.load(self.topology)
        with tempfile.TemporaryDirectory() as directory:
            plans = self.plans(topology, f"file://{directory}/{{table}}")
            lines = self.compare(plans, mesh)
        self.output.write_text(
            json.dumps({"topology": topology.to_dict(), "plans": lines}, indent=1) + "\n"
        )

    def plans(self, topology: Topology, store: str) -> dict[str, ShardingPlan]:
        """Plan for each machine, with rows in host memory, and for the smallest with files."""
        seen = self.sample()
        bytes = sum(rows * (dim + 1) * 4 for rows, dim, _ in TABLES.values())

        def plan(share: float, storage: str) -> ShardingPlan:
            planner = Planner(
                dataclasses.replace(topology, memory=round(share * bytes)),
                statistics=seen,
                storages=("device", storage),
                store=store,
            )
            return planner.plan(Model, batch_size=self.batch)

        plans = {f"{share:g} host": plan(share, "host") for share in self.memories}
        smallest = min(self.memories)
        return {**plans, f"{smallest:g} store": plan(smallest, "store")}

    def sample(self) -> jaxrec.plan.Statistics:
        """Return the statistics of some batches."""
        return jaxrec.plan.sample_statistics(features for features, _ in self.pool)

    def compare(self, plans: dict[str, ShardingPlan], mesh: Any) -> list[dict[str, Any]]:
        """Train by all plans in turn; print and return a line for each."""
        runs = {name: _Run(plan, mesh, itertools.cycle(self.pool)) for name, plan in plans.items()}
        for run in runs.values():
            run.train(self.warm_up)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(self.rounds):
            for name, run in runs.items():
                time.sleep(0.1)  # the threads of the plan before still prepare batches
                times[name].append(run.train(self.steps))
        lines = []
        workloads = measure_workloads(
            read_model(Model),
            batch_size=self.batch,
            num_devices=1,
            constraints={},
            statistics=self.sample(),
        )
        for name, plan in plans.items():
            assert plan.estimate is not None
            wall, processor = (1e3 * np.array(t) for t in zip(*times[name], strict=True))
            predicted = 1e3 * plan.estimate.seconds
            line = {
                "plan": name,
                "storages": {
                    table.name: f"{table.storage} {table.cache_ratio:.3g}"
                    for table in plan.estimate.tables
                },
                "predicted_ms": round(predicted, 2),
                "prefetch_ms": round(1e3 * plan.estimate.phases["prefetch"], 2),
                "measured_ms": round(wall.min(), 2),
                "median_ms": round(float(np.median(wall)), 2),
                "processor_ms": round(float(np.median(processor)), 2),
                "predicted_over_measured": round(predicted / wall.min(), 3),
            }
            if plan.caches:
                line["missed"] = self.missed(runs[name])
                line["predicted_missed"] = {
                    w.name: round(w.missed_rows(cache.rows, 1))
                    for w in workloads
                    if (cache := dict(plan.caches).get(w.name)) is not None
                }
            print(json.dumps(line), flush=True)
            lines.append(line)
        return lines

    def missed(self, run: _Run) -> dict[str, int]:
        """Return the rows that each table misses in a step."""
        before = {n: each["new"] for n, each in jaxrec.tier.statistics(run.model).items()}
        run.train(self.steps)
        after = {n: each["new"] for n, each in jaxrec.tier.statistics(run.model).items()}
        return {name: round((after[name] - before[name]) / self.steps) for name in before}

    @functools.cached_property
    def pool(self) -> list[Any]:
        """Batches of log-uniform ids; frequent rows are scattered."""
        return list(itertools.islice(self.draw(), _POOL))

    def draw(self) -> Iterator[Any]:
        rng = np.random.default_rng(0)
        lengths = np.concatenate(
            [np.full(self.batch, count, np.int32) for _, _, count in TABLES.values()]
        )
        labels = rng.integers(0, 2, self.batch).astype(np.float32)
        scattered = {name: rng.permutation(rows) for name, (rows, _, _) in TABLES.items()}
        while True:
            ids = [
                scattered[name][(rows ** rng.random(self.batch * count)).astype(np.int64) - 1]
                for name, (rows, _, count) in TABLES.items()
            ]
            features = jaxrec.KeyedJaggedArray.from_lengths(
                list(TABLES), np.concatenate(ids), lengths
            )
            yield features, labels


class Model(nnx.Module):
    """The tables with a small tower on top."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        tables = [
            jaxrec.EmbeddingBagConfig(name, rows, dim) for name, (rows, dim, _) in TABLES.items()
        ]
        self.embeddings = jaxrec.EmbeddingBagCollection(
            tables, optimizer=jaxrec.optim.rowwise_adagrad(0.01), rngs=rngs
        )
        self.out = nnx.Linear(sum(dim for _, dim, _ in TABLES.values()), 1, rngs=rngs)

    def __call__(self, features):
        return jnp.squeeze(self.out(self.embeddings(features).values), 1)


def train_step(model, optimizer, features, labels):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(features), labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


class _Run:
    """A model on its devices, with its batches."""

    def __init__(self, plan: ShardingPlan, mesh: Any, batches: Iterator[Any]) -> None:
        self.model = jaxrec.shard(Model, plan, mesh)
        optimizer = jaxrec.Optimizer(self.model, optax.sgd(0.01))
        self.step = compile_step(train_step, self.model, optimizer)
        if plan.caches:
            self.batches: Iterator[Any] = jaxrec.tier.ahead(self.model, batches)
        else:
            place = lambda batch: jaxrec.mesh.shard_batch(batch, mesh)  # noqa: E731
            self.batches = iter(Pipeline(batches, place, ahead=4))

    def train(self, steps: int) -> tuple[float, float]:
        """Train some steps; return the wall-clock and processor seconds of one."""
        start, worked = time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = self.step(*next(self.batches))
        jax.block_until_ready(loss)
        return (time.perf_counter() - start) / steps, (time.process_time() - worked) / steps
