"""One exchange by itself, its methods called as by `ShardedTables`, and a training step."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jaxrec
from jaxrec import embed
from jaxrec.embed.outputs import flatten, lookup_weights
from jaxrec.embed.row_gradients import RowGradients
from jaxrec.mesh import shard_batch, shard_tables
from jaxrec.mesh.exchange import Request
from jaxrec.mesh.shard_access import first, stack
from jaxrec.optim.hyperparameters import as_step

DEVICES, ROWS, DIM = 8, 32, 2
RATE = 0.5


@nnx.jit
def train_step(model, optimizer, features, labels):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(features), labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


class Harness:
    """A table of ``row r = (r, -r)`` on eight devices, or as many as given, trained by SGD.

    Attributes:
        table: The rows, in NumPy.
        ids: The ids of each sample's bag.
        weights: Their weights.
    """

    def __init__(
        self, placement, ids, *, pooling="sum", weights=None, optimizer=None, devices=DEVICES
    ):
        self.table = np.outer(np.arange(ROWS), [1.0, -1.0]).astype(np.float32)
        self.ids, self.pooling = ids, pooling
        self.weights = weights or [[1.0] * len(bag) for bag in ids]
        optimizer = optimizer or jaxrec.optim.sgd(RATE)
        config = jaxrec.EmbeddingBagConfig("t", ROWS, DIM, feature_names=("f",), pooling=pooling)
        tables = embed.init_tables([config], optimizer, jax.random.key(0)).write("t", self.table)
        mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
        self.tables = shard_tables(tables, {"t": placement}, mesh)
        (self.placed,), (self.exchange,) = self.tables.layout.groups, self.tables.layout.exchanges
        batch = jaxrec.KeyedJaggedArray.from_lists({"f": ids}, weights={"f": self.weights})
        self.batch = shard_batch(batch, mesh)
        self.channel = self.tables.channel_of(self.placed)

    def run(self, function, *gradients):
        """``function(request, rows, state, *gradients)`` on each device."""
        name = self.placed.name

        def on_device(rows, state, features, *gradients):
            features = first(features)
            layout = self.placed.group.bags(features)
            lookups = flatten(features, None, layout, self.placed.group)
            request = Request.of(features, lookups, lookup_weights(features, True, ()), layout)
            return stack(function(request, rows, state, *gradients))

        spec, over = self.tables.spec(self.placed), PartitionSpec("data")
        specs = (spec, spec, over, *(over for _ in gradients))
        program = jax.jit(self.tables.shard_map(on_device, specs, over))
        return program(self.tables.rows[name], self.tables.state[name], self.batch, *gradients)

    def pool(self, capacity):
        """Pooled bags, ``[samples, dim]``, by messages of a capacity."""

        def pool(request, rows, state):
            route = self.exchange.route(self.placed, request, self.channel, capacity)
            return self.exchange.pool(self.placed, rows, request, route, self.channel, "float32")[0]

        return np.asarray(self.run(pool)).reshape(-1, DIM)

    def gradient(self, request, rows, values, capacity):
        """The gradient of this device's bags, as the update gets it."""
        route = self.exchange.route(self.placed, request, self.channel, capacity)
        channel = self.channel
        _, lookups = self.exchange.pool(self.placed, rows, request, route, channel, "float32")
        gradient = RowGradients(lookups, values, (request.layout,), route)
        return self.exchange.send_gradients(self.placed, gradient, self.channel)

    def update(self, values, capacity):
        """Each device's rows after an update by gradients of bags, ``[samples, dim]``."""

        def update(request, rows, state, values):
            gradient = self.gradient(request, rows, values, capacity)
            step = as_step(0)
            arguments = gradient, step, self.channel, capacity
            return self.exchange.update(self.placed, rows, state, *arguments)

        rows, _ = self.run(update, values.astype(np.float32))
        rows = rows[0] if self.placed.is_replicated else rows.reshape(-1, rows.shape[-1])
        name = self.placed.name
        moved = dataclasses.replace(self.tables, rows={name: rows}, state={name: {}})
        return np.asarray(moved.read("t"))

    def squares(self, values, capacity):
        """The sum of squares of the table's gradient, over all devices."""

        def squares(request, rows, state, values):
            gradient = self.gradient(request, rows, values, capacity)
            return self.exchange.squares(self.placed, gradient, self.channel, capacity)

        return float(np.asarray(self.run(squares, values.astype(np.float32))).sum())

    def expected_bags(self):
        """The bags in NumPy."""
        return np.stack([self.factors(i) @ self.table for i in range(len(self.ids))])

    def expected_gradient(self, values):
        """The gradient of the table in NumPy."""
        return sum(
            np.outer(self.factors(i), value) for i, value in enumerate(values.astype(np.float64))
        )

    def factors(self, sample):
        """The factor of each row in a sample's bag."""
        factors = np.zeros(ROWS)
        for id, weight in zip(self.ids[sample], self.weights[sample], strict=True):
            factors[id] += weight / (len(self.ids[sample]) if self.pooling == "mean" else 1)
        return factors
