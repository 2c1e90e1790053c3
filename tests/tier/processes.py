"""What each of two processes runs, for test_processes.py.

Arguments: PORT PROCESS SCENARIO DIRECTORY

Scenarios: "killed" trains all steps, saves in the middle, and kills itself at the end; "resumed"
restores and trains the steps after the checkpoint. The end of a run is written to the directory.
"killed" publishes its model, and "resumed" takes it over into a copy.
After "resumed" one of the processes gets bad batches. Then they continue a run that one process
restored, continued and saved as "moved", and train a model whose tables a plan keeps off the
devices.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys

import jax
import numpy as np
import optax
from jax.sharding import AxisType

import jaxrec
from jaxrec.plan import ParameterConstraints, Planner, ShardingPlan, Topology
from jaxrec.tier import (
    ChangeTracker,
    Dynamic,
    Subscriber,
    ahead,
    farthest,
    lfu,
    make,
    publish,
    shared,
)
from jaxrec.tier.tier import tier_of
from jaxrec.train.checkpoint import CheckpointManager, restore
from tests.tier import models
from tests.tier.vocabulary import test_cached

STEPS, SAVED_AFTER, MOVED_AFTER, SAMPLES = 16, 8, 12, 16
NAMES = ("item", "query", "item_wide")
SETTINGS = Dynamic(eviction=farthest(2, lfu()), admit_after=2, unknown=shared(5), counters=1 << 14)


def make_model(mesh, store="memory://"):
    def made():
        tables = dict.fromkeys(NAMES, dataclasses.replace(SETTINGS, store=store))
        return make(lambda: models.Ranker(215, "adam"), tables)

    if mesh is None:
        return made()
    placements = dict.fromkeys((*NAMES, "age"), jaxrec.mesh.row_wise())
    # The columns of a row lie on devices of both processes.
    placements["query"] = jaxrec.mesh.column_wise(devices=(1, 2))
    return jaxrec.shard(made, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)


def part_of(batch, process: int):
    """A process's half of a batch; the halves have different numbers of ids."""
    features, labels = batch
    half = slice(process * SAMPLES // 2, (process + 1) * SAMPLES // 2)
    data = {key: features[key].to_lists()[half] for key in features.keys}
    capacities = dict.fromkeys(data, 3 * SAMPLES // 2)
    packed = jaxrec.KeyedJaggedArray.from_lists(data, id_bits=64, capacities=capacities)
    return packed, labels[half]


def result(model, losses):
    """Losses, and the rows of ids with their state."""
    arrays = {"losses": np.array(losses)}
    for each in tier_of(model).vocabularies:
        ids, rows = each.vocabulary.map.items()
        for table in each.tables:
            collection = getattr(model, table.collection)
            name = table.config.name
            arrays[f"{name}.ids"] = ids
            arrays[f"{name}.rows"] = np.asarray(collection.table(name))[rows]
            arrays[f"{name}.rows_by_id"] = collection.rows(name, ids)
            for key, state in collection.table_state(name).items():
                arrays[f"{name}.{key}"] = np.asarray(state)[rows]
    return arrays


def stored(model):
    """Ids of the records that this process's stores have, and the rows of all ids in stores."""
    arrays = {}
    for each in tier_of(model).vocabularies:
        none = np.zeros(0, np.int64)
        own = np.concatenate([none, *(ids for ids, _ in each.transfer.store.scan())])
        ids = np.concatenate([none, *(ids for ids, _ in each.transfer.scan(50))])
        arrays[f"{each.name}.own"], arrays[f"{each.name}.all"] = own, np.sort(ids)
        for table in each.tables:
            collection, name = getattr(model, table.collection), table.config.name
            arrays[f"{name}.rows"] = collection.rows(name, arrays[f"{each.name}.all"])
    return arrays


def continue_moved(mesh, process: int, directory: pathlib.Path):
    """Continue a run that one process continued and saved."""
    model = make_model(mesh)
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))
    first = restore(directory / "moved", model, optimizer).batches
    batches, _ = models.stream(STEPS, 450, samples=SAMPLES)
    batches = [part_of(batch, process) for batch in batches[first:]]
    losses = [
        float(models.train_step(model, optimizer, x, y))
        for x, y in ahead(model, batches, look_ahead=2)
    ]
    return {"losses": np.array(losses), **stored(model)}


def changes_of(tracker):
    """Changed ids of each table, and their rows."""
    return {
        f"{name}.{key}": getattr(changes, key)
        for name, changes in tracker.changes("publisher", with_rows=True).items()
        for key in ("ids", "rows")
    }


def copied(copy, directory):
    """Rows of a copy by the ids that the killed run had at its end, and their state."""
    end, arrays = np.load(directory / "killed0.npz"), {}
    for name in NAMES:
        collection = copy.wide if name == "item_wide" else copy.embeddings
        ids = end[f"{name}.ids"]
        arrays[f"{name}.rows"] = collection.rows(name, ids)
        for key, state in collection.row_state(name, ids).items():
            arrays[f"{name}.{key}"] = state
    return arrays


def bad_batches(mesh, process: int):
    """Texts of the errors of batches that one process cannot read, and of the batches given."""
    texts, given = [], 0
    model = make_model(mesh)
    good = part_of(models.stream(1, 450, samples=SAMPLES)[0][0], process)

    def failing():
        yield good
        if process == 1:
            raise OSError("the file of batches ends too early")
        yield good

    wrong = (np.zeros(3), good[1]) if process == 1 else good
    for batches in (failing(), [good, wrong]):
        try:
            for _ in ahead(model, batches, look_ahead=2):
                given += 1
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    return {"texts": np.array(texts), "given": np.array(given)}


def train_planned(mesh, process: int, directory: pathlib.Path):
    """Train by a plan that keeps tables in host memory and in files."""

    def make_whole_model():
        return models.Ranker(test_cached.NUM_IDS, "rowwise_adagrad")

    host = ParameterConstraints(
        sharding_types=["row_wise"],
        exchanges=["rows"],
        storages=["host"],
        cache_ratio=0.03,
        pooling_factors=1.5,
    )
    store = dataclasses.replace(host, sharding_types=["table_wise"], storages=["store"])
    planner = Planner(
        Topology.from_mesh(mesh),
        {
            "item": host,
            "item_wide": host,
            "query": store,
            "age": dataclasses.replace(host, storages=["device"], cache_ratio=None),
        },
        store=f"file://{directory}/planned/{{table}}",
    )
    plan = planner.plan(make_whole_model, batch_size=SAMPLES)
    plan = ShardingPlan.from_json(plan.to_json())
    model = jaxrec.shard(make_whole_model, plan, mesh)
    batches = [part_of(batch, process) for batch in test_cached.make_stream(STEPS, SAMPLES)]
    losses = models.train(model, ahead(model, batches, look_ahead=2))
    evicted = {name: each["evicted"] for name, each in tier_of(model).statistics().items()}
    ids = np.arange(test_cached.NUM_IDS)
    rows = {name: model.embeddings.rows(name, ids) for name in ("item", "query")}
    return {"losses": np.array(losses), "evicted": np.array(sorted(evicted.values())), **rows}


def main():
    port, process, scenario, directory = sys.argv[1:]
    directory, process = pathlib.Path(directory), int(process)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}", num_processes=2, process_id=process, heartbeat_timeout_seconds=100
    )
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    batches, _ = models.stream(STEPS, 450, samples=SAMPLES)
    batches = [part_of(batch, process) for batch in batches]
    # Both runs have the same stores, with rows of the killed run that were written after the save.
    model = make_model(mesh, f"file://{directory}/stores/{{table}}")
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))
    if scenario == "resumed":
        batches = batches[restore(directory / "saved", model, optimizer).batches :]
    tracker = ChangeTracker(model, ["publisher", "copies"])
    versions = {"tracker": tracker, "consumer": "copies", "with_state": True, "full_every": 9}
    losses = []
    for number, (x, y) in enumerate(ahead(model, batches, look_ahead=2), 1):
        losses.append(float(models.train_step(model, optimizer, x, y)))
        if scenario == "killed" and number == SAVED_AFTER:
            with CheckpointManager(directory / "saved") as manager:
                manager.save(model, optimizer, batches=number)
            publish(model, directory / "versions", **versions)
    if scenario == "killed":
        assert not publish(model, directory / "versions", **versions).is_full
    else:
        copy = make_model(mesh)
        Subscriber(copy, directory / "versions", with_state=True).update()
        np.savez(directory / f"copies{process}.npz", **copied(copy, directory))
    np.savez(directory / f"{scenario}_changes{process}.npz", **changes_of(tracker))
    np.savez(directory / f"{scenario}{process}.npz", **result(model, losses))
    np.savez(directory / f"{scenario}_stored{process}.npz", **stored(model))
    if scenario == "resumed":
        np.savez(directory / f"bad{process}.npz", **bad_batches(mesh, process))
        np.savez(directory / f"moved{process}.npz", **continue_moved(mesh, process, directory))
        np.savez(directory / f"planned{process}.npz", **train_planned(mesh, process, directory))
    if scenario == "killed":
        os.kill(os.getpid(), 9)
