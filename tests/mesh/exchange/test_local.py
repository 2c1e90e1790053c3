"""A mesh of one device computes what tables without a mesh compute, by the same operations."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import column_wise, row_wise, shard_batch, table_wise
from jaxrec.mesh.exchange import ALONE, ROWS
from jaxrec.mesh.exchange.rows import Rows
from tests.mesh.exchange.harness import train_step

pytestmark = pytest.mark.jax_version

ROWS_OF = {"user": 40, "item": 15, "shop": 10}
BATCH, DIM = 12, 4
PLACEMENTS = {
    "row_wise": row_wise(),
    "row_wise_pooled": row_wise(exchange="pooled"),
    "buckets": row_wise(buckets=5),
    "table_wise": table_wise(0),
    "column_wise": column_wise(),
}
OPTIMIZERS = {
    "clip_norm": jaxrec.optim.sgd(0.1, clip_norm=0.5),
    "rowwise_adagrad": jaxrec.optim.rowwise_adagrad(0.1),
    "clip_value": jaxrec.optim.adam(0.1, clip_value=0.2),
}


class Ranker(nnx.Module):
    def __init__(self, optimizer):
        configs = [
            jaxrec.EmbeddingBagConfig(name, rows, DIM, pooling="mean")
            for name, rows in ROWS_OF.items()
        ]
        self.embeddings = jaxrec.EmbeddingBagCollection(
            configs, optimizer=optimizer, rngs=nnx.Rngs(0)
        )
        self.over = nnx.Linear(DIM * len(configs), 1, rngs=nnx.Rngs(1))

    def __call__(self, features):
        return self.over(self.embeddings(features).values)[:, 0]


def draw(rng, batch=BATCH):
    lists = {
        name: [rng.integers(rows, size=rng.integers(4)).tolist() for _ in range(batch)]
        for name, rows in ROWS_OF.items()
    }
    features = jaxrec.KeyedJaggedArray.from_lists(lists, capacities=dict.fromkeys(lists, 4 * batch))
    return features, rng.integers(2, size=batch).astype(np.float32)


def place_on(mesh, batch):
    return shard_batch(batch, mesh, capacities=dict.fromkeys(ROWS_OF, 48))


TX = optax.sgd(0.01)  # with one object for all, programs are compiled once


def train(model, place=lambda batch: batch):
    optimizer, rng = jaxrec.Optimizer(model, TX), np.random.default_rng(0)
    losses = [float(train_step(model, optimizer, *place(draw(rng)))) for _ in range(3)]
    return losses, {name: np.asarray(model.embeddings.table(name)) for name in ROWS_OF}


@pytest.fixture
def mesh():
    return jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))


def shard(make, placement, mesh):
    plan = jaxrec.plan.ShardingPlan.from_dict(dict.fromkeys(ROWS_OF, placement))
    return jaxrec.shard(make, plan, mesh)


def exchanges(model):
    return set(model.embeddings.tables.get_value().placed.layout.exchanges)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_training_gives_the_bits_of_tables_without_a_mesh(placement, optimizer, mesh):
    def make():
        return Ranker(OPTIMIZERS[optimizer])

    model = shard(make, PLACEMENTS[placement], mesh)
    assert exchanges(model) == {ALONE}
    losses, tables = train(model, lambda batch: place_on(mesh, batch))
    expected_losses, expected_tables = train(make())
    assert losses == expected_losses
    for name, table in tables.items():
        np.testing.assert_array_equal(table, expected_tables[name], err_msg=name)


def test_rows_of_single_ids(mesh):
    def make():
        configs = [jaxrec.EmbeddingConfig(name, rows, DIM) for name, rows in ROWS_OF.items()]
        optimizer = jaxrec.optim.sgd(1.0)
        return jaxrec.EmbeddingCollection(configs, optimizer=optimizer, rngs=nnx.Rngs(0))

    lists = {"user": [[3, 3], []], "item": [[14], [1]], "shop": [[], [9]]}
    features = jaxrec.KeyedJaggedArray.from_lists(lists)
    plan = jaxrec.plan.ShardingPlan.from_dict(dict.fromkeys(ROWS_OF, row_wise()))
    sharded = jaxrec.shard(make, plan, mesh)
    assert set(sharded.tables.get_value().placed.layout.exchanges) == {ALONE}
    expected, found = make()(features), sharded(shard_batch(features, mesh))
    for name, rows in expected.items():
        np.testing.assert_array_equal(found[name].values[0], rows.values, err_msg=name)


def test_columns_that_are_cut_on_one_device_keep_their_exchange(mesh):
    model = shard(lambda: Ranker(jaxrec.optim.sgd(0.1)), column_wise((0, 0), exchange="rows"), mesh)
    assert exchanges(model) == {ROWS}


def test_ids_are_flattened_once(mesh):
    def calls(model, place):
        store = model.embeddings.tables.get_value()
        features, _ = place(draw(np.random.default_rng(0)))

        def step(store, features):
            outputs, residuals = store.lookup(features)
            gradients = store.row_gradients(residuals, jax.tree.map(jnp.ones_like, outputs))
            return store.update([gradients], 0)

        text = jax.jit(step).lower(store, features).as_text()
        return text.count("custom_call @jaxrec"), "all_to_all" in text

    def make():
        return Ranker(jaxrec.optim.sgd(0.1))

    plain = calls(make(), lambda batch: batch)
    on_mesh = calls(shard(make, row_wise(), mesh), lambda batch: shard_batch(batch, mesh))
    assert on_mesh == plain
    assert plain[0] > 0


@dataclasses.dataclass(frozen=True)
class OwnRows(Rows):
    """The exchange of rows as one of a user's own, which is used as it is."""

    name = "own_rows"


def test_replicas_of_one_device_each():
    """Tables of eight replicas beside the same with an exchange that sends rows."""
    mesh = jax.make_mesh((8, 1), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
    tables, exchanges_of = {}, {}
    for exchange in ("rows", OwnRows()):
        plan = jaxrec.plan.ShardingPlan.from_dict(
            dict.fromkeys(ROWS_OF, row_wise(exchange=exchange))
        )
        model = jaxrec.shard(
            lambda: Ranker(jaxrec.optim.adam(0.1)), plan, mesh, replica_axis="replica"
        )
        exchanges_of[exchange] = exchanges(model)
        optimizer, rng = jaxrec.Optimizer(model, TX), np.random.default_rng(0)
        for _ in range(3):
            train_step(model, optimizer, *place_on(mesh, draw(rng, 16)))
        jaxrec.mesh.average_replicas(model)
        tables[exchange] = {name: np.asarray(model.embeddings.table(name)) for name in ROWS_OF}
    assert exchanges_of == {"rows": {ALONE}, OwnRows(): {OwnRows()}}
    for name, table in tables["rows"].items():
        np.testing.assert_allclose(table, tables[OwnRows()][name], rtol=1e-5, err_msg=name)
