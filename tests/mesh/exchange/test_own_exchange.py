"""An exchange of one's own, outside of the package, trains like one device."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.embed import kernels
from jaxrec.embed.kernels import Lookups
from jaxrec.mesh import Exchange, row_wise, shard_batch
from tests.mesh.exchange.harness import train_step

pytestmark = pytest.mark.jax_version

DEVICES, ROWS, DIM, BATCH = 8, 40, 4, 16


@dataclasses.dataclass(frozen=True)
class Broadcast(Exchange):
    """Every device gathers all ids and sends its rows of them; right for tiny batches."""

    name: ClassVar[str] = "broadcast"

    def route(self, placed, request, channel, capacity):
        """The rows here of all devices' lookups, ``[devices * n]``."""
        slots = channel.gather(placed.slots(request.lookups.rows))
        return self.local(placed, slots, channel)

    def local(self, placed, slots, channel):
        """The rows of this device's array; `local_rows` for those of other devices."""
        rows = slots - channel.index * placed.local_rows
        return jnp.where((rows >= 0) & (rows < placed.local_rows), rows, placed.local_rows)

    def rows(self, placed, table, request, route, channel):
        rows = kernels.row_lookup(table, route).reshape(placed.num_devices, -1, table.shape[1])
        rows = channel.sum_rows(rows)
        is_bad = placed.slots(request.lookups.rows) == placed.num_slots
        is_padding = request.lookups.rows == placed.group.num_rows
        return jnp.where((is_bad & ~is_padding)[:, None], jnp.nan, rows)

    def pool(self, placed, table, request, route, channel, dtype):
        rows = self.rows(placed, table, request, route, channel)
        if request.scales is not None:
            rows = rows * request.scales[:, None]
        bags = jax.ops.segment_sum(rows, request.lookups.bags, request.layout.num_bags)
        return bags, request.scaled_lookups

    def owned_gradients(self, placed, gradient, channel, capacity):
        lookups = gradient.lookups
        rows = self.local(placed, channel.gather(placed.slots(lookups.rows)), channel)
        bags = lookups.bags + channel.index * len(gradient.values)
        scales = None if lookups.scales is None else channel.gather(lookups.scales)
        owned = Lookups(rows, channel.gather(bags), scales)
        values = channel.gather_gradients(gradient.values)
        return dataclasses.replace(gradient, lookups=owned, values=values)


class Ranker(nnx.Module):
    def __init__(self, pooling):
        config = jaxrec.EmbeddingBagConfig("user", ROWS, DIM, pooling=pooling)
        optimizer = jaxrec.optim.adam(0.1, clip_norm=1.0)
        self.embeddings = jaxrec.EmbeddingBagCollection(
            [config], optimizer=optimizer, is_weighted=True, rngs=nnx.Rngs(0)
        )
        self.over = nnx.Linear(DIM, 1, rngs=nnx.Rngs(1))

    def __call__(self, features):
        return self.over(self.embeddings(features).values)[:, 0]


def train(model, place):
    optimizer = jaxrec.Optimizer(model, optax.adam(0.01))
    rng, losses = np.random.default_rng(0), []
    for _ in range(4):
        ids = [rng.integers(ROWS, size=rng.integers(4)).tolist() for _ in range(BATCH)]
        weights = [rng.uniform(0.5, 2, len(bag)).tolist() for bag in ids]
        features = jaxrec.KeyedJaggedArray.from_lists(
            {"user": ids}, {"user": weights}, capacities={"user": 3 * BATCH}
        )
        batch = place((features, rng.integers(2, size=BATCH).astype(np.float32)))
        losses.append(float(train_step(model, optimizer, *batch)))
    return np.array(losses), np.asarray(model.embeddings.table("user"))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_training_equals_one_device(pooling):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    plan = jaxrec.plan.ShardingPlan.from_dict({"user": row_wise(exchange=Broadcast())})
    sharded = jaxrec.shard(lambda: Ranker(pooling), plan, mesh)
    assert "broadcast" in repr(sharded.embeddings.tables.get_value().layout)
    capacities = {"user": 3 * BATCH // DEVICES}
    losses, table = train(sharded, lambda batch: shard_batch(batch, mesh, capacities=capacities))
    expected_losses, expected_table = train(Ranker(pooling), lambda batch: batch)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(table, expected_table, rtol=1e-4, atol=1e-5)
