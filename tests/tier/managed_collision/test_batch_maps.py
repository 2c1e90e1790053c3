"""Models over a mesh have the maps, slots and rows of one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import column_wise, data_parallel, row_wise, table_wise
from jaxrec.tier.managed_collision import (
    ManagedCollisionEmbeddingBagCollection,
    MultiProbeConfig,
    SortedMapConfig,
    id_words,
)
from jaxrec.train import checkpoint
from tests.copies import find_copies
from tests.tier.managed_collision import models
from tests.users_xla import AS_USERS_DO

PLACEMENTS = {
    "wide": row_wise(),
    "deep": column_wise(devices=(0, 2)),
    "user": table_wise(device=1),
    "hour": data_parallel(),
}


def make_on_mesh(mesh, **options):
    plan = jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS)
    model = jaxrec.shard(lambda: models.Ranker(**options), plan, mesh)
    return model, jaxrec.Optimizer(model, models.TX)


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_training_equals_one_device(axis_type, tmp_path):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    options = {"probed": models.OPT_IN, "initializer": "normal"}
    alone, sharded = models.make(**options), make_on_mesh(mesh, **options)
    rng = np.random.default_rng(0)
    for step in range(5):
        features = models.make_batch(rng)
        loss, expected = models.train_step(*alone, id_words(features, hour=step))
        capacities = dict.fromkeys(features.keys, 8)
        batch = id_words(features, mesh, hour=step, capacities=capacities)
        loss_on_mesh, remapped = models.train_step(*sharded, batch)
        np.testing.assert_allclose(loss_on_mesh, loss, rtol=1e-5)
        assert on_host(remapped) == expected.to_lists()
    models.assert_same(models.contents(*sharded), models.contents(*alone), rtol=2e-4, atol=1e-6)
    if axis_type == AxisType.Explicit:
        return
    # What is saved of a mesh is restored on one device.
    checkpoint.save(tmp_path, *sharded)
    other = models.make(seed=1, **options)
    checkpoint.restore(other[0], tmp_path, other[1])
    models.assert_same(models.contents(*other), models.contents(*sharded))
    sharded[0].eval()
    _, remapped = nnx.jit(lambda model, batch: model(batch))(sharded[0], batch)
    other[0].eval()
    assert on_host(remapped) == other[0](id_words(features))[1].to_lists()
    models.assert_same(models.contents(*other), models.contents(*sharded))


def test_no_copy_of_a_shard():
    """A call in training mode, with its resets, where rows are on two devices."""
    mesh = jax.make_mesh((2,), ("data",))
    rows, dim = 8_002, 4
    config = jaxrec.EmbeddingBagConfig("user", 2 * rows, dim)

    def make():
        rngs = nnx.Rngs(0)
        plain = jaxrec.EmbeddingBagCollection([config], rngs=rngs)
        maps = {"user": SortedMapConfig(64)}
        return ManagedCollisionEmbeddingBagCollection(plain, maps, rngs=rngs)

    plan = jaxrec.plan.ShardingPlan.from_dict({"user": row_wise()})
    graphdef, state = nnx.split(jaxrec.shard(make, plan, mesh))

    def forward(state, batch):
        model = nnx.merge(graphdef, state)
        return model(batch).values, nnx.state(model)

    features = {"user": [[2**40, 2**41], [5]]}
    batch = id_words(jaxrec.KeyedJaggedArray.from_lists(features, id_bits=64), mesh)
    compiled = jax.jit(forward, donate_argnums=0).lower(state, batch).compile(AS_USERS_DO)
    assert find_copies(compiled, (rows, dim)) == []
    assert not any("= f32" in copy for copy in find_copies(compiled, (rows,)))


def on_host(features):
    """The ids of a batch over a mesh by feature and sample."""
    parts = jax.device_get(features)
    lists = [
        jax.tree.map(lambda array, device=device: array[device], parts).to_lists()
        for device in range(parts.lengths.shape[0])
    ]
    return {key: [bag for part in lists for bag in part[key]] for key in features.keys}


def test_a_batch_must_be_where_the_tables_are():
    mesh = jax.make_mesh((2,), ("data",))
    config = jaxrec.EmbeddingBagConfig("user", 4, 2)
    plan = jaxrec.plan.ShardingPlan.from_dict({"user": row_wise()})

    def make():
        rngs = nnx.Rngs(0)
        plain = jaxrec.EmbeddingBagCollection([config], rngs=rngs)
        maps = {"user": MultiProbeConfig()}
        return ManagedCollisionEmbeddingBagCollection(plain, maps, rngs=rngs)

    batch = jaxrec.KeyedJaggedArray.from_lists({"user": [[1], [2]]}, id_bits=64)
    with pytest.raises(ValueError, match=r"put it there by id_words\(batch, mesh\)"):
        jaxrec.shard(make, plan, mesh)(batch)
    with pytest.raises(ValueError, match="the tables are on one device"):
        make()(id_words(batch, mesh))
