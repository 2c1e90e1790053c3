"""Scenarios that test_processes.py runs in two processes.

`killed` saves in the middle, trains on, and kills itself; `resumed` restores what it saved into its
stores and trains the steps after the checkpoint. `undisturbed` trains all steps, and publishes its
model. `moved` continues a run that one process restored, continued and saved.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import signal

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.files import rows as row_files
from jaxrec.plan import ParameterConstraints, Planner, ShardingPlan, Topology
from jaxrec.tier import (
    Cached,
    ChangeTracker,
    Dynamic,
    Subscriber,
    ahead,
    export_rows,
    farthest,
    import_rows,
    lfu,
    make,
    publish,
    shared,
)
from jaxrec.tier.planning.tier import tier_of
from jaxrec.train.checkpoint import CheckpointManager, restore
from tests.tier import models
from tests.tier.vocabulary import test_cached

STEPS, SAVED_AFTER, MOVED_AFTER, SAMPLES = 16, 8, 12, 16
NAMES = ("item", "query", "item_wide")
SETTINGS = Dynamic(eviction=farthest(2, lfu()), admit_after=2, unknown=shared(5), counters=1 << 14)


def everywhere():
    """The mesh of both processes' devices."""
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def make_model(mesh, store="memory://"):
    """A model and its optimizer."""

    def made():
        tables = dict.fromkeys(NAMES, dataclasses.replace(SETTINGS, store=store))
        return make(lambda: models.Ranker(215, "adam"), tables)

    if mesh is None:
        model = made()
        return model, jaxrec.Optimizer(model, optax.adam(1e-2))
    placements = dict.fromkeys((*NAMES, "age"), jaxrec.mesh.row_wise())
    # The columns of a row lie on devices of both processes.
    placements["query"] = jaxrec.mesh.column_wise(devices=(1, 2))
    model = jaxrec.shard(made, ShardingPlan.from_dict(placements), mesh)
    return model, jaxrec.Optimizer(model, optax.adam(1e-2))


def train(model, optimizer, batches):
    """Yield the loss of each step after it."""
    for x, y in ahead(model, batches, look_ahead=2):
        yield float(models.train_step(model, optimizer, x, y))


def draw_batches(draw_ids, long_steps, id_bits=32):
    """Batches, the first ones longer: the step is compiled once for each size."""
    rng, batches = np.random.default_rng(0), []
    for step in range(STEPS):
        sizes = (0, 3, 3, 3) if step < long_steps else (0, 1, 2, 3)
        lengths = np.random.default_rng(0).choice(sizes, (3, SAMPLES))
        data = {
            key: [draw_ids(rng, length) for length in of_key]
            for key, of_key in zip(("item", "query", "context"), lengths, strict=True)
        }
        data["age"] = [[int(age)] for age in rng.integers(0, 10, SAMPLES)]
        batches.append((pack(data, id_bits), rng.integers(0, 2, SAMPLES).astype(np.float32)))
    return batches


def pack(data, id_bits):
    capacities = {key: 3 * len(bags) for key, bags in data.items()}
    return jaxrec.KeyedJaggedArray.from_lists(data, id_bits=id_bits, capacities=capacities)


def all_batches():
    names = np.random.default_rng(1).integers(-(2**63), 2**63, 450)
    return draw_batches(lambda rng, length: names[rng.integers(0, 450, length)], STEPS, id_bits=64)


def batches_by_power_law():
    ids = test_cached.NUM_IDS
    return draw_batches(lambda rng, length: rng.zipf(1.2, length) % ids * 7919 % ids, long_steps=12)


def part_of(batch):
    """This process's half of a batch; the halves have different numbers of ids."""
    features, labels = batch
    process = jax.process_index()
    half = slice(process * SAMPLES // 2, (process + 1) * SAMPLES // 2)
    data = {key: features[key].to_lists()[half] for key in features.keys}
    return pack(data, id_bits=64), labels[half]


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


def changes_of(tracker):
    """Changed ids of each table, and their rows."""
    return {
        f"{name}.{key}": getattr(changes, key)
        for name, changes in tracker.changes("publisher", with_rows=True).items()
        for key in ("ids", "rows")
    }


def copied(copy, end):
    """Rows of a copy by the ids that a run had at its end, and their state."""
    arrays = {}
    for name in NAMES:
        collection = copy.wide if name == "item_wide" else copy.embeddings
        ids = end[f"{name}.ids"]
        arrays[f"{name}.rows"] = collection.rows(name, ids)
        for key, state in collection.row_state(name, ids).items():
            arrays[f"{name}.{key}"] = state
    return arrays


def killed(directory: pathlib.Path):
    """Rows are written to the stores after the checkpoint, too."""
    model, optimizer = make_model(everywhere(), f"file://{directory}/stores/{{table}}")
    for step, _ in enumerate(train(model, optimizer, map(part_of, all_batches())), 1):
        if step == SAVED_AFTER:
            with CheckpointManager(directory / "saved") as manager:
                manager.save(model, optimizer, batches=step)
            written = records_written(model)
    assert records_written(model) > written
    os.kill(os.getpid(), signal.SIGKILL)


def records_written(model):
    return sum(each["written"] for each in tier_of(model).statistics().values())


def undisturbed(directory: pathlib.Path):
    """Train all steps, and publish the model in the middle and at the end."""
    mesh = everywhere()
    model, optimizer = make_model(mesh, f"file://{directory}/other_stores/{{table}}")
    tracker = ChangeTracker(model, ["publisher", "copies"])
    versions = {"tracker": tracker, "consumer": "copies", "with_state": True, "full_every": 9}
    losses = []
    for loss in train(model, optimizer, map(part_of, all_batches())):
        losses.append(loss)
        if len(losses) == SAVED_AFTER:
            publish(model, directory / "versions", **versions)
    assert not publish(model, directory / "versions", **versions).is_full
    end = result(model, losses)
    copy, _ = make_model(mesh)
    Subscriber(copy, directory / "versions", with_state=True).update()
    return {
        "end": end,
        "stored": stored(model),
        "changes": changes_of(tracker),
        "copies": copied(copy, end),
    }


def resumed(directory: pathlib.Path):
    """Restore what the killed run saved, with its stores, and train the other steps."""
    model, optimizer = make_model(everywhere(), f"file://{directory}/stores/{{table}}")
    first = restore(model, directory / "saved", optimizer).batches
    losses = list(train(model, optimizer, map(part_of, all_batches()[first:])))
    return {"end": result(model, losses), "stored": stored(model)}


def moved(directory: pathlib.Path):
    model, optimizer = make_model(everywhere())
    first = restore(model, directory / "moved", optimizer).batches
    losses = list(train(model, optimizer, map(part_of, all_batches()[first:])))
    return {"losses": np.array(losses), **stored(model)}


def bad_batches():
    """Texts of the errors of batches that one process cannot read, and of the batches given."""
    texts, given, process = [], 0, jax.process_index()
    model, _ = make_model(everywhere())
    good = part_of(all_batches()[0])

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
    return {"texts": texts, "given": given}


def planned(directory: pathlib.Path):
    """Train by a plan that keeps tables in host memory and in files."""
    mesh = everywhere()

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
    batches = map(part_of, batches_by_power_law())
    losses = models.train(model, ahead(model, batches, look_ahead=2))
    evicted = {name: each["evicted"] for name, each in tier_of(model).statistics().items()}
    ids = np.arange(test_cached.NUM_IDS)
    rows = {name: model.embeddings.rows(name, ids) for name in ("item", "query")}
    return {"losses": np.array(losses), "evicted": np.array(sorted(evicted.values())), **rows}


def failed_export(directory: str) -> dict:
    """What each process raises where process 0 cannot write, and the rows of the next file."""
    config = jaxrec.EmbeddingBagConfig("a", 10, 4)

    def bags():
        return jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))

    plan = ShardingPlan.from_dict({"a": jaxrec.mesh.row_wise()})
    model = jaxrec.shard(bags, plan, everywhere())
    error = None
    try:
        export_rows(model, "a", f"{directory}/missing/a.npy")
    except OSError as raised:
        error = str(raised)
    return {"error": error, "rows": export_rows(model, "a", f"{directory}/a.npy")}


def model_of_ten_rows(kind: str):
    """A model with the table "a" of 10 rows, cached or plain, on the mesh of both processes."""
    config = jaxrec.EmbeddingBagConfig("a", 10, 4)

    def bags():
        optimizer = jaxrec.optim.rowwise_adagrad(learning_rate=0.1)
        return jaxrec.EmbeddingBagCollection([config], optimizer=optimizer, rngs=nnx.Rngs(0))

    def cached():
        return make(bags, {"a": Cached(rows=5)})

    plan = ShardingPlan.from_dict({"a": jaxrec.mesh.row_wise()})
    return jaxrec.shard(cached if kind == "cached" else bags, plan, everywhere())


def failed_export_of_stored(directory: str) -> dict:
    """What each process raises where process 0 cannot read its store, and the next file's rows."""
    model, error = model_of_ten_rows("cached"), None
    model.load_rows("a", np.arange(10), np.ones((10, 4), np.float32))
    ((each,),) = [tier_of(model).transfers]
    with pytest.MonkeyPatch.context() as patch:
        if jax.process_index() == 0:

            def scan(size):
                raise OSError(5, "Input/output error")

            patch.setattr(each.store, "scan", scan)
        try:
            export_rows(model, "a", f"{directory}/a.parquet", with_stored=True)
        except OSError as raised:
            error = str(raised)
    path = f"{directory}/b.parquet"
    return {"error": error, "rows": export_rows(model, "a", path, with_stored=True)}


def failed_imports(directory: str, kind: str, names: list[str]) -> dict:
    """What each process raises for its own files ``names``, and the rows of the next file."""
    model, errors = model_of_ten_rows(kind), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_files, "_ROWS", 4)  # rows in a part
        for name in names:
            if name == "unreadable later.parquet":
                patch.setattr(row_files.RowFile, "parts", unreadable_later())
            try:
                import_rows(model, "a", f"{directory}/{jax.process_index()}/{name}")
            except (OSError, ValueError) as error:
                errors.append(f"{type(error).__name__}: {error}")
    count = import_rows(model, "a", f"{directory}/0/{names[0]}")
    return {"errors": errors, "count": count, "rows": model.rows("a", np.arange(10))}


def unreadable_later():
    """`RowFile.parts` that fails in process 1 at the second part of the second pass."""
    parts, passes = row_files.RowFile.parts, itertools.count()

    def failing(self):
        is_second = next(passes) == 1
        for number, part in enumerate(parts(self)):
            if is_second and number == 1 and jax.process_index() == 1:
                raise OSError(5, "Input/output error")
            yield part

    return failing
