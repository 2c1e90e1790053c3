"""Sharded training: eight simulated devices on a CPU, then the same file on GPUs.

Trains a DLRM whose tables are placed by hand, each by another sharding type, and a second one
placed by the planner, on the same batches. Where tables lie changes no number: both print the
losses of one device. On a machine without accelerators eight devices are simulated; on one with
them all are used.

    python examples/sharded_training.py
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import tyro
from flax import nnx

import jaxrec
from jaxrec.mesh import column_wise, data_parallel, row_wise, table_wise


@dataclasses.dataclass(frozen=True)
class Settings:
    devices: int = 8
    """To simulate where there is no accelerator."""
    batch_size: int = 512
    rows: int = 10_000
    dim: int = 16
    steps: int = 10
    seed: int = 0


PLACEMENTS = {
    "user": row_wise(),  # rows over all devices: for the largest tables
    "item": column_wise(),  # columns over all devices: for wide ones
    "shop": table_wise(device=1),  # whole on one device
    "hour": data_parallel(),  # a copy everywhere: for small ones
}


def simulate_devices(count: int) -> None:
    """On a CPU, unless devices exist already."""
    if jax.config.jax_platforms in (None, "", "cpu") and jax.config.jax_num_cpu_devices < 1:
        jax.config.update("jax_num_cpu_devices", count)


def make_model(settings: Settings) -> jaxrec.nn.DLRM:
    rngs = nnx.Rngs(settings.seed)
    sizes = {"user": settings.rows, "item": settings.rows, "shop": settings.rows // 10, "hour": 24}
    tables = [jaxrec.EmbeddingBagConfig(name, size, settings.dim) for name, size in sizes.items()]
    optimizer = jaxrec.optim.adagrad(learning_rate=0.05)
    return jaxrec.nn.DLRM(
        jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=rngs),
        num_dense=4,
        bottom_layer_sizes=(32, settings.dim),
        top_layer_sizes=(32, 1),
        rngs=rngs,
    )


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, dense, features, labels):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(dense, features), labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def draw_batch(settings: Settings, seed: int) -> tuple:
    """Bags of skewed ids, and clicks that follow from the item and one dense feature."""
    rng, size = np.random.default_rng(seed), settings.batch_size
    bags = {
        name: np.minimum(rows ** rng.random((size, bag)), rows - 1).astype(np.int32).tolist()
        for name, rows, bag in (
            ("user", settings.rows, 1),
            ("item", settings.rows, 3),
            ("shop", settings.rows // 10, 2),
            ("hour", 24, 1),
        )
    }
    dense = rng.standard_normal((size, 4)).astype(np.float32)
    labels = np.array([ids[0] % 2 for ids in bags["item"]]) + dense[:, 0] > 0.5
    features = jaxrec.KeyedJaggedArray.from_lists(bags)
    return dense, features, labels.astype(np.float32)


def train(model: jaxrec.nn.DLRM, settings: Settings, place=lambda batch: batch) -> list[float]:
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-3))
    return [
        float(train_step(model, optimizer, *place(draw_batch(settings, seed))))
        for seed in range(settings.steps)
    ]


def main(settings: Settings) -> dict[str, list[float]]:
    losses = {"one device": train(make_model(settings), settings)}
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    planner = jaxrec.plan.Planner(jaxrec.plan.Topology.from_mesh(mesh))
    plans = {
        "placed by hand": jaxrec.plan.ShardingPlan.from_dict(PLACEMENTS),
        "placed by the planner": planner.plan(make_model(settings), batch_size=settings.batch_size),
    }
    print(plans["placed by the planner"])
    for name, plan in plans.items():
        model = jaxrec.shard(make_model(settings), plan, mesh)
        losses[name] = train(model, settings, lambda b: jaxrec.mesh.shard_batch(b, mesh))
    for name, values in losses.items():
        print(f"{name:>22}: " + " ".join(f"{value:.5f}" for value in values))
    return losses


if __name__ == "__main__":
    settings = tyro.cli(Settings, description=__doc__)
    simulate_devices(settings.devices)
    main(settings)
