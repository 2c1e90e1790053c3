"""DLRMv4 as MLPerf trains it: an HSTU ranker, 11 tables of width 512, histories of 4,086 events.

The configuration is that of MLPerf's recommendation benchmark of training v6.1, on the data set
Yambda-5b: 293 million rows (600 GB of tables in float32), row-wise Adagrad for tables and Adam for
the rest, three layers of four heads of 128 columns, bfloat16. A user has eight context tokens (the
user and seven crossed features), and one candidate, of which the model predicts whether the user
listens to at least half of it. Two options make it small: --scale the tables, --length the
histories. Listens are generated, from the candidate alone, so the loss falls; what this shows is
the model at its real widths and how fast it trains. Tables lie over all devices as the planner
places them.

    python examples/dlrm_v4.py
    python examples/dlrm_v4.py --scale 1 --length 4086 --batch-size 8192   # on eight GPUs of 141 GB
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
from jaxrec.nn import HSTURanker, RankerFeatures, TargetTask
from jaxrec.train import compile_step

DIM, LISTEN = 512, 1
BITS = (1, 2, 4)  # listened to half of it at least, liked, skipped
ITEMS = {"item_id": 9_390_624, "artist_id": 1_293_395, "album_id": 3_367_692}
CONTEXT = {
    "uid": 1_000_001,
    "user_x_artist": 100_000_000,
    "user_x_album": 40_000_000,
    "user_x_hour": 24_000_000,
    "item_x_hour": 40_000_000,
    "artist_x_hour": 32_000_000,
    "user_x_is_organic": 2_000_000,
    "user_x_artist_x_hour": 40_000_000,
}
FEATURES = RankerFeatures(
    {"item_id": "candidate_item_id"},
    additional={name: f"candidate_{name}" for name in ("artist_id", "album_id")},
    context=dict.fromkeys(CONTEXT, 1),
    times=("time", "candidate_time"),
    actions=("action", "candidate_action"),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: float = 0.0001
    """Factor of the rows of tables."""
    length: int = 100
    """Events of the longest history; the benchmark's is 4,086."""
    num_layers: int = 3
    batch_size: int = 8
    steps: int = 20
    learning_rate: float = 1e-3
    """Rate after the warm-up, of both optimizers. The benchmark's is 1e-6 at batches of 8,192."""
    warmup_steps: int = 5
    """Steps of the linear warm-up from 0; the benchmark has 24,000."""
    devices: int | None = None
    """How many to use; all if not given."""
    bfloat16: bool = False
    """Whether the dense part computes in bfloat16, as the benchmark does."""
    remat: bool = False
    """Whether the backward pass computes layers again."""
    seed: int = 0


def rows_of(name: str, scale: float) -> int:
    return max(100, round((ITEMS | CONTEXT)[name] * scale))


def make_model(settings: Settings) -> HSTURanker:
    rngs = nnx.Rngs(settings.seed)
    tables = [
        jaxrec.EmbeddingConfig(
            name,
            rows_of(name, settings.scale),
            DIM,
            feature_names=(name, f"candidate_{name}") if name in ITEMS else (name,),
        )
        for name in ITEMS | CONTEXT
    ]
    rate = optax.linear_schedule(0, settings.learning_rate, settings.warmup_steps)
    return HSTURanker(
        jaxrec.EmbeddingCollection(
            tables, optimizer=jaxrec.optim.rowwise_adagrad(rate, eps=1e-8), rngs=rngs
        ),
        FEATURES,
        [TargetTask("listen", bit=LISTEN, weight=0.2)],
        dim=DIM,
        num_layers=settings.num_layers,
        num_heads=4,
        qk_dim=128,
        value_dim=128,
        max_length=settings.length + len(CONTEXT) + 1,
        action_bits=BITS,
        output="time",
        dropout_rate=0.1,
        input_dropout_rate=0.2,
        remat=settings.remat,
        dtype="bfloat16" if settings.bfloat16 else None,
        rngs=rngs,
    )


def make_plan(settings: Settings, machine: jaxrec.plan.Topology) -> jaxrec.plan.ShardingPlan:
    """Place the tables, of which those of items are read once for each event and candidate."""
    events = {
        name: jaxrec.plan.ParameterConstraints(pooling_factors=(0.75 * settings.length, 1))
        for name in ITEMS
    }
    planner = jaxrec.plan.Planner(machine, events)
    return planner.plan(lambda: make_model(settings), batch_size=settings.batch_size)


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    rate = optax.linear_schedule(0, settings.learning_rate, settings.warmup_steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b1=0.95))


def draw_batch(settings: Settings, step: int) -> jaxrec.KeyedJaggedArray:
    """Ids that follow a power law; histories of any length; a candidate of each user."""
    rng, size = np.random.default_rng([settings.seed, step]), settings.batch_size
    lengths = rng.integers(settings.length // 2, settings.length + 1, size)

    def ids(name: str, counts: np.ndarray) -> np.ndarray:
        rows = rows_of(name, settings.scale)
        return np.minimum(rows ** rng.random(counts.sum()), rows - 1).astype(np.int32)

    one = np.ones(size, np.int64)
    columns = {name: (ids(name, one), one) for name in CONTEXT}
    columns |= {name: (ids(name, lengths), lengths) for name in ITEMS}
    columns |= {f"candidate_{name}": (ids(name, one), one) for name in ITEMS}
    starts = rng.integers(0, 10**7, size)
    gaps = rng.integers(30, 600, lengths.sum())
    columns["time"] = np.cumsum(gaps) + np.repeat(starts, lengths), lengths
    columns["action"] = rng.choice(BITS, lengths.sum(), p=(0.61, 0.02, 0.37)), lengths
    columns["candidate_time"] = np.cumsum(gaps)[np.cumsum(lengths) - 1] + starts + 60, one
    likes = 0.1 + 0.8 * (columns["candidate_item_id"][0] % 2)
    columns["candidate_action"] = (rng.random(size) < likes) * LISTEN, one
    return jaxrec.KeyedJaggedArray.from_lengths(
        list(columns),
        np.concatenate([values for values, _ in columns.values()]).astype(np.int32),
        np.concatenate([counts for _, counts in columns.values()]).astype(np.int32),
        capacities={
            name: size * (1 if counts is one else settings.length)
            for name, (_, counts) in columns.items()
        },
    )


def train_step(model, optimizer, batch):
    (loss, _), gradients = jaxrec.value_and_grad(lambda model: model.loss(batch), has_aux=True)(
        model
    )
    optimizer.update(model, gradients)
    return loss


def main(settings: Settings) -> list[float]:
    rows = sum(rows_of(name, settings.scale) for name in ITEMS | CONTEXT)
    print(f"{rows:,} rows of {DIM}: {rows * DIM * 4 / 1e9:.2f} GB of tables")
    devices = jax.devices()[: settings.devices]
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
    if mesh.size > 1:
        plan = make_plan(settings, jaxrec.plan.Topology.from_mesh(mesh))
        print(plan)
        # Made on the mesh, since all tables together are larger than a device.
        model = jaxrec.shard(lambda: make_model(settings), plan, mesh)
    else:
        model = make_model(settings)
    optimizer = jaxrec.Optimizer(model, make_optimizer(settings))
    step, losses, times = compile_step(train_step, model, optimizer), [], []
    for count in range(settings.steps):
        batch = draw_batch(settings, count)
        batch = jaxrec.mesh.shard_batch(batch, mesh) if mesh.size > 1 else batch
        start = time.perf_counter()
        losses.append(float(step(batch)))
        times.append(time.perf_counter() - start)
    median = float(np.median(times))
    print(f"loss {losses[0]:.4f}, after {settings.steps} steps {losses[-1]:.4f}")
    print(f"{1e3 * median:.1f} ms a step, {settings.batch_size / median:,.1f} samples/s")
    return losses


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
