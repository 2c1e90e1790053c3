"""Max pooling and padding ids over eight devices, against the same model on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import shard_batch
from jaxrec.plan import ParameterConstraints, Planner, ShardingPlan, Topology

BATCH, ROWS, DIM, PAD = 16, 11, 6, 3
OPTIMIZER = jaxrec.optim.adam(0.1, weight_decay=0.1)
# By table: its pooling, its placement and whether it has a padding id.
FEW = {
    "max_rows": ("max", jaxrec.mesh.row_wise(), True),
    "mean_pooled": ("mean", jaxrec.mesh.row_wise(exchange="pooled"), True),
}
MANY = FEW | {
    "max_columns": ("max", jaxrec.mesh.column_wise(devices=(0, 5)), False),
    "sum_bags": ("sum", jaxrec.mesh.table_wise(device=2), True),
    "max_one_device": ("max", jaxrec.mesh.table_wise(device=3), True),
    "max_replicated": ("max", jaxrec.mesh.data_parallel(), True),
    "max_host": ("max", jaxrec.mesh.table_row_wise(host=1), False),
    "max_host_columns": ("max", jaxrec.mesh.table_column_wise(host=0), True),
    "max_grid": ("max", jaxrec.mesh.grid(hosts=(0, 1)), True),
    "mean_by_host": ("mean", jaxrec.mesh.table_row_wise(host=0, exchange="pooled"), True),
    "mean_rows": ("mean", jaxrec.mesh.row_wise(), True),
}


class Model(nnx.Module):
    """The tables of ``layout``, pooled, and one whose rows are looked up by themselves."""

    def __init__(self, layout, per_id):
        tables = [
            jaxrec.EmbeddingBagConfig(
                name, ROWS, DIM, pooling=pooling, padding_id=PAD if is_padded else None
            )
            for name, (pooling, _, is_padded) in layout.items()
        ]
        self.bags = jaxrec.EmbeddingBagCollection(tables, optimizer=OPTIMIZER, rngs=nnx.Rngs(0))
        self.has_single = per_id
        if per_id:
            config = jaxrec.EmbeddingConfig("single", ROWS, DIM, padding_id=PAD)
            self.single = jaxrec.EmbeddingCollection(
                [config], optimizer=OPTIMIZER, rngs=nnx.Rngs(1)
            )

    def __call__(self, features):
        out = self.bags(features).values
        # Another factor for each column, so that columns have different gradients.
        loss = jnp.sum(out**2 * jnp.arange(1, out.shape[1] + 1)[None])
        if self.has_single:
            loss += jnp.sum(self.single(features)["single"].values ** 2)
        return loss


@nnx.jit
def step(model, features, number):
    loss, gradients = jaxrec.value_and_grad(lambda model: model(features))(model)
    # The norm takes an exchange of its own: only where time matters less.
    norm = gradients.norm() if model.has_single else loss
    model.bags.apply_gradients(gradients.tables["bags"], number)
    if model.has_single:
        model.single.apply_gradients(gradients.tables["single"], number)
    return loss, norm


def batches():
    rng = np.random.default_rng(0)
    names = [*MANY, "single"]
    for _ in range(2):
        # Rows repeat within bags and between devices, and so tie with themselves.
        lists = {
            name: [rng.integers(ROWS, size=rng.integers(5)).tolist() for _ in range(BATCH)]
            for name in names
        }
        yield jaxrec.KeyedJaggedArray.from_lists(lists, capacities=dict.fromkeys(names, 4 * BATCH))


def train(model, place):
    # The first values of a table have ties between rows, which go to the first id of a bag.
    for config in model.bags.configs:
        rows = np.round(4 * np.random.default_rng(1).standard_normal((ROWS, DIM))) / 4
        model.bags.load_table(config.name, rows.astype(np.float32))
    results = [step(model, place(each), number) for number, each in enumerate(batches())]
    tables = {
        config.name: np.asarray(model.bags.table(config.name)) for config in model.bags.configs
    }
    if model.has_single:
        tables["single"] = np.asarray(model.single.table("single"))
    return np.array(results), tables


def compare(layout, axis_type, per_id):
    mesh = jax.make_mesh((2, 4), ("host", "device"), axis_types=(axis_type,) * 2)
    placements = {name: placement for name, (_, placement, _) in layout.items()}
    plan = ShardingPlan.from_dict(placements | {"single": jaxrec.mesh.row_wise()})
    capacities = dict.fromkeys([*MANY, "single"], 8)
    model = jaxrec.shard(lambda: Model(layout, per_id), plan, mesh)
    results, tables = train(model, lambda each: shard_batch(each, mesh, capacities=capacities))
    expected, whole = train(Model(layout, per_id), lambda each: each)
    np.testing.assert_allclose(results, expected, rtol=1e-5)
    for name, rows in whole.items():
        np.testing.assert_allclose(tables[name], rows, rtol=1e-4, atol=1e-6, err_msg=name)
        if name == "single" or layout[name][2]:
            np.testing.assert_array_equal(tables[name][PAD], 0)


def test_training_equals_one_device():
    compare(FEW, AxisType.Auto, per_id=False)


@pytest.mark.slow
def test_every_placement_equals_one_device():
    compare(MANY, AxisType.Explicit, per_id=True)


def test_what_adds_up_rows_refuses_max_pooling():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    plan = ShardingPlan.from_dict({"max_rows": jaxrec.mesh.row_wise(exchange="pooled")})
    layout = {"max_rows": FEW["max_rows"]}
    with pytest.raises(ValueError, match="adds up the rows of a bag, and the pooling is 'max'"):
        jaxrec.shard(lambda: Model(layout, per_id=False), plan, mesh)


def test_the_planner_leaves_those_out():
    layout = {name: FEW[name] for name in ("max_rows", "mean_pooled")}
    bags = Model(layout, per_id=False).bags
    constraints = {name: ParameterConstraints(pooling_factors=20) for name in layout}
    planner = Planner(Topology.named("h100", devices=8), constraints)
    ways = {name: each.ways for name, each in planner.options(bags, batch_size=64).items()}
    assert not any("pooled" in way for way in ways["max_rows"])
    assert any("pooled" in way for way in ways["mean_pooled"])
    planner.plan(bags, batch_size=64)
