"""Plans whose lookups stash their residuals."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from flax import nnx

import jaxrec
from jaxrec.plan import PlanError, Planner, ShardingPlan, Topology

BATCH = 8192
# Two groups: while one is exchanged, the residuals of the other are off the device.
TABLES = [
    jaxrec.EmbeddingBagConfig(f"t{dim}", num_embeddings=1000, embedding_dim=dim) for dim in (8, 16)
]
CONSTRAINTS = {
    table.name: jaxrec.plan.ParameterConstraints(pooling_factors=100, sharding_types=["row_wise"])
    for table in TABLES
}
TOPOLOGY = Topology.named("h100", devices=8)


def make_planner(stashes=(None,), memory=None, **options):
    topology = TOPOLOGY if memory is None else dataclasses.replace(TOPOLOGY, memory=memory)
    return Planner(topology, CONSTRAINTS, stashes=stashes, reserve=0.0, dense_bytes=0, **options)


def bytes_of(plan):
    return max(sum(device.bytes.values()) for device in plan.estimate.devices)


@pytest.fixture(scope="module")
def plans():
    stashes = (None, "recompute", "host")
    return {s: make_planner((s,)).plan(TABLES, batch_size=BATCH) for s in stashes}


def test_a_stash_takes_fewer_bytes_and_more_time(plans):
    for stash in ("recompute", "host"):
        assert plans[stash].stash == stash
        assert bytes_of(plans[stash]) < bytes_of(plans[None])
        assert plans[stash].estimate.seconds > plans[None].estimate.seconds


def test_only_where_no_plan_fits_without(plans):
    stashes = ("host", "recompute", None)
    assert make_planner(stashes).plan(TABLES, batch_size=BATCH).stash is None
    memory = int(bytes_of(plans[None]) - 1)
    with pytest.raises(PlanError):
        make_planner(memory=memory, time_limit=2.0).plan(TABLES, batch_size=BATCH)
    plan = make_planner(stashes, memory, time_limit=2.0).plan(TABLES, batch_size=BATCH)
    fastest = min(("recompute", "host"), key=lambda stash: plans[stash].estimate.seconds)
    assert plan.stash == fastest
    assert f"Stash   {fastest}" in str(plan)


def test_plan_files(plans):
    plan = plans["host"]
    assert ShardingPlan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="not a plan"):
        ShardingPlan.from_json(plan.to_json().replace('"stash": "host"', '"stash": "disk"'))
    evaluated = make_planner().evaluate(TABLES, plan, batch_size=BATCH)
    assert bytes_of(evaluated) == pytest.approx(bytes_of(plan))


def test_shard_gives_collections_the_stash():
    plan = ShardingPlan.from_dict(
        {table.name: jaxrec.mesh.row_wise() for table in TABLES}, stash="recompute"
    )
    model = jaxrec.EmbeddingBagCollection(TABLES, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((8,), ("data",))
    assert jaxrec.shard(model, plan, mesh).stash == "recompute"
    assert str(plan).endswith("Stash   recompute, in all collections")


@pytest.mark.parametrize("stashes", ["host", (), ("disk",)])
def test_bad_stashes(stashes):
    with pytest.raises(ValueError, match="stash"):
        make_planner(stashes)
