"""Copies of tables learn from their own samples and are averaged."""

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
from jaxrec import embed
from jaxrec.mesh import average_replicas, data_parallel, row_wise, shard_batch, table_wise
from tests.mesh.test_training import (
    BATCHES,
    OPTIMIZERS,
    ROWS,
    Ranker,
    draw_batch,
    one_device,
    train_step,
)

PLACEMENTS = {
    "a": row_wise(),
    "b": row_wise(exchange="pooled"),
    "c": table_wise(2),
    "d": row_wise(),
}


def make_mesh():
    return jax.make_mesh((2, 4), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)


def test_an_average_after_every_step_trains_as_one():
    expected, alone = one_device("sgd")
    mesh = make_mesh()
    plan = jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS | {"d": data_parallel()})
    model = jaxrec.shard(Ranker(OPTIMIZERS["sgd"]), plan, mesh, replica_axis="replica")
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    step = nnx.jit(train_step, donate_argnums=(0, 1))
    losses = []
    for batch in BATCHES:
        losses.append(float(step(model, optimizer, *shard_batch(batch, mesh))))
        average_replicas(model)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for table in ROWS:
        found = model.embeddings.table(table)
        np.testing.assert_allclose(found, alone.embeddings.table(table), rtol=1e-5, atol=1e-7)


def test_copies_learn_apart_between_averages():
    """As two trainings on one device each do that see half of each batch.

    Every other batch on the mesh says which sample has which bag, though each has its own.
    """

    def collection():
        tables = [jaxrec.EmbeddingBagConfig(name, rows, 8) for name, rows in ROWS.items()]
        optimizer = jaxrec.optim.rowwise_adagrad(0.1, eps=1e-3, clip_value=0.05)
        return jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=nnx.Rngs(0))

    @nnx.jit(donate_argnums=0)
    def step(model, features, targets):
        tables = model.tables.get_value()
        pooled, residuals = embed.lookup(tables, features)

        def loss(pooled):
            return jnp.mean((pooled.values.sum(axis=1) - targets) ** 2)

        gradients = jax.grad(loss)(pooled)
        model.tables.set_value(embed.apply_gradients(tables, residuals, gradients, 0))

    batches = [draw_batch(seed) for seed in range(4)]
    halves = [collection(), collection()]
    for number, (features, targets) in enumerate(batches):
        for half, model in enumerate(halves):
            samples = slice(8 * half, 8 * half + 8)
            bags = {key: features[key].to_lists()[samples] for key in ROWS}
            part = jaxrec.KeyedJaggedArray.from_lists(bags, capacities=dict.fromkeys(ROWS, 32))
            step(model, part, targets[samples])
        if number % 2:
            for table in ROWS:
                both = [model.table(table) for model in halves]
                states = [model.table_state(table)["accumulator"] for model in halves]
                for model in halves:
                    model.load_table(table, (both[0] + both[1]) / 2)
                    model.load_table_state(table, {"accumulator": (states[0] + states[1]) / 2})

    mesh, plan = make_mesh(), jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS)
    model = jaxrec.shard(collection, plan, mesh, replica_axis="replica")
    for number, (features, targets) in enumerate(batches):
        if number % 2:
            own = np.tile(np.arange(features.batch_size, dtype=np.int32), (len(features.keys), 1))
            features = dataclasses.replace(features, inverse_indices=own)
        step(model, *shard_batch((features, targets), mesh))
        if number % 2:
            average_replicas(model)
    for table in ROWS:
        expected = halves[0].table(table)
        np.testing.assert_allclose(model.table(table), expected, rtol=1e-5, atol=1e-6)
        state = halves[0].table_state(table)["accumulator"]
        # Gradients of up to 0.05 are rounded by about 1e-7, and their squares by 2 * 0.05 * 1e-7.
        np.testing.assert_allclose(
            model.table_state(table)["accumulator"], state, rtol=1e-5, atol=1e-8
        )


def test_errors():
    plan = jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS)
    with pytest.raises(ValueError, match="replica_axis='pod' is not one of the mesh's axes"):
        jaxrec.shard(Ranker(OPTIMIZERS["sgd"]), plan, make_mesh(), replica_axis="pod")
    with pytest.raises(ValueError, match="no tables with replicas"):
        average_replicas(Ranker(OPTIMIZERS["sgd"]))
    mesh = jax.make_mesh((2,), ("replica",), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="no axis but replica_axis='replica'"):
        jaxrec.shard(Ranker(OPTIMIZERS["sgd"]), plan, mesh, replica_axis="replica")
