"""DLRM-DCNv2 as MLPerf trains it: 26 tables of width 128, multi-hot, a low-rank cross network.

The configuration is that of MLPerf's recommendation benchmark (training v3.0 and later): table rows
capped at 40 million, bags of fixed lengths of 1 to 100 ids, bottom 512-256-128, three cross layers
of rank 512, top 1024-1024-512-256-1, Adagrad with rate 0.005. One option, --scale, scales the
tables: at 1 they take 104 GB, at the default 0.001 some 0.1 GB. Clicks are generated, from the ids
of a few features, so the loss falls; what this shows is the model at its real shape and how fast it
trains. Tables lie over all devices as the planner places them.

    python examples/dlrm_mlperf.py
    python examples/dlrm_mlperf.py --scale 1 --batch-size 65536     # on eight GPUs of 80 GB
"""

from __future__ import annotations

import dataclasses
import time

import jax
import numpy as np
import optax
import tyro
from flax import nnx

import jaxrec
from jaxrec.train import compile_step

NUM_DENSE, DIM = 13, 128
ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282,
    10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973,
    108, 36,
)  # fmt: skip
BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
KEYS = tuple(f"cat_{place}" for place in range(26))


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: float = 0.001
    """Factor of the rows of tables with more than 1,000."""
    batch_size: int = 256
    steps: int = 20
    learning_rate: float = 0.005
    devices: int | None = None
    """How many to use; all if not given."""
    bfloat16: bool = False
    """Whether the dense part computes in bfloat16; parameters and tables stay float32."""
    seed: int = 0


def scaled_rows(scale: float) -> list[int]:
    return [rows if rows <= 1000 else max(1000, round(rows * scale)) for rows in ROWS]


def make_model(settings: Settings) -> jaxrec.nn.DLRM_DCN:
    rngs = nnx.Rngs(settings.seed)
    tables = [
        jaxrec.EmbeddingBagConfig(key, rows, DIM)
        for key, rows in zip(KEYS, scaled_rows(settings.scale), strict=True)
    ]
    optimizer = jaxrec.optim.rowwise_adagrad(settings.learning_rate)
    return jaxrec.nn.DLRM_DCN(
        jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=rngs),
        num_dense=NUM_DENSE,
        bottom_layer_sizes=(512, 256, DIM),
        top_layer_sizes=(1024, 1024, 512, 256, 1),
        dcn_num_layers=3,
        dcn_low_rank_dim=512,
        dtype="bfloat16" if settings.bfloat16 else None,
        rngs=rngs,
    )


def draw_batch(settings: Settings, step: int) -> tuple:
    """Ids that follow a power law, in bags of fixed length; clicks follow from some features."""
    rng, size = np.random.default_rng([settings.seed, step]), settings.batch_size
    bags = [
        np.minimum(rows ** rng.random((size, bag)), rows - 1).astype(np.int32)
        for rows, bag in zip(scaled_rows(settings.scale), BAGS, strict=True)
    ]
    features = jaxrec.KeyedJaggedArray.from_lengths(
        list(KEYS),
        np.concatenate([ids.reshape(-1) for ids in bags]),
        np.repeat(BAGS, size).astype(np.int32),
        capacities={key: size * bag for key, bag in zip(KEYS, BAGS, strict=True)},
    )
    dense = rng.standard_normal((size, NUM_DENSE)).astype(np.float32)
    score = 3 * sum(bags[place][:, 0] % 2 for place in (5, 16)) - 3 + dense[:, 0]
    clicks = (rng.random(size) < 1 / (1 + np.exp(-score))).astype(np.float32)
    return dense, features, clicks


def train_step(model, optimizer, dense, features, labels):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(dense, features), labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def main(settings: Settings) -> list[float]:
    rows = sum(scaled_rows(settings.scale))
    print(f"{rows:,} rows of {DIM}: {rows * DIM * 4 / 1e9:.2f} GB of tables")
    devices = jax.devices()[: settings.devices]
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
    model = make_model(settings)
    if mesh.size > 1:
        planner = jaxrec.plan.Planner(jaxrec.plan.Topology.from_mesh(mesh))
        plan = planner.plan(model, batch_size=settings.batch_size)
        print(plan)
        model = jaxrec.shard(model, plan, mesh)
    dense_optimizer = optax.adagrad(settings.learning_rate, initial_accumulator_value=0.0)
    optimizer = jaxrec.Optimizer(model, dense_optimizer)
    step, losses, times = compile_step(train_step, model, optimizer), [], []
    for count in range(settings.steps):
        batch = draw_batch(settings, count)
        batch = jaxrec.mesh.shard_batch(batch, mesh) if mesh.size > 1 else batch
        start = time.perf_counter()
        losses.append(float(step(*batch)))
        times.append(time.perf_counter() - start)
    median = float(np.median(times))
    print(f"loss {losses[0]:.4f}, after {settings.steps} steps {losses[-1]:.4f}")
    print(f"{1e3 * median:.1f} ms a step, {settings.batch_size / median:,.0f} samples/s")
    return losses


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
