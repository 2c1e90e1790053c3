"""Rooms of the exchange follow what batches need."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.embed.taps import route_ahead
from jaxrec.mesh import rooms
from jaxrec.mesh.rooms import Rooms, measured_loads, rung

DEVICES = 8
GROUP = ("", "float32_4")


def model_on_mesh(placement):
    config = jaxrec.EmbeddingBagConfig("table", 64, 4)
    model = jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    plan = jaxrec.plan.ShardingPlan.from_dict({"table": placement})
    return jaxrec.shard(model, plan, mesh), mesh


def slack(model):
    return dict(model.tables.get_value().slack)


IDS = {
    # Eight ids a device; ids divide by eight rows of each owner.
    "one row": (np.zeros((DEVICES, 8), int), 1, 8),
    "one owner": (np.tile(np.arange(8), (DEVICES, 1)), 8, 8),
    "evenly": (np.tile(np.arange(0, 64, 8), (DEVICES, 1)), 1, 1),
    "two owners of one device": (np.r_[[[0, 1, 2, 3, 8, 9, 10, 11]], np.zeros((7, 8), int)], 4, 8),
}


@pytest.mark.parametrize("exchange", ["rows", "sums"])
@pytest.mark.parametrize("ids", IDS)
def test_loads(ids, exchange):
    """The most that a device needs of an owner: distinct rows by rows, every lookup by sums."""
    model, mesh = model_on_mesh(jaxrec.mesh.row_wise(exchange=exchange))
    given, distinct, lookups = IDS[ids]
    batch = jaxrec.KeyedJaggedArray.from_lists({"table": given.tolist()})
    batch = jaxrec.mesh.shard_batch(batch, mesh)
    found = jax.jit(lambda batch: measured_loads(route_ahead(lambda model: model(batch), model)))(
        batch
    )
    # Eight lookups of a device are one for each owner, if evenly shared.
    assert {group: float(load) for group, load in found.items()} == {
        GROUP: distinct if exchange == "rows" else lookups
    }


def test_bags_and_copies_have_no_rooms():
    for placement in (jaxrec.mesh.table_wise(3), jaxrec.mesh.data_parallel()):
        model, mesh = model_on_mesh(placement)
        batch = jaxrec.KeyedJaggedArray.from_lists({"table": [[1]] * DEVICES})
        batch = jaxrec.mesh.shard_batch(batch, mesh)
        assert measured_loads(route_ahead(lambda model, batch=batch: model(batch), model)) == {}


def test_rooms_grow_at_once_and_shrink_after_a_while(monkeypatch):
    monkeypatch.setattr(rooms, "WINDOW", 3)
    model, _ = model_on_mesh(jaxrec.mesh.row_wise())
    chosen = Rooms(model)
    changes = []
    for load in (1.0, 4.0, 0.5, 0.5, 0.5, 0.5, 0.4, 0.6):
        is_changed = chosen.see({GROUP: load})
        changes.append(is_changed and slack(model)[GROUP[1]])
    assert changes == [False, rung(4.0), False, False, rung(0.5), False, False, rung(0.6)]


@pytest.mark.parametrize("load", [1e-9, 0.01, 0.3, 1.0, 7.3, 300.0])
def test_rungs(load):
    room = rung(load)
    assert room >= load * 1.05 - 1e-12
    assert room <= max(load, 1e-3) * 1.05 * 2**0.25 * (1 + 1e-9)
    assert np.log2(room) * 4 == pytest.approx(round(np.log2(room) * 4))


def test_one_rung_is_not_above_another_for_less():
    loads = np.geomspace(1e-3, 100, 500)
    rungs = [rung(load) for load in loads]
    assert rungs == sorted(rungs)
    assert len(set(rungs)) < 70
