"""Models and streams of batches with open vocabularies, and the same on plain tables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxrec
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier.rows.first_rows import NewRows, reset

OPTIMIZERS = {
    "sgd": jaxrec.optim.sgd(0.1),
    "rowwise_adagrad": jaxrec.optim.rowwise_adagrad(0.1),
    "adam": jaxrec.optim.adam(0.01),
}


class Ranker(nnx.Module):
    """Two open tables that share a feature, one with its own, and a plain one."""

    def __init__(self, rows: int, optimizer: str):
        config = jaxrec.EmbeddingBagConfig
        tables = [
            config("item", rows, 8, initializer="normal"),
            config("query", rows, 8, ["query", "context"], pooling="mean", initializer="normal"),
            config("age", 10, 8),
        ]
        rngs = nnx.Rngs(0)
        row_optimizer = OPTIMIZERS[optimizer]
        self.embeddings = jaxrec.EmbeddingBagCollection(tables, optimizer=row_optimizer, rngs=rngs)
        self.wide = jaxrec.EmbeddingBagCollection(
            [config("item_wide", rows, 1, ["item"], initializer="normal")],
            optimizer=row_optimizer,
            rngs=rngs,
        )
        self.over = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, features):
        outputs = self.over(self.embeddings(features).values)[:, 0]
        return outputs + self.wide(features).values[:, 0]


TX = optax.sgd(0.1)  # with one object for all, programs are compiled once


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, features, labels):
    def loss_fn(model):
        return optax.sigmoid_binary_cross_entropy(model(features), labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def stream(steps: int, vocabulary: int, samples: int = 16, seed: int = 0):
    """Batches with raw ids: 64-bit items, 64-bit queries and contexts, ages below 10."""
    rng = np.random.default_rng(seed)
    names = rng.integers(-(2**63), 2**63, vocabulary)
    batches = []
    for _ in range(steps):
        data = {
            key: [names[rng.integers(0, vocabulary, n)] for n in rng.integers(0, 4, samples)]
            for key in ("item", "query", "context")
        }
        data["age"] = [[int(age)] for age in rng.integers(0, 10, samples)]
        labels = rng.integers(0, 2, samples).astype(np.float32)
        capacities = dict.fromkeys(data, 3 * samples)
        features = KeyedJaggedArray.from_lists(data, id_bits=64, capacities=capacities)
        batches.append((features, labels))
    return batches, names


def ids_of(features: KeyedJaggedArray, key: str) -> np.ndarray:
    column = features[key]
    return np.asarray(column.values)[: int(np.asarray(column.lengths).sum())]


def plain_batch(features: KeyedJaggedArray, rows: dict[str, dict[int, int]]) -> KeyedJaggedArray:
    """The batch with the rows of ids by feature, made by Python."""
    data = {
        key: [[rows[key][i] if key in rows else i for i in bag] for bag in features[key].to_lists()]
        for key in features.keys
    }
    capacities = dict(zip(features.keys, features.capacities, strict=True))
    return KeyedJaggedArray.from_lists(data, capacities=capacities)


def first_key(collection: jaxrec.EmbeddingBagCollection) -> np.ndarray:
    """The data of the key of a collection's first values."""
    return np.asarray(jax.random.key_data(collection.first_key))


def set_first_rows(model: nnx.Module, rows: dict[str, dict[int, int]]) -> None:
    """Give the rows of plain tables the first values of the ids that they are for."""
    for collection in (model.embeddings, model.wide):
        store = collection.tables.get_value()
        for config in collection.configs:
            of_table = rows.get(config.feature_names[0])
            if of_table is not None:
                ids = np.array(list(of_table), np.int64)
                indices = np.array(list(of_table.values()), np.int32)
                store = reset(store, [NewRows(config, indices, ids)], first_key(collection))
        collection.tables.set_value(store)


def train(model, batches):
    optimizer = jaxrec.Optimizer(model, TX)
    return [float(train_step(model, optimizer, x, jnp.asarray(y))) for x, y in batches]
