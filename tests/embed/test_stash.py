"""Residuals of lookups in host memory, or computed again: the numbers of a step stay."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.embed.stash import STASHES, check_stash
from jaxrec.mesh import column_wise, data_parallel, row_wise, table_wise

BATCH, ROWS = 16, 60
FEATURES = ("a", "b", "c")
PLACEMENTS = {
    "rows": {name: row_wise() for name in FEATURES},
    "pooled": {name: row_wise(exchange="pooled") for name in FEATURES},
    "bags": {name: table_wise(device=i) for i, name in enumerate(FEATURES)},
    "mixed": {"a": column_wise(devices=[0, 3]), "b": data_parallel(), "c": row_wise()},
}
OPTIMIZERS = {
    "rowwise_adagrad": jaxrec.optim.rowwise_adagrad(0.1),
    "adam": jaxrec.optim.adam(0.1),
}


class Ranker(nnx.Module):
    def __init__(self, stash, *, is_pooled=True, optimizer="rowwise_adagrad", **options):
        rngs = nnx.Rngs(0)
        table, collection = (
            (jaxrec.EmbeddingBagConfig, jaxrec.EmbeddingBagCollection)
            if is_pooled
            else (jaxrec.EmbeddingConfig, jaxrec.EmbeddingCollection)
        )
        self.embeddings = collection(
            [table(name, ROWS, 8, feature_names=(name,), **options) for name in FEATURES],
            optimizer=OPTIMIZERS[optimizer],
            rngs=rngs,
            stash=stash,
        )
        self.over = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, features):
        out = self.embeddings(features)
        each = [out[name] for name in FEATURES]
        arrays = [x if isinstance(x, jax.Array) else x.values for x in each]
        return sum(self.over(jnp.tanh(x)).sum() for x in arrays) / BATCH


def make_batch(seed):
    rng = np.random.default_rng(seed)
    lists = {
        name: [rng.integers(0, ROWS, rng.integers(0, 5)).tolist() for _ in range(BATCH)]
        for name in FEATURES
    }
    return jaxrec.KeyedJaggedArray.from_lists(lists)


def loss_fn(model, features):
    return model(features)


def train(model, put=lambda batch: batch, steps=3):
    optimizer = jaxrec.Optimizer(model, optax.adam(0.1))

    @nnx.jit
    def step(model, optimizer, features):
        loss, gradients = jaxrec.value_and_grad(loss_fn)(model, features)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(model, optimizer, put(make_batch(seed)))) for seed in range(steps)]
    tables = {name: np.asarray(model.embeddings.table(name)) for name in FEATURES}
    return losses, tables, np.asarray(model.over.kernel[...])


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("stash", STASHES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_pooled": False},
        {"optimizer": "adam"},
        {"is_pooled": False, "optimizer": "adam"},
        {"pooling": "max"},
        {"pooling": "mean"},
    ],
    ids=str,
)
def test_one_device(stash, options):
    assert_equal(train(Ranker(stash, **options)), train(Ranker(None, **options)))


@pytest.mark.slow
@pytest.mark.parametrize("stash", STASHES)
@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("placement", "options"),
    [
        ("rows", {}),
        ("rows", {"is_pooled": False, "optimizer": "adam"}),
        ("pooled", {}),
        ("bags", {"optimizer": "adam"}),
        ("mixed", {"is_pooled": False}),
    ],
    ids=str,
)
def test_mesh(stash, axis, placement, options):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis,))

    def trained(stash):
        plan = jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS[placement])
        model = jaxrec.shard(Ranker(stash, **options), plan, mesh)
        with jax.set_mesh(mesh):
            return train(model, lambda batch: jaxrec.mesh.shard_batch(batch, mesh), steps=2)

    assert_equal(trained(stash), trained(None))


@pytest.mark.parametrize("stash", STASHES)
def test_without_jit(stash):
    def gradients(stash):
        value, gradients = jaxrec.value_and_grad(loss_fn)(Ranker(stash), make_batch(0))
        return value, gradients.dense, gradients.rows()

    assert_equal(gradients(stash), gradients(None))


@pytest.mark.parametrize("stash", STASHES)
def test_rematerialized_lookup_and_weights_of_the_loss(stash):
    class Weighted(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            table = jaxrec.EmbeddingBagConfig("a", ROWS, 8, feature_names=("a",))
            self.embeddings = jaxrec.EmbeddingBagCollection(
                [table], is_weighted=True, rngs=rngs, stash=stash
            )
            self.weight = nnx.Param(jnp.float32(0.5))

        def __call__(self, batch):
            weights = jnp.full(batch.values.shape, self.weight[...])
            weighted = dataclasses.replace(batch, weights=weights)
            return jnp.tanh(self.embeddings(weighted).values).sum()

    batch = make_batch(0).select(["a"])

    def gradients(is_rematerialized):
        def loss(model):
            call = nnx.remat(lambda model: model(batch)) if is_rematerialized else None
            return model(batch) if call is None else call(model)

        value, gradients = jaxrec.value_and_grad(loss)(Weighted())
        return value, gradients.dense, gradients.rows()

    one, other = gradients(True), gradients(False)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), one, other)


def test_programs():
    """Residuals cross to host memory and back, or are computed twice."""
    # Lowered for GPUs: on CPUs JAX drops the copies, since host and device are one memory.
    texts = {}
    for stash in (None, *STASHES):
        graph, state = nnx.split(Ranker(stash))

        def gradient(state, features, graph=graph):
            gradients = jaxrec.value_and_grad(loss_fn)(nnx.merge(graph, state), features)[1]
            return gradients.rows()

        traced = jax.jit(gradient).trace(state, make_batch(0))
        texts[stash] = traced.lower(lowering_platforms=("cuda",)).as_text()
    copies = {stash: text.count('"pinned_host"') for stash, text in texts.items()}
    assert copies["host"] > 0
    assert copies[None] == copies["recompute"] == 0
    barriers = {stash: text.count("optimization_barrier") for stash, text in texts.items()}
    assert barriers["host"] == barriers["recompute"] == barriers[None] + 1


def exchanges(stash):
    """Return the number of all-to-alls that a step over eight devices runs."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    plan = jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS["pooled"])
    graph, state = nnx.split(jaxrec.shard(Ranker(stash), plan, mesh))

    def gradient(state, features):
        return jaxrec.value_and_grad(loss_fn)(nnx.merge(graph, state), features)[1].rows()

    features = jaxrec.mesh.shard_batch(make_batch(0), mesh)
    program = jax.jit(gradient).lower(state, features).compile().as_text()
    return len(re.findall(r" all-to-all(?:-start)?\(", program))


def test_rows_are_not_exchanged_twice():
    # The exchange of ids runs again. That of rows is dead code, which XLA removes.
    assert exchanges("host") == exchanges(None)
    assert exchanges("recompute") == exchanges(None) + 1


def test_unknown_stash():
    with pytest.raises(ValueError, match=r"stash is 'host' or 'recompute'.*got 'disk'"):
        Ranker("disk")


def test_no_pinned_memory():
    class Memory:
        kind = "device"

    class Device:
        def addressable_memories(self):
            return [Memory()]

    check_stash("recompute", Device())
    with pytest.raises(ValueError, match=r"needs memory of kind 'pinned_host'.*recompute"):
        check_stash("host", Device())
