"""Capacities of exchanges follow the demand of batches."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import ahead
from jaxrec.mesh.ahead import (
    Capacities,
    capacity_factor,
    describe_capacities,
    measure_demand,
    restore_capacities,
    route_ahead,
)

DEVICES = 8
GROUP = ("", "float32_4")


def model_on_mesh(placement):
    config = jaxrec.EmbeddingBagConfig("table", 64, 4)
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    plan = jaxrec.plan.ShardingPlan.from_dict({"table": placement})
    return jaxrec.shard(model, plan, mesh), mesh


@nnx.jit
def route(model, batch):
    return route_ahead(lambda model: model(batch), model)


def factors(model):
    return dict(model.tables.get_value().capacity_factors)


IDS = {
    # Eight ids a device; ids divide by eight rows of each owner.
    "one row": (np.zeros((DEVICES, 8), int), 1, 8),
    "one owner": (np.tile(np.arange(8), (DEVICES, 1)), 8, 8),
    "evenly": (np.tile(np.arange(0, 64, 8), (DEVICES, 1)), 1, 1),
    "two owners of one device": (np.r_[[[0, 1, 2, 3, 8, 9, 10, 11]], np.zeros((7, 8), int)], 4, 8),
}


@pytest.mark.parametrize("exchange", ["rows", "pooled"])
@pytest.mark.parametrize("ids", IDS)
def test_demand(ids, exchange):
    """The most that a device needs of an owner: distinct rows by rows, every lookup if pooled."""
    model, mesh = model_on_mesh(jaxrec.mesh.row_wise(exchange=exchange))
    given, distinct, lookups = IDS[ids]
    batch = jaxrec.KeyedJaggedArray.from_lists({"table": given.tolist()})
    batch = jaxrec.mesh.shard_batch(batch, mesh)
    found = jax.jit(lambda batch: measure_demand(route_ahead(lambda model: model(batch), model)))(
        batch
    )
    # Eight lookups of a device are one for each owner, if evenly shared.
    assert {group: float(load) for group, load in found.items()} == {
        GROUP: distinct if exchange == "rows" else lookups
    }


def test_bags_and_replicated_tables_have_no_capacity():
    for placement in (jaxrec.mesh.table_wise(3), jaxrec.mesh.data_parallel()):
        model, mesh = model_on_mesh(placement)
        batch = jaxrec.KeyedJaggedArray.from_lists({"table": [[1]] * DEVICES})
        batch = jaxrec.mesh.shard_batch(batch, mesh)
        assert measure_demand(route(model, batch)) == {}


def test_capacities_grow_at_once_and_shrink_after_a_while(monkeypatch):
    monkeypatch.setattr(ahead, "WINDOW", 3)
    model, _ = model_on_mesh(jaxrec.mesh.row_wise())
    capacities = Capacities(model)
    changes = []
    for load in (1.0, 4.0, 0.5, 0.5, 0.5, 0.5, 0.4, 0.6):
        is_changed = capacities.observe({GROUP: load})
        changes.append(is_changed and factors(model)[GROUP[1]])
    assert changes == [
        False,
        capacity_factor(4.0),
        False,
        False,
        capacity_factor(0.5),
        False,
        False,
        capacity_factor(0.6),
    ]


@pytest.mark.parametrize("load", [1e-9, 0.01, 0.3, 1.0, 7.3, 300.0])
def test_capacity_factors(load):
    factor = capacity_factor(load)
    assert factor >= load * 1.05 - 1e-12
    assert factor <= max(load, 1e-3) * 1.05 * 2**0.25 * (1 + 1e-9)
    assert np.log2(factor) * 4 == pytest.approx(round(np.log2(factor) * 4))


def test_one_rung_is_not_above_another_for_less():
    loads = np.geomspace(1e-3, 100, 500)
    rungs = [capacity_factor(load) for load in loads]
    assert rungs == sorted(rungs)
    assert len(set(rungs)) < 70


def test_routing_leaves_the_statistics_of_a_model_alone():
    class Normalized(nnx.Module):
        def __init__(self):
            self.embeddings, _ = model_on_mesh(jaxrec.mesh.row_wise())
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

        def __call__(self, features):
            return self.norm(self.embeddings(features).values + 1)

    model = Normalized()
    mesh = model.embeddings.tables.get_value().mesh
    batch = jaxrec.KeyedJaggedArray.from_lists({"table": [[1]] * DEVICES})
    batch = jaxrec.mesh.shard_batch(batch, mesh)
    assert route(model, batch)
    np.testing.assert_array_equal(model.norm.mean.get_value(), np.zeros(4))


class TestRestored:
    def test_by_groups_of_the_same_exchange_and_devices(self):
        model, _ = model_on_mesh(jaxrec.mesh.row_wise())
        assert describe_capacities(model) == []
        Capacities(model).observe({GROUP: 4.0})
        described = json.loads(json.dumps(describe_capacities(model)))
        assert described == [
            {
                "collection": "",
                "group": GROUP[1],
                "devices": DEVICES,
                "exchange": "rows",
                "factor": capacity_factor(4.0),
            }
        ]
        again, _ = model_on_mesh(jaxrec.mesh.row_wise())
        restore_capacities(again, described)
        assert factors(again) == factors(model)

    def test_not_of_another_exchange_or_number_of_devices(self):
        model, _ = model_on_mesh(jaxrec.mesh.row_wise())
        Capacities(model).observe({GROUP: 4.0})
        described = describe_capacities(model)
        pooled, _ = model_on_mesh(jaxrec.mesh.row_wise(exchange="pooled"))
        restore_capacities(pooled, described)
        assert factors(pooled) == {}
        again, _ = model_on_mesh(jaxrec.mesh.row_wise())
        restore_capacities(again, [{**each, "devices": 4} for each in described])
        assert factors(again) == {}
