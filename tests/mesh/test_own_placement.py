"""A sharding type of one's own, outside of the package, trains like one device and is planned."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import Placement, shard_batch
from jaxrec.mesh.placement import Split, cut_evenly
from jaxrec.plan import ParameterConstraints, Planner, ShardingPlan, Topology
from tests.mesh.exchange.harness import train_step

DEVICES, ROWS, DIM, BATCH = 8, 37, 4, 16
NAMES = ("user", "item")


@dataclasses.dataclass(frozen=True)
class Halves(Placement):
    """The left columns over the first half of the devices, the right ones over the second half."""

    kind, abbreviation = "halves", "HALF"

    @staticmethod
    def halves(num_devices):
        half = num_devices // 2
        return tuple(range(half)), tuple(range(half, num_devices))

    def cut(self, table, mesh):
        return cut_evenly(table, self.halves(mesh.num_devices))

    @classmethod
    def options(cls, table):
        if table.mesh.num_devices % 2:
            return "the number of devices is odd"
        first, second = cls.halves(table.mesh.num_devices)
        return [Split((first, second), parts=2, column_parts=2, row_parts=len(first))]

    @classmethod
    def at(cls, sites, mesh, exchange, shares=()):
        return cls(exchange=exchange)


def make_model():
    tables = [
        jaxrec.EmbeddingBagConfig("user", ROWS, DIM),
        jaxrec.EmbeddingBagConfig("item", ROWS, DIM, pooling="mean"),
    ]
    return jaxrec.EmbeddingBagCollection(
        tables, optimizer=jaxrec.optim.rowwise_adagrad(0.1), rngs=nnx.Rngs(0)
    )


class Ranker(nnx.Module):
    def __init__(self):
        self.embeddings = make_model()
        self.over = nnx.Linear(2 * DIM, 1, rngs=nnx.Rngs(1))

    def __call__(self, features):
        return self.over(self.embeddings(features).values)[:, 0]


def train(model, place):
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    rng, losses = np.random.default_rng(0), []
    capacities = dict.fromkeys(NAMES, 2 * BATCH)
    for _ in range(3):
        lists = {
            key: [rng.integers(ROWS, size=rng.integers(3)).tolist() for _ in range(BATCH)]
            for key in NAMES
        }
        features = jaxrec.KeyedJaggedArray.from_lists(lists, capacities=capacities)
        batch = place((features, rng.integers(2, size=BATCH).astype(np.float32)))
        losses.append(float(train_step(model, optimizer, *batch)))
    return [losses, *(np.asarray(model.embeddings.table(name)) for name in NAMES)]


def test_training_equals_one_device():
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    plan = ShardingPlan.from_dict(
        {"user": Halves(exchange="rows"), "item": Halves(exchange="pooled")}
    )
    capacities = dict.fromkeys(NAMES, 2 * BATCH // DEVICES)
    sharded = train(
        jaxrec.shard(Ranker, plan, mesh),
        lambda batch: shard_batch(batch, mesh, capacities=capacities),
    )
    for array, expected in zip(sharded, train(Ranker(), lambda batch: batch), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5)


def test_the_planner_considers_it_and_its_plan_goes_to_json_and_back():
    constraints = {
        name: ParameterConstraints(sharding_types=["halves", "table_wise"], min_column_width=2)
        for name in NAMES
    }
    planner = Planner(Topology.named("h100", devices=DEVICES), constraints)
    ways = planner.options(make_model(), batch_size=BATCH)["user"].ways
    assert {
        "table_wise by rows",
        "halves in 2 parts by rows",
        "halves in 2 parts by pooled",
    } <= set(ways)
    only = dict.fromkeys(constraints, ParameterConstraints(sharding_types=["halves"]))
    plan = dataclasses.replace(planner, constraints=only).plan(make_model(), batch_size=BATCH)
    assert {type(placement) for placement in plan.to_dict().values()} == {Halves}
    assert "HALF" in str(plan)
    assert ShardingPlan.from_json(plan.to_json()) == plan
    odd = dataclasses.replace(planner, topology=Topology.named("h100", devices=3))
    left_out = odd.options(make_model(), batch_size=3)["user"].left_out
    assert "halves: the number of devices is odd" in left_out
