"""Plans as a whole: they fit, are close to their bound, and are carried out by `jaxrec.shard`."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.plan import ParameterConstraints, Planner, Topology
from tests.plan.models import criteo, six_tables


@pytest.mark.parametrize("devices", [1, 2, 8, 16])
@pytest.mark.parametrize("model", [six_tables, criteo], ids=["six", "criteo"])
def test_plans_fit_and_are_close_to_their_bound(model, devices):
    tables, said = model()
    plan = Planner(Topology.named("h200", devices=devices), said).plan(tables, batch_size=65536)
    assert set(plan.to_dict()) == {table.name for table in tables}
    found = plan.estimate
    assert found.bound <= found.seconds <= 1.02 * found.bound
    for device in found.devices:
        assert sum(device.bytes.values()) <= found.capacity


def test_a_plan_for_a_mesh_is_carried_out():
    tables = [
        jaxrec.EmbeddingBagConfig("a", 100, 8),
        jaxrec.EmbeddingBagConfig("b", 3, 8),
        jaxrec.EmbeddingBagConfig("c", 50, 4, pooling="mean"),
    ]
    mesh = jax.make_mesh((8,), ("data",))
    batch = jaxrec.KeyedJaggedArray.from_lists(
        {"a": [[1, 2]] * 8, "b": [[i % 3] for i in range(8)], "c": [[i, 7] for i in range(8)]}
    )
    model = jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))
    expected = np.asarray(model(batch).values)
    plan = Planner(Topology.from_mesh(mesh)).plan(model, batch_size=8)
    sharded = jaxrec.shard(model, plan, mesh)
    found = sharded(jaxrec.mesh.shard_batch(batch, mesh)).values
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_an_abstract_model_has_the_same_plan():
    def make():
        tables = [jaxrec.EmbeddingBagConfig("a", 1000, 16)]
        return jaxrec.EmbeddingBagCollection(tables, rngs=nnx.Rngs(0))

    planner = Planner(Topology.named("h100", devices=8))
    assert planner.plan(nnx.eval_shape(make), batch_size=64) == planner.plan(make(), batch_size=64)


def test_a_pinned_placement_is_kept():
    tables, said = six_tables()
    placement = jaxrec.mesh.table_wise(device=1)
    said["shop"] = ParameterConstraints(placement=placement)
    plan = Planner(Topology.named("h100", devices=2), said).plan(tables, batch_size=4096)
    assert plan.to_dict()["shop"] == placement
