"""Scenarios that test_processes.py runs in two processes."""

from __future__ import annotations

import dataclasses
import os
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import column_wise, data_parallel, dense, row_wise, shard_batch, table_wise
from jaxrec.mesh.agree import gather_texts
from jaxrec.mesh.call_checks import SWITCH, CallMismatchError
from jaxrec.plan import ParameterConstraints, Planner, Topology

ROWS = {"a": 40, "b": 31, "c": 24, "d": 9}
PLACEMENTS = {
    "a": row_wise(),
    "b": row_wise(exchange="pooled"),
    "c": column_wise((3, 0)),
    "d": data_parallel(),
}
SAMPLES = 16


def everywhere():
    """The mesh of all processes' devices."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def meshes_without_some_devices():
    """Steps would wait for a process that has none, or run beside exchanges among processes."""
    plan = jaxrec.plan.ShardingPlan.from_dict({"a": row_wise()})
    of_process = [[d for d in jax.devices() if d.process_index == process] for process in (0, 1)]
    for devices, problem in (
        (of_process[0], "process 1 has no device in the mesh, and 2 processes"),
        ([of_process[0][0], of_process[1][0]], "the mesh has one of the 2 CPU devices of a"),
    ):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
        with pytest.raises(ValueError, match=problem):
            jaxrec.shard(lambda: Ranker("a"), plan, mesh)


def mine():
    """The samples of this process."""
    process, count = jax.process_index(), jax.process_count()
    return slice(process * SAMPLES // count, (process + 1) * SAMPLES // count)


class Ranker(nnx.Module):
    def __init__(self, names=tuple(ROWS)):
        rngs = nnx.Rngs(0)
        self.embeddings = jaxrec.EmbeddingBagCollection(
            [jaxrec.EmbeddingBagConfig(name, ROWS[name], 4) for name in names],
            optimizer=jaxrec.optim.rowwise_adagrad(0.1),
            rngs=rngs,
        )
        self.over = nnx.Linear(4 * len(names), 1, rngs=rngs)

    def __call__(self, features):
        return self.over(self.embeddings(features).values)[:, 0]


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, features, labels):
    def loss_fn(model):
        return jnp.square(model(features) - labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def draw(seed, shared):
    """Bags by key, the bag of each sample (or None), and labels, of the whole batch."""
    # Bags are as long in every batch, so that one program serves them. The first are longer, so
    # that processes need different capacities.
    lengths = np.random.default_rng(0).integers(0, [[12]] * (SAMPLES // 2) + [[2]] * (SAMPLES // 2))
    rng = np.random.default_rng(seed)
    bags = {
        key: [rng.integers(0, rows, size).tolist() for size in lengths[:, 0]]
        for key, rows in ROWS.items()
    }
    inverse = rng.integers(0, SAMPLES, (len(ROWS), SAMPLES)) if shared else None
    return bags, inverse, rng.normal(size=SAMPLES).astype(np.float32)


def pack(bags, inverse, labels, part=slice(None)):
    if inverse is None:
        bags = {key: of_key[part] for key, of_key in bags.items()}
        return jaxrec.KeyedJaggedArray.from_lists(bags), labels[part]
    inverse = inverse[:, part]
    return jaxrec.KeyedJaggedArray.from_lists(bags, inverse_indices=inverse), labels[part]


def train():
    """A model over all processes' devices follows one on a device of this process alone."""
    mesh = everywhere()
    alone = Ranker()
    model = jaxrec.shard(Ranker, plan(PLACEMENTS), mesh)
    optimizers = [jaxrec.Optimizer(each, optax.adam(0.1)) for each in (alone, model)]
    for step in range(3):
        drawn = draw(step, shared=False)
        expected = train_step(alone, optimizers[0], *pack(*drawn))
        loss = train_step(model, optimizers[1], *shard_batch(pack(*drawn, mine()), mesh))
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
    same_tables(model, alone)
    shared = draw(3, shared=True)
    expected = outputs_of(alone, *shared[:2])[mine()]
    outputs = nnx.jit(Ranker.__call__)(model, shard_batch(pack(*shared, mine()), mesh)[0])
    found = np.concatenate([shard.data for shard in outputs.addressable_shards])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    with mock.patch.object(dense, "MIN_SHARDED_SIZE", 16):  # the kernel is sharded
        move(model, alone, mesh)


def outputs_of(model, bags, inverse):
    """Outputs of a model on one device for the whole batch, in NumPy and float64."""
    pooled = []
    for (key, of_key), bag_of_sample in zip(bags.items(), inverse, strict=True):
        table = np.asarray(model.embeddings.table(key), np.float64)
        pooled.append(np.stack([table[bag].sum(axis=0) for bag in of_key])[bag_of_sample])
    return (np.concatenate(pooled, axis=1) @ model.over.kernel[...] + model.over.bias[...])[:, 0]


def move(model, alone, mesh):
    """A model that moves to other devices goes on as before, with a sharded dense part."""
    anew = plan(dict.fromkeys(ROWS, table_wise(1)))
    moved = jaxrec.shard(alone, anew, mesh, dense="fsdp")
    same_tables(moved, model)
    drawn = shard_batch(pack(*draw(3, shared=False), mine()), mesh)
    losses = [
        train_step(each, jaxrec.Optimizer(each, optax.adam(0.1)), *drawn) for each in (moved, model)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    same_tables(moved, model)
    assert not moved.over.kernel.get_raw_value().is_fully_replicated
    whole = jaxrec.shard(moved, anew, mesh).over.kernel.get_raw_value()
    np.testing.assert_allclose(whole, model.over.kernel[...], rtol=1e-5, atol=1e-7)
    jaxrec.shard(moved, anew, mesh, dense="fsdp")


def refuse():
    """What a process says of its own is refused on all of them."""
    mesh, process = everywhere(), jax.process_index()
    theirs = PLACEMENTS | {"a": table_wise(process)}
    refused(
        "the plan differs between processes: process 0 has 'a': .*places=.0,.*, process 1 has 'a'",
        lambda: jaxrec.shard(Ranker, plan(theirs), mesh),
    )
    keys = [f"k{process}"]
    batch = jaxrec.KeyedJaggedArray.from_lists(dict.fromkeys(keys, [[1]] * 4))
    refused(
        "the batch differs between processes: process 0 has .* keys k0, process 1 has .* keys k1",
        lambda: shard_batch(batch, mesh),
    )


def plan_together():
    """Every process plans with numbers of its own, and all have the plan of process 0."""
    mesh, process = everywhere(), jax.process_index()
    constraints = {
        "a": ParameterConstraints(pooling_factors=1 + 100 * process),
        "b": ParameterConstraints(placement=column_wise((1, 3))),
    }
    topology = dataclasses.replace(Topology.from_mesh(mesh), memory=10**9 - process)
    made = Planner(topology, constraints).plan(Ranker, batch_size=SAMPLES)
    first, *others = gather_texts(made.to_json())
    assert others == [first]
    assert made.context.fields["topology"]["memory"] == 10**9 - 1
    assert made.to_dict()["b"] == column_wise((1, 3))
    without = dict.fromkeys(ROWS, ParameterConstraints(devices=[process], storages=["device"]))
    tiny = dataclasses.replace(topology, memory=2048)
    planner = Planner(tiny, without, time_limit=1.0)
    with pytest.raises(jaxrec.plan.PlanError, match="no plan fits 4 devices"):
        planner.plan(Ranker, batch_size=SAMPLES)
    refused(
        "the model to plan differs between processes: process 0 has \"table 't'\": 3 x 4 .* "
        "process 1 has \"table 't'\": 4 x 4",
        lambda: Planner(topology).plan(
            [jaxrec.EmbeddingBagConfig("t", 3 + process, 4)], batch_size=SAMPLES
        ),
    )


def pack_alike():
    """Packers of all processes choose the same few capacities, each from lists of its own."""
    mesh, process = everywhere(), jax.process_index()
    rng, packer = np.random.default_rng(process), jaxrec.Packer()

    def lists(samples=SAMPLES):
        return {key: [[1] * n for n in rng.geometric(0.3 - 0.2 * process, samples)] for key in ROWS}

    shapes = []
    for _ in range(40):
        batch = shard_batch(packer.from_lists(lists()), mesh)
        shapes.append(batch.capacities)
        assert batch.values.shape == (4, sum(batch.capacities))
    assert len(set(shapes)) <= 4
    texts = gather_texts(repr(shapes))
    assert texts[0] == texts[1]
    other = jaxrec.Packer.from_dict(packer.to_dict()) if process else jaxrec.Packer()
    refused(
        "the batch differs between processes: process 0 has .* a Packer with sizes",
        lambda: shard_batch(other.from_lists(lists()), mesh),
    )


def same_tables(model, other):
    for name in ROWS:
        np.testing.assert_allclose(
            model.embeddings.table(name), other.embeddings.table(name), rtol=1e-5, atol=1e-6
        )
        for key, state in other.embeddings.table_state(name).items():
            np.testing.assert_allclose(
                model.embeddings.table_state(name)[key], state, rtol=1e-5, atol=1e-7
            )


def plan(placements):
    return jaxrec.plan.ShardingPlan.from_dict(placements)


def refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()


def differ():
    """Processes whose batches, lookups and numbers of calls differ; return what each is told."""
    mesh, process = everywhere(), jax.process_index()
    model = jaxrec.shard(lambda: Ranker("ab"), plan({"a": row_wise(), "b": row_wise()}), mesh)

    @nnx.jit
    def look_up(model, features):
        return model.embeddings(features).values

    def batch():
        return shard_batch({"x": np.zeros((4, 2), np.float32)}, mesh)

    features = jaxrec.KeyedJaggedArray.from_lists({"a": [[1]] * 4, "b": [[1]] * 4})

    def other_features():
        with mock.patch.dict(os.environ, {SWITCH: ""}):  # or `shard_batch` would notice
            return shard_batch(features, mesh, capacities={"a": 8, "b": 8 + 8 * process})

    told = []
    with mock.patch.dict(os.environ, {SWITCH: "3"}):
        batch()
        for call in (
            lambda: shard_batch({"x": np.zeros((4, 2 + process), np.float32)}, mesh),
            lambda: look_up(model, other_features()),
            lambda: process or batch(),
        ):
            try:
                call()
                told.append("")
            except CallMismatchError as error:
                told.append(str(error))
    return told
