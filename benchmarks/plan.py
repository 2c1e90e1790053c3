"""How well the planner's cost model ranks plans: predicted beside measured times of a step.

Usage: python -m benchmarks.plan [--devices 8] [--plans 36] [--batch 4096] [--topology FILE]
                                 [--output benchmarks/results/plan]
Simulates devices on the CPU, calibrates the topology (or reads one), draws plans of a mixed model,
predicts and measures each, and prints one JSON line a plan and one with Spearman's rank
correlation.
Writes the scatter plot and the figures to OUTPUT.png and OUTPUT.json.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tyro

# Rows, columns, ids a sample, and whether hot ids lie together: as ids by frequency, or as hashes.
TABLES = {
    "user": (200_000, 32, 1, False),
    "item": (100_000, 64, 8, True),
    "word": (50_000, 32, 20, True),
    "shop": (20_000, 64, 2, False),
    "city": (2_000, 32, 1, False),
    "tags": (50_000, 16, 12, False),
    "hour": (24, 16, 1, False),
    "page": (50_000, 64, 3, True),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the benchmark.

    Attributes:
        devices: Simulated devices.
        plans: Plans to draw.
        batch: Samples in a step.
        passes: How often to go through the plans; the least time of a plan counts.
        steps: Steps of a plan to time in a pass.
        topology: A topology that was measured before; None: measured now.
        output: Where figures and plot go, without their endings.
        seed: Seed of the plans and the ids.
    """

    devices: int = 8
    plans: int = 36
    batch: int = 4096
    passes: int = 3
    steps: int = 10
    topology: pathlib.Path | None = None
    output: pathlib.Path = pathlib.Path("benchmarks/results/plan")
    seed: int = 0


def main(options: Options) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.devices}"
    # Imported here, after the environment is set.
    import jax

    import jaxrec

    jaxrec.keep_freed_memory()

    from jaxrec.plan import Planner, Topology, sample_statistics
    from jaxrec.plan.calibration import calibrate

    jax.config.update("jax_platforms", "cpu")
    mesh = jax.make_mesh((options.devices,), ("data",))
    topology = calibrate(mesh) if options.topology is None else Topology.load(options.topology)
    batches = [draw_batch(options.batch, options.seed + i) for i in range(4)]
    planner = Planner(topology, statistics=sample_statistics(batches))
    plans = draw_plans(planner, options)
    # Figures are written after each pass, of the least times so far.
    for measured in measure([plan for _, plan in plans], mesh, batches, options):
        summary = report(plans, measured, planner, options)
    print(json.dumps(summary))


def report(
    plans: Sequence[tuple[str, Any]],
    measured: Sequence[tuple[float, float]],
    planner: Any,
    options: Options,
) -> dict[str, Any]:
    """Prints and writes what was measured beside what is predicted; returns the summary."""
    from jaxrec.plan import ShardingPlan

    lines = []
    for (name, plan), (milliseconds, worked) in zip(plans, measured, strict=True):
        predicted = planner.evaluate(make_model(abstract=True), plan, batch_size=options.batch)
        assert predicted.estimate is not None
        line = {
            "plan": name,
            "predicted_ms": predicted.estimate.seconds * 1e3,
            "measured_ms": milliseconds,
            "processor_ms": worked,
            "phases_ms": {k: round(v * 1e3, 3) for k, v in predicted.estimate.phases.items()},
            "placements": str(ShardingPlan(plan.placements)).split("\n"),
        }
        lines.append(line)
        print(json.dumps(line), flush=True)
    summary = summarize(lines)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figures = {"summary": summary, "topology": planner.topology.to_dict(), "plans": lines}
    options.output.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    draw(lines, summary, options.output.with_suffix(".png"))
    return summary


def make_model(*, abstract: bool = False) -> Any:
    """The tables with a small tower on top."""
    import jax.numpy as jnp
    from flax import nnx

    import jaxrec

    class Tower(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            tables = [
                jaxrec.EmbeddingBagConfig(name, rows, dim)
                for name, (rows, dim, _, _) in TABLES.items()
            ]
            self.embeddings = jaxrec.EmbeddingBagCollection(
                tables, optimizer=jaxrec.optim.adagrad(0.01), rngs=rngs
            )
            self.out = nnx.Linear(sum(dim for _, dim, _, _ in TABLES.values()), 1, rngs=rngs)

        def __call__(self, features):
            return jnp.squeeze(self.out(self.embeddings(features).values), 1)

    return nnx.eval_shape(Tower) if abstract else Tower()


def draw_batch(batch: int, seed: int) -> Any:
    """Log-uniform ids: few are frequent, many rare."""
    import jaxrec

    random = np.random.default_rng(seed)
    ids, lengths = [], []
    for rows, _, pooling, is_sorted in TABLES.values():
        length = random.integers(0, 2 * pooling + 1, batch) if pooling > 1 else np.ones(batch, int)
        drawn = np.minimum(rows ** random.random(length.sum()) - 1, rows - 1).astype(np.int64)
        # As a hash would: a multiplication by a number without a factor in common with the rows.
        ids.append(drawn if is_sorted else drawn * 7919 % rows)
        lengths.append(length)
    return jaxrec.KeyedJaggedArray.from_lengths(
        list(TABLES), np.concatenate(ids), np.concatenate(lengths).astype(np.int32)
    )


def draw_plans(planner: Any, options: Options) -> list[tuple[str, Any]]:
    """The planner's own plan, one of each sharding type, and random ones from mild to bad."""
    from jaxrec.plan import ParameterConstraints, ShardingPlan
    from jaxrec.plan.model_tables import read_model
    from jaxrec.plan.options import enumerate_options, to_placement
    from jaxrec.plan.workload import measure_workloads

    model = make_model(abstract=True)
    workloads = measure_workloads(
        read_model(model),
        batch_size=options.batch,
        num_devices=options.devices,
        constraints={},
        statistics=planner.statistics,
    )
    topology = planner.topology
    constraint = ParameterConstraints(min_column_width=8)
    choices = {
        workload.name: enumerate_options(workload, topology, constraint, storages=("device",))
        for workload in workloads
    }
    random = np.random.default_rng(options.seed)

    def placed(option: Any, near: int | None = None) -> Any:
        count = len(option.sites)
        sites = random.permutation(count)[: option.parts]
        if near is not None and count > 1:
            sites = (near + np.arange(option.parts)) % count
        return to_placement(option, [int(site) for site in sites], topology)

    plans = [("planner", planner.plan(model, batch_size=options.batch))]
    best = plans[0][1].to_dict()
    types = dict.fromkeys(o.sharding_type for found in choices.values() for o in found)
    for kind in types:
        placements = {}
        for name, found in choices.items():
            same = [o for o in found if o.sharding_type == kind] or list(found)
            placements[name] = placed(same[random.integers(len(same))])
        plans.append((kind, ShardingPlan.from_dict(placements)))
    one = {
        name: placed(next(o for o in found if o.sharding_type == "table_wise"), near=0)
        for name, found in choices.items()
    }
    plans.append(("one device", ShardingPlan.from_dict(one)))
    while len(plans) < options.plans:
        # From the planner's own to any, and of a few types only, so that plans differ as wholes and
        # not just by chance.
        share = random.random()
        allowed = random.choice(list(types), random.integers(1, len(types) + 1), replace=False)
        near = int(random.integers(options.devices)) if random.random() < 0.3 else None
        placements = {}
        for name, found in choices.items():
            some = [o for o in found if o.sharding_type in allowed] or list(found)
            drawn = placed(some[random.integers(len(some))], near)
            placements[name] = best[name] if random.random() < share else drawn
        plans.append((f"random {len(plans)}", ShardingPlan.from_dict(placements)))
    return plans


def measure(
    plans: Sequence[Any], mesh: Any, batches: Sequence[Any], options: Options
) -> Iterator[list[tuple[float, float]]]:
    """The least milliseconds of a training step under each plan, after each pass: those that pass,
    and those that processors work.

    In several passes, so that something else that keeps the machine busy for a while does not fall
    on a few plans alone.
    """
    import jax
    import optax
    from flax import nnx

    import jaxrec

    def train_step(model, optimizer, features):
        def loss_fn(model):
            return (model(features) ** 2).mean()

        loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    placed = [jaxrec.mesh.shard_batch(batch, mesh) for batch in batches]
    steps = [nnx.jit(train_step, donate_argnums=(0, 1)) for _ in plans]
    least = [(float("inf"), float("inf"))] * len(plans)
    for number in range(options.passes):
        for i, plan in enumerate(plans):
            model = jaxrec.shard(make_model(), plan, mesh)
            optimizer = jaxrec.Optimizer(model, optax.sgd(0.01))
            for step in range(options.steps + 2):
                start, worked = time.perf_counter(), time.process_time()
                loss = steps[i](model, optimizer, placed[step % len(placed)])
                jax.block_until_ready((loss, nnx.state(model)))
                took = time.perf_counter() - start, time.process_time() - worked
                if step >= 2:
                    least[i] = min(least[i][0], took[0] * 1e3), min(least[i][1], took[1] * 1e3)
            del model, optimizer
            gc.collect()  # they hold each other
            print(f"pass {number + 1}, plan {i + 1}: {least[i][0]:.1f} ms", file=sys.stderr)
        # Linux bounds the memory maps of a process, and each compiled program takes hundreds.
        jax.clear_caches()
        yield least


def summarize(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Spearman's rank correlation and the ratio of times.

    The correlation with the time that processors work is there for machines that others use, too.
    """
    from scipy.stats import spearmanr

    predicted = np.array([line["predicted_ms"] for line in lines])
    measured = np.array([line["measured_ms"] for line in lines])
    worked = np.array([line["processor_ms"] for line in lines])
    order = np.argsort(measured)
    ratio = predicted / measured
    return {
        "plans": len(lines),
        "rank_correlation": round(float(spearmanr(predicted, measured)[0]), 4),
        "rank_correlation_with_processor_time": round(float(spearmanr(predicted, worked)[0]), 4),
        "predicted_over_measured": [round(float(q), 3) for q in np.quantile(ratio, (0, 0.5, 1))],
        "rank_of_the_planner's": int(np.flatnonzero(order == 0)[0]) + 1,
        "fastest_ms": round(float(measured.min()), 2),
        "slowest_ms": round(float(measured.max()), 2),
        "planner's_ms": round(float(measured[0]), 2),
    }


def draw(lines: Sequence[dict[str, Any]], summary: dict[str, Any], path: pathlib.Path) -> None:
    """Predicted by measured, both logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    predicted = [line["predicted_ms"] for line in lines]
    measured = [line["measured_ms"] for line in lines]
    axes.loglog(measured[1:], predicted[1:], "o", label="other plans")
    axes.loglog(measured[:1], predicted[:1], "r*", markersize=14, label="the planner's")
    ends = [min(predicted + measured) * 0.9, max(predicted + measured) * 1.1]
    axes.plot(ends, ends, "k:", linewidth=1, label="equal")
    axes.set_xlabel("measured (ms)")
    axes.set_ylabel("predicted (ms)")
    axes.set_title(f"{summary['plans']} plans, rank correlation {summary['rank_correlation']}")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
