"""Open vocabularies: tables that take any id, for ever, though they have few rows.

Trains on a stream of shop visits: which words did the user search for, which items came up, was one
bought? Words and items are strings from no fixed list: new items come as the stream goes on and old
ones leave it. The table of items keeps rows for ids that come often (`lfu`) and have come twice
(``admit_after=2``), the table of words for those that came last (`lru`), whose rows return from
memory. Prints how the normalized entropy of predictions before each update falls, what the tables
have done with the ids, and the normalized entropy of an evaluation, which changes no table.

    python examples/open_vocabulary.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import optax
import tyro
from flax import nnx

import jaxrec
from jaxrec.metrics import NormalizedEntropy
from jaxrec.tier import Dynamic, ahead, lfu, lru


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int = 1000
    batch_size: int = 256
    rows: int = 4096
    """Rows of each table; the stream has far more items and words."""
    new_items: float = 2.0
    """Items that appear with each step."""
    seed: int = 0


class Ranker(nnx.Module):
    def __init__(self, rows: int, *, rngs: nnx.Rngs):
        tables = [
            jaxrec.EmbeddingBagConfig("item", num_embeddings=rows, embedding_dim=16),
            jaxrec.EmbeddingBagConfig("word", num_embeddings=rows, embedding_dim=16),
        ]
        optimizer = jaxrec.optim.rowwise_adagrad(learning_rate=0.1)
        self.embeddings = jaxrec.EmbeddingBagCollection(tables, optimizer=optimizer, rngs=rngs)
        self.over = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, features: jaxrec.KeyedJaggedArray) -> jax.Array:
        return self.over(self.embeddings(features).values)[:, 0]


def stream(settings: Settings, first: int, steps: int) -> Iterator[tuple]:
    """Batches of the stream from a step on: strings as ids, and labels."""
    for step in range(first, first + steps):
        rng = np.random.default_rng((settings.seed, step))
        # The latest items are the most popular.
        ages = rng.exponential(100, (settings.batch_size, 3)) ** 1.3
        items = (settings.new_items * step - ages).astype(int)
        words = (20_000 ** rng.random((settings.batch_size, 2))).astype(int)
        names = {
            "item": np.char.add("item/", items.astype(str)),
            "word": np.char.add("word/", words.astype(str)),
        }
        hidden = [jaxrec.ragged.hash_ids(ids, 1000) / 500 - 1 for ids in names.values()]
        logits = 2 * sum(each.sum(axis=1) for each in hidden) - 1
        labels = rng.random(settings.batch_size) < 1 / (1 + np.exp(-logits))
        features = jaxrec.KeyedJaggedArray.from_dense(names, id_bits=64)  # strings are hashed
        yield features, labels.astype(np.float32)


def loss_and_logits(model, features, labels):
    logits = model(features)
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean(), logits


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, features, labels):
    (_, logits), gradients = jaxrec.value_and_grad(loss_and_logits, has_aux=True)(
        model, features, labels
    )
    optimizer.update(model, gradients)
    return jax.nn.sigmoid(logits)


def main(settings: Settings) -> dict[str, float]:
    model = jaxrec.tier.make(
        lambda: Ranker(settings.rows, rngs=nnx.Rngs(settings.seed)),
        {
            "item": Dynamic(eviction=lfu(), admit_after=2),
            "word": Dynamic(eviction=lru(), store="memory://"),
        },
    )
    optimizer = jaxrec.Optimizer(model, optax.adam(1e-2))
    metric = NormalizedEntropy(window=settings.batch_size * max(1, settings.steps // 10))
    state = metric.init()
    batches = ahead(model, stream(settings, 0, settings.steps))
    for step, (features, labels) in enumerate(batches, 1):
        state = metric.update(state, train_step(model, optimizer, features, labels), labels)
        if step % max(1, settings.steps // 10) == 0:
            value = float(metric.compute(state)["window_ne"][0])
            print(f"step {step}: normalized entropy {value:.4f}")
    for name, counts in jaxrec.tier.statistics(model).items():
        print(
            f"{name}: {counts['resident']:,} ids have rows, {counts['evicted']:,} lost theirs, "
            f"{counts['hit_rate']:.0%} of lookups were hits"
        )

    predict = nnx.jit(lambda model, features: jax.nn.sigmoid(model(features)))
    state = metric.init()
    held_out = stream(settings, settings.steps, 20)
    for features, labels in ahead(model, held_out, is_training=False):
        state = metric.update(state, predict(model, features), labels)
    ne = float(metric.compute(state)["lifetime_ne"][0])
    print(f"evaluation: normalized entropy {ne:.4f}")
    return {
        "normalized entropy": ne,
        **{f"{name} hits": x["hit_rate"] for name, x in jaxrec.tier.statistics(model).items()},
    }


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
