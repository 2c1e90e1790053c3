"""Tables beyond memory: a billion users, of whom a few thousand are on the device.

Trains on clicks of users whose visits follow a power law. The table of users has a row for each of
a billion ids, 68 GB with the state of its optimizer. The device has 20,000 of these rows, and the
others are in a sparse file, which takes room on the disk for users that were seen. Prints what the
cache did, saves a checkpoint, restores it into a model with a smaller cache, and evaluates both:
their predictions are the same to the bit.

    python examples/beyond_memory.py
    python examples/beyond_memory.py --store rocksdb:///data/{table}
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import numpy as np
import optax
import tyro
from flax import nnx

import jaxrec
from jaxrec.metrics import NormalizedEntropy
from jaxrec.tier import Cached, ahead
from jaxrec.train import CheckpointManager, restore


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int = 1000
    batch_size: int = 256
    users: int = 1_000_000_000
    cached: int = 20_000
    """Rows of the table of users on the device."""
    store: str = "file://{directory}/{table}"
    """Where the other rows are; {directory} stands for one that is removed in the end."""
    seed: int = 0


class Ranker(nnx.Module):
    def __init__(self, users: int, *, rngs: nnx.Rngs):
        tables = [
            jaxrec.EmbeddingBagConfig("user", num_embeddings=users, embedding_dim=16),
            jaxrec.EmbeddingBagConfig("item", num_embeddings=1000, embedding_dim=16),
        ]
        optimizer = jaxrec.optim.rowwise_adagrad(learning_rate=0.1)
        self.embeddings = jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=rngs)
        self.over = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, features: jaxrec.KeyedJaggedArray) -> jax.Array:
        return self.over(self.embeddings(features).values)[:, 0]


def make_model(settings: Settings, cached: int, directory: pathlib.Path) -> Ranker:
    url = settings.store.replace("{directory}", str(directory))
    return jaxrec.tier.make(
        lambda: Ranker(settings.users, rngs=nnx.Rngs(settings.seed)),
        {"user": Cached(rows=cached, store=url)},  # the table of items stays as it is
    )


def stream(settings: Settings, first: int, steps: int) -> Iterator[tuple]:
    """Batches from a step on: who saw which items, and whether they clicked."""
    for step in range(first, first + steps):
        rng = np.random.default_rng((settings.seed, step))
        users = (float(settings.users) ** rng.random((settings.batch_size, 1))).astype(np.int64)
        ids = {
            "user": users * 387_420_489 % settings.users,  # frequent users anywhere in the table
            "item": rng.integers(0, 1000, (settings.batch_size, 2)),
        }
        hidden = [jaxrec.ragged.hash_ids(each, 1000) / 500 - 1 for each in ids.values()]
        logits = 2 * sum(each.sum(axis=1) for each in hidden)
        labels = rng.random(settings.batch_size) < 1 / (1 + np.exp(-logits))
        features = jaxrec.KeyedJaggedArray.from_dense(ids, id_bits=64)
        yield features, labels.astype(np.float32)


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, features, labels):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(features), labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def predict(model, features):
    return jax.nn.sigmoid(model(features))


def evaluate(settings: Settings, model: Ranker) -> float:
    """The normalized entropy of predictions on batches that the model has not seen."""
    metric = NormalizedEntropy()
    state = metric.init()
    held_out = stream(settings, settings.steps, 20)
    for features, labels in ahead(model, held_out, is_training=False):
        state = metric.update(state, predict(model, features), labels)
    return float(metric.compute(state)["lifetime_ne"][0])


def main(settings: Settings) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        model = make_model(settings, settings.cached, directory / "first")
        optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))
        every = max(1, settings.steps // 5)
        for step, batch in enumerate(ahead(model, stream(settings, 0, settings.steps)), 1):
            loss = train_step(model, optimizer, *batch)
            if step % every == 0:
                counts = jaxrec.tier.statistics(model)["user"]
                print(
                    f"step {step}: loss {loss:.4f}, {counts['hit_rate']:.0%} of lookups were hits, "
                    f"{counts['written']:,} rows written to the store, {counts['fetched']:,} came "
                    f"back, {counts['stall_ms']:.2f} ms a step waited for rows"
                )
        files = [path for path in (directory / "first").rglob("*") if path.is_file()]
        on_disk = sum(path.stat().st_blocks * 512 for path in files)
        print(
            f"{settings.users:,} users need {settings.users * 17 * 4 / 1e9:,.1f} GB in memory; "
            f"their store takes {on_disk / 1e9:.3f} GB of the disk"
        )
        with CheckpointManager(directory / "run") as manager:
            manager.save(model, optimizer, batches=settings.steps)
        before = evaluate(settings, model)
        jaxrec.tier.close(model)

        smaller = make_model(settings, settings.cached // 2, directory / "second")
        restore(smaller, directory / "run", jaxrec.Optimizer(smaller, optax.adam(1e-2)))
        after = evaluate(settings, smaller)
        jaxrec.tier.close(smaller)
        print(f"normalized entropy {before:.4f}, of the restored model {after:.4f}")
        return {
            "normalized entropy": before,
            "restored": after,
            "hits": counts["hit_rate"],
            "came back": counts["fetched"],
        }


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
