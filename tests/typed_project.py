"""A user's project with types, which mypy checks by its strict rules. Nothing runs it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxrec
from jaxrec import KeyedArray, KeyedJaggedArray
from jaxrec.metrics import AUC

TABLES = (
    jaxrec.EmbeddingBagConfig("product", num_embeddings=4096, embedding_dim=64),
    jaxrec.EmbeddingBagConfig("user", num_embeddings=4096, embedding_dim=64, pooling="mean"),
)


class Ranker(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embeddings = jaxrec.EmbeddingBagCollection(
            TABLES, optimizer=jaxrec.optim.rowwise_adagrad(learning_rate=0.02), rngs=rngs
        )
        self.cross = jaxrec.nn.CrossNet(128, 2, rngs=rngs)
        self.over = jaxrec.nn.MLP(128, (64, 1), rngs=rngs)

    def __call__(self, features: KeyedJaggedArray) -> jax.Array:
        pooled: KeyedArray = self.embeddings(features)
        return self.over(self.cross(pooled.values))[:, 0]


def loss_of(model: Ranker, features: KeyedJaggedArray, labels: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(model(features) - labels))


def train_step(
    model: Ranker, optimizer: jaxrec.Optimizer, features: KeyedJaggedArray, labels: jax.Array
) -> jax.Array:
    loss, gradients = jaxrec.value_and_grad(loss_of)(model, features, labels)
    optimizer.update(model, gradients)
    return loss


def batches() -> Iterator[tuple[KeyedJaggedArray, jax.Array]]:
    packer = jaxrec.Packer()
    yield packer.from_lists({"product": [[1, 2], []], "user": [[3], [4]]}), jnp.ones(2)


def main() -> float:
    mesh = jax.make_mesh((1,), ("data",))
    topology = jaxrec.plan.Topology.from_mesh(mesh)
    plan = jaxrec.plan.Planner(topology).plan(Ranker(rngs=nnx.Rngs(0)), batch_size=1024)
    model = jaxrec.shard(lambda: Ranker(rngs=nnx.Rngs(0)), plan, mesh)
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-3))
    metric = AUC()
    state = metric.init()
    for batch in batches():
        features, labels = jaxrec.mesh.shard_batch(batch, mesh)
        train_step(model, optimizer, features, labels)
        state = metric.update(state, nnx.sigmoid(model(features)), labels)
    small = jaxrec.serve.quantize(model, dtype="int8")
    jaxrec.serve.export(small, "model", batch_sizes=(1,))
    return float(metric.compute(state)["window_auc"][0])
