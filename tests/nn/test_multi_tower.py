"""A multi-tower model with its towers on different hosts is the model on one device."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.nn import MLP, DisaggregatedMultiTower, EmbeddingTower

TOWERS = (("user", "city"), ("item", "shop"))


def make(towers=TOWERS):
    rngs = nnx.Rngs(0)

    def tower(names):
        tables = [jaxrec.EmbeddingBagConfig(name, 40, 4) for name in names]
        embeddings = jaxrec.EmbeddingBagCollection(
            tables, optimizer=jaxrec.optim.sgd(1.0), rngs=rngs
        )
        return EmbeddingTower(embeddings, MLP(8, (3,), rngs=rngs))

    over = MLP(6, (5, 1), activation_on_last=False, rngs=rngs)
    return DisaggregatedMultiTower([tower(names) for names in towers], over)


@nnx.jit
def step(model, optimizer, features, labels):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(features)[:, 0], labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


@pytest.mark.parametrize("exchange", ["rows", "sums"])
def test_towers_on_two_hosts(exchange):
    rng = np.random.default_rng(0)
    names = [name for names in TOWERS for name in names]
    bags = {n: [rng.integers(0, 40, k % 4).tolist() for k in range(16)] for n in names}
    features = jaxrec.KeyedJaggedArray.from_lists(bags)
    labels = rng.integers(0, 2, 16).astype(np.float32)

    alone = make()
    losses = [
        float(step(alone, optimizer, features, labels))
        for optimizer in [jaxrec.Optimizer(alone, optax.sgd(0.1))]
        for _ in range(3)
    ]

    mesh = jax.make_mesh((2, 4), ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    model = make()
    plan = jaxrec.plan.ShardingPlan.from_dict(model.placements(num_hosts=2, exchange=exchange))
    model = jaxrec.shard(model, plan, mesh)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    features, labels = jaxrec.mesh.shard_batch((features, labels), mesh)
    found = [float(step(model, optimizer, features, labels)) for _ in range(3)]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for one, other in zip(alone.towers.towers, model.towers.towers, strict=True):
        for name in (table.name for table in one.configs):
            np.testing.assert_allclose(
                other.embeddings.table(name), one.embeddings.table(name), rtol=1e-5, atol=1e-6
            )

    # Each tower's rows are on its host alone.
    for host, tower in enumerate(model.towers.towers):
        (rows,) = tower.embeddings.tables.get_value().rows.values()
        for shard in rows.addressable_shards:
            is_here = shard.device in mesh.devices[host]
            assert np.any(np.asarray(shard.data)) == is_here


def test_a_table_in_two_towers():
    with pytest.raises(ValueError, match=r"\['user'\] are in two"):
        make((("user", "city"), ("item", "user")))


def test_dense_features_need_layers():
    features = jaxrec.KeyedJaggedArray.from_lists({n: [[1]] for t in TOWERS for n in t})
    with pytest.raises(ValueError, match="come together"):
        make()(features, np.ones((1, 3), np.float32))
