"""Copies of tables learn from their own samples and are averaged."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec import embed
from jaxrec.mesh import (
    average_replicas,
    data_parallel,
    row_wise,
    shard_batch,
    synchronize_replicas,
    table_wise,
)
from tests.mesh.test_training import (
    BATCHES,
    OPTIMIZERS,
    ROWS,
    TX,
    Ranker,
    draw_batch,
    one_device,
    place_on,
    train_step,
)

pytestmark = pytest.mark.jax_version

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
    optimizer, place, losses = jaxrec.Optimizer(model, TX), place_on(mesh), []
    for batch in BATCHES:
        losses.append(float(train_step(model, optimizer, *place(batch))))
        average_replicas(model)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for table in ROWS:
        found = model.embeddings.table(table)
        np.testing.assert_allclose(found, alone.embeddings.table(table), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
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
        step(model, *place_on(mesh)((features, targets)))
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


def small_mesh():
    return jax.make_mesh((2, 2), ("replica", "data"), devices=jax.devices()[:4])


def one_collection(optimizer, dtype="float32", names=("t",)):
    configs = [jaxrec.EmbeddingBagConfig(name, 4, 2, dtype=dtype) for name in names]
    return jaxrec.EmbeddingBagCollection(configs, optimizer=optimizer, rngs=nnx.Rngs(0))


@nnx.jit
def descend(model, features):
    """Move each row by its number of lookups in the replica's samples, over their number."""
    tables = model.tables.get_value()
    pooled, residuals = embed.lookup(tables, features)
    gradients = jax.tree.map(lambda x: 0 * x + 1 / len(x), pooled)  # placed as x is
    model.tables.set_value(embed.apply_gradients(tables, residuals, gradients, 0))


class TestOuterSteps:
    """`synchronize_replicas` beside the formulas of DiLoCo in float64."""

    @pytest.mark.parametrize("placement", [row_wise(), table_wise(1), data_parallel()], ids=str)
    def test_rows_and_velocity(self, placement):
        rate, outer, momentum = 0.5, 0.7, 0.9
        optimizer = jaxrec.optim.diloco(optimizer=jaxrec.optim.sgd(rate))
        plan, mesh = jaxrec.plan.ShardingPlan.from_dict({"t": placement}), small_mesh()
        model = jaxrec.shard(one_collection(optimizer), plan, mesh, replica_axis="replica")
        anchor = np.asarray(model.table("t"), np.float64)
        velocity = np.zeros_like(anchor)
        random = np.random.default_rng(0)
        for _ in range(3):  # outer steps
            moved = np.zeros_like(anchor)
            for _ in range(2):
                ids = random.integers(0, 4, (4, 3))
                features = jaxrec.KeyedJaggedArray.from_dense({"t": ids})
                descend(model, shard_batch(features, mesh))
                # The mean over all samples is that of the means over the replicas' samples.
                counts = np.bincount(ids.ravel(), minlength=4)
                moved -= rate * counts[:, None] / len(ids)
            synchronize_replicas(model)
            velocity = momentum * velocity + moved
            anchor = anchor + outer * (moved + momentum * velocity)
            np.testing.assert_allclose(model.table("t"), anchor, rtol=1e-5, atol=1e-6)
            state = model.table_state("t")
            np.testing.assert_allclose(state["outer_velocity"], velocity, rtol=1e-5, atol=1e-6)
            assert not np.any(state["moved"])
        before = np.asarray(model.table("t"))
        average_replicas(model)
        np.testing.assert_array_equal(model.table("t"), before)

    def test_other_optimizers_are_averaged(self):
        plan, mesh = jaxrec.plan.ShardingPlan.from_dict({"t": row_wise()}), small_mesh()
        models = [
            jaxrec.shard(one_collection(optimizer), plan, mesh, replica_axis="replica")
            for optimizer in (
                jaxrec.optim.sgd(0.5),
                jaxrec.optim.diloco(
                    optimizer=jaxrec.optim.sgd(0.5), outer_learning_rate=1, outer_momentum=0
                ),
            )
        ]
        features = jaxrec.KeyedJaggedArray.from_dense({"t": np.arange(8).reshape(4, 2) % 3})
        for model in models:
            descend(model, shard_batch(features, mesh))
            synchronize_replicas(model)
        np.testing.assert_allclose(models[0].table("t"), models[1].table("t"), rtol=1e-6)

    def test_errors(self):
        optimizer = jaxrec.optim.diloco(optimizer=jaxrec.optim.sgd(0.5))
        plan, mesh = jaxrec.plan.ShardingPlan.from_dict({"t": row_wise()}), small_mesh()
        model = one_collection(optimizer, dtype="int8")
        model = jaxrec.shard(model, plan, mesh, replica_axis="replica")
        with pytest.raises(TypeError, match=r"table 't' .* packed rows .* give the table dtype"):
            synchronize_replicas(model)
        with pytest.raises(ValueError, match="no tables with replicas"):
            synchronize_replicas(one_collection(optimizer))


class Two(nnx.Module):
    def __init__(self):
        self.near = one_collection(jaxrec.optim.sgd(0.5), names=("a",))
        self.far = one_collection(jaxrec.optim.sgd(0.5), names=("b",))


class TestSomeCollections:
    """One collection has replicas, another lies over the whole mesh."""

    @pytest.mark.parametrize("make", [Two, lambda: Two()], ids=["made", "by a function"])
    def test_only_named_tables_have_replicas(self, make):
        mesh = small_mesh()
        plan = jaxrec.plan.ShardingPlan.from_dict({"a": row_wise(), "b": row_wise()})
        model = jaxrec.shard(
            make() if make is Two else make, plan, mesh, replica_axis={"a": "replica"}
        )
        near, far = (each.tables.get_value() for each in (model.near, model.far))
        assert (near.num_replicas, far.num_replicas) == (2, 1)
        assert (near.axes, far.axes) == (("data",), ("replica", "data"))
        before = {name: np.asarray(getattr(model, name).table(key)) for name, key in NAMES}
        # Rows 0 and 3: the first replica's samples, and the other's.
        ids = np.int32([[0], [0], [3], [3]])
        for name, key in NAMES:
            features = jaxrec.KeyedJaggedArray.from_dense({key: ids})
            descend(getattr(model, name), shard_batch(features, mesh))
        moved = np.float32([[1], [0], [0], [1]])
        np.testing.assert_allclose(model.far.table("b"), before["far"] - 0.25 * moved, rtol=1e-5)
        average_replicas(model)
        np.testing.assert_allclose(model.near.table("a"), before["near"] - 0.25 * moved, rtol=1e-5)

    def test_errors(self):
        mesh = small_mesh()
        plan = jaxrec.plan.ShardingPlan.from_dict({"a": row_wise(), "b": row_wise()})
        both = one_collection(jaxrec.optim.sgd(0.5), names=("a", "b"))
        with pytest.raises(ValueError, match="make a collection for each axis"):
            jaxrec.shard(both, plan, mesh, replica_axis={"a": "replica"})
        with pytest.raises(ValueError, match=r"that the plan does not place: \['c'\]"):
            jaxrec.shard(Two(), plan, mesh, replica_axis={"c": "replica"})
        with pytest.raises(ValueError, match="replica_axis='pod' is not one of the mesh's axes"):
            jaxrec.shard(Two(), plan, mesh, replica_axis={"a": "pod"})
        topology = jaxrec.plan.Topology.from_mesh(mesh)
        planned = jaxrec.plan.Planner(topology).plan(Two(), batch_size=8)
        with pytest.raises(ValueError, match="plan for each number of devices, and join the plans"):
            jaxrec.shard(Two(), planned, mesh, replica_axis={"a": "replica"})


NAMES = (("near", "a"), ("far", "b"))
