"""Plans with caches are carried out: models train as whole tables do."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.mesh import row_wise, shard_batch, table_wise
from jaxrec.plan import ParameterConstraints, Planner, ShardingPlan, TableCache, Topology
from jaxrec.tier import Dynamic, ahead, close, make
from jaxrec.tier.planning.tier import tier_of
from tests.tier import models
from tests.tier.vocabulary.test_cached import (
    NAMES,
    NUM_IDS,
    all_rows,
    assert_same,
    make_stream,
    make_whole,
)

SAMPLES = 8


def make_model():
    return models.Ranker(NUM_IDS, "rowwise_adagrad")


def mesh_of(hosts: int, each: int):
    shape, axes = ((each,), ("data",)) if hosts == 1 else ((hosts, each), ("host", "data"))
    return jax.make_mesh(shape, axes, devices=jax.devices()[: hosts * each])


def planner_for(mesh, constraint: ParameterConstraints, memory: int | None = None, **settings):
    # Collectives of two collections wait for each other on simulated devices, unless all are alike.
    constraint = dataclasses.replace(constraint, pooling_factors=1.5, exchanges=["rows"])
    constraints = dict.fromkeys(NAMES, constraint)
    constraints["age"] = ParameterConstraints(sharding_types=["table_wise"], exchanges=["rows"])
    return Planner(Topology.from_mesh(mesh, memory=memory), constraints, **settings)


MACHINES = {
    "table_wise": (1, 8, "table_wise", "host"),
    "row_wise": (1, 8, "row_wise", "store"),
    "table_row_wise": (2, 4, "table_row_wise", "host"),
}


@pytest.mark.slow
@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("hosts", "each", "kind", "storage"),
    [
        pytest.param(*machine, id=name, marks=[pytest.mark.slow] * (name == "table_row_wise"))
        for name, machine in MACHINES.items()
    ],
)
def test_a_plan_trains_as_whole_tables_do(tmp_path, hosts, each, kind, storage):
    mesh = mesh_of(hosts, each)
    constraint = ParameterConstraints(
        sharding_types=[kind],
        storages=[storage],
        cache_ratio=0.03,
        store=f"file://{tmp_path}/{{table}}",
    )
    planner = planner_for(mesh, constraint)
    plan = planner.plan(make_model, batch_size=SAMPLES)
    assert {plan.to_dict()[name].kind for name in NAMES} == {kind}
    assert {cache.storage for _, cache in plan.caches} == {storage}
    assert {(name, cache.rows) for name, cache in plan.caches} == {(name, 180) for name in NAMES}

    batches = make_stream(40, SAMPLES)
    made_for = planner.context(make_model, batch_size=SAMPLES)
    plan = ShardingPlan.from_json(plan.to_json(), made_for)
    model, whole = jaxrec.shard(make_model, plan, mesh), make_whole("rowwise_adagrad")
    losses = models.train(model, ahead(model, batches, look_ahead=2))
    np.testing.assert_allclose(losses, models.train(whole, batches), rtol=1e-6, atol=1e-6)
    assert tier_of(model).statistics()["query"]["evicted"] > 100
    close(model)


@pytest.mark.slow
@pytest.mark.jax_version
def test_a_machine_too_small_for_a_model_trains_it():
    """The tables take 480 kB with their state, and the device has room for half of them."""
    mesh = mesh_of(1, 1)
    planner = planner_for(
        mesh, ParameterConstraints(), 300_000, batches=1, dense_bytes=0, time_limit=2
    )
    plan = planner.plan(make_model, batch_size=SAMPLES)
    storages = {table.name: table.storage for table in plan.estimate.tables}
    assert storages["age"] == "device"
    assert "host" in storages.values()
    batches = make_stream(20, SAMPLES)
    model, whole = jaxrec.shard(make_model, plan, mesh), make_whole("rowwise_adagrad")
    # First values of a table that is on the device whole are drawn in another way.
    for name in {*NAMES} - {*dict(plan.caches)}:
        collection, of_whole = (
            each.wide if name == "item_wide" else each.embeddings for each in (model, whole)
        )
        of_whole.load_table(name, collection.table(name))
    # The same capacities for all, so that a step is compiled once.
    capacities = dict.fromkeys(batches[0][0].keys, 3 * SAMPLES)
    place = functools.partial(shard_batch, mesh=mesh, capacities=capacities)
    losses = models.train(model, ahead(model, batches, place=place))
    np.testing.assert_allclose(losses, models.train(whole, batches), rtol=1e-6)
    assert_same(all_rows(model), all_rows(whole), 1e-6)


PLACED = dict.fromkeys((*NAMES, "age"), row_wise())
CACHED = ShardingPlan.from_dict(PLACED, dict.fromkeys(NAMES, TableCache(300)))


def test_tables_of_other_models_are_left_out():
    mesh = mesh_of(1, 1)

    def of(*configs):
        return jaxrec.shard(
            lambda: jaxrec.EmbeddingBagCollection(list(configs), rngs=nnx.Rngs(0)), CACHED, mesh
        )

    item = jaxrec.EmbeddingBagConfig("item", NUM_IDS, 8)
    age = jaxrec.EmbeddingBagConfig("age", 10, 8)
    assert tier_of(of(age)) is None
    assert tier_of(of(item, age)).cached_tables == {"item"}


def test_a_model_that_is_made_is_refused():
    with pytest.raises(TypeError, match=r"a cache of 300 rows for table 'item', but the model is"):
        jaxrec.shard(make_model(), CACHED, mesh_of(1, 1))


def test_what_is_no_model_is_refused(unchecked):
    with pytest.raises(TypeError, match=r"a model is an nnx.Module, or a function that makes one"):
        jaxrec.shard(3, CACHED, mesh_of(1, 1))


def test_replicas_are_refused():
    mesh = jax.make_mesh((2, 4), ("replica", "data"))
    with pytest.raises(ValueError, match="cache for table 'item', which replicas over axis 'repl"):
        jaxrec.shard(make_model, CACHED, mesh, replica_axis="replica")


def test_a_model_with_vocabularies_of_its_own_is_refused():
    def made():
        return make(make_model, dict.fromkeys(("item", "item_wide"), Dynamic()))

    with pytest.raises(ValueError, match="the model has open vocabularies already"):
        jaxrec.shard(made, CACHED, mesh_of(1, 1))


def test_a_store_that_there_is_not_is_named():
    caches = dict.fromkeys(NAMES, TableCache(300, "ftp://host/{table}"))
    plan = ShardingPlan.from_dict(PLACED, caches)
    with pytest.raises(ValueError, match="no row store has the URL 'ftp://host/"):
        jaxrec.shard(make_model, plan, mesh_of(1, 1))


def test_a_plan_for_other_devices_is_refused():
    mesh = mesh_of(1, 2)
    constraint = ParameterConstraints(storages=["host"], cache_ratio=0.05)
    plan = planner_for(mesh, constraint).plan(make_model, batch_size=SAMPLES)
    with pytest.raises(ValueError, match="the plan was made for 2 devices, and there are 1"):
        jaxrec.shard(make_model, plan, mesh_of(1, 1))
    by_hand = ShardingPlan.from_dict({**PLACED, "age": table_wise(5)}, dict(CACHED.caches))
    with pytest.raises(ValueError, match="table 'age' is placed table_wise on device 5"):
        jaxrec.shard(make_model, by_hand, mesh_of(1, 1))
