"""Quickstart: a ranking model with two tables, trained on one device and then on all of them.

Shows the whole surface once: tables, a Flax model over them, a ragged batch, the compiled training
step in which optax updates the dense part and the tables change in place, and the same model on a
mesh by a plan. Labels follow from the ids alone, so the loss falls from 0.69 to below 0.05; the
steps on the mesh go on where those on one device ended.

    python examples/quickstart.py
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/quickstart.py
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import tyro
from flax import nnx

import jaxrec

TABLES = (
    jaxrec.EmbeddingBagConfig("product", num_embeddings=4096, embedding_dim=64),
    jaxrec.EmbeddingBagConfig("user", num_embeddings=4096, embedding_dim=64, pooling="mean"),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    batch_size: int = 1024
    steps: int = 100
    """On one device, and as many on all."""
    seed: int = 0


class Ranker(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.embeddings = jaxrec.EmbeddingBagCollection(
            TABLES, optimizer=jaxrec.optim.rowwise_adagrad(learning_rate=0.02), rngs=rngs
        )
        self.over = nnx.Linear(128, 1, rngs=rngs)

    def __call__(self, features: jaxrec.KeyedJaggedArray) -> jax.Array:
        pooled = self.embeddings(features)  # pooled["product"] is [batch, 64]
        return self.over(pooled.values)[:, 0]  # pooled.values is [batch, 128]


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, features, labels):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(features), labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)  # tables change in place; no table-sized gradient exists
    return loss


packer = jaxrec.Packer()


def draw_batch(rng: np.random.Generator, size: int) -> tuple[jaxrec.KeyedJaggedArray, np.ndarray]:
    """Up to three products and one user a sample; liked if the user and a product are of a kind."""
    products = [rng.integers(0, 200, rng.integers(0, 4)).tolist() for _ in range(size)]
    users = rng.integers(0, 200, size)
    features = packer.from_lists({"product": products, "user": users[:, None].tolist()})
    liked = [sum(p % 2 for p in row) + u % 2 >= 2 for row, u in zip(products, users, strict=True)]
    return features, np.array(liked, np.float32)


def main(settings: Settings) -> list[float]:
    rng = np.random.default_rng(settings.seed)
    model = Ranker(rngs=nnx.Rngs(settings.seed))
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))
    losses = []
    for _ in range(settings.steps):
        losses.append(train_step(model, optimizer, *draw_batch(rng, settings.batch_size)))
    print(f"one device: loss {losses[0]:.3f}, after {settings.steps} steps {losses[-1]:.3f}")

    mesh = jax.make_mesh((len(jax.devices()),), ("data",))
    planner = jaxrec.plan.Planner(jaxrec.plan.Topology.from_mesh(mesh))
    plan = planner.plan(model, batch_size=settings.batch_size)
    print(plan)
    model = jaxrec.shard(model, plan, mesh)
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))
    for _ in range(settings.steps):
        batch = jaxrec.mesh.shard_batch(draw_batch(rng, settings.batch_size), mesh)
        losses.append(train_step(model, optimizer, *batch))
    print(f"{mesh.size} devices: loss {losses[-1]:.3f} after {settings.steps} steps more")
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
