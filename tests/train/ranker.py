"""A small model with a table, its batches and its trainer, and the same steps in NumPy."""

from __future__ import annotations

import numpy as np
import optax
from flax import nnx

import jaxrec
from jaxrec import metrics
from jaxrec.train import (
    Callback,
    Trainer,
)

ROWS, DIM, BATCH = 50, 4, 8
GROUP = metrics.MetricGroup(
    tasks=(metrics.Task(name="click", prediction="p", label="y"),),
    metrics={"ne": metrics.NormalizedEntropy(window=None)},
)


class Ranker(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.embeddings = jaxrec.EmbeddingBagCollection(
            [jaxrec.EmbeddingBagConfig("user", ROWS, DIM)],
            optimizer=jaxrec.optim.sgd(0.5),
            rngs=rngs,
        )
        self.over = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, features):
        return self.over(self.embeddings(features).values)[:, 0]


def loss(model, batch):
    features, labels = batch
    logits = model(features)
    loss = optax.sigmoid_binary_cross_entropy(logits, labels).mean()
    return loss, {"p": nnx.sigmoid(logits), "y": labels}


def batches(count, seed=0):
    return batches_of([BATCH] * count, seed)


def batches_of(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (
            jaxrec.KeyedJaggedArray.from_dense({"user": rng.integers(0, 6, (size, 2))}),
            rng.integers(0, 2, size).astype(np.float32),
        )
        for size in sizes
    ]


def weighted_loss(model, batch, weights):
    features, labels = batch
    logits = model(features)
    losses = optax.sigmoid_binary_cross_entropy(logits, labels)
    outputs = {"p": nnx.sigmoid(logits), "y": labels, "w": weights}
    return (weights * losses).sum() / weights.sum(), outputs


WEIGHTED_GROUP = metrics.MetricGroup(
    tasks=(metrics.Task(name="click", prediction="p", label="y", weight="w"),),
    metrics={"ne": metrics.NormalizedEntropy(window=None), "auc": metrics.AUC(window=100)},
)


def make(loss=loss, **options):
    model = Ranker()
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.5))
    return Trainer(model=model, optimizer=optimizer, loss=loss, **options)


class Results(Callback):
    """The results of all steps."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, trainer, result):
        self.seen.append(result)


def weights(trainer):
    model = trainer.model
    return [np.asarray(x) for x in (model.embeddings.table("user"), model.over.kernel[...])]


def same(one, other, **tolerance):
    for a, b in zip(weights(one), weights(other), strict=True):
        np.testing.assert_allclose(a, b, **(tolerance or {"rtol": 0, "atol": 0}))


def ids_of(batch):
    return np.array(batch[0]["user"].to_lists())


class Steps:
    """A float64 model of the trainer: stale rows on demand."""

    def __init__(self, trainer):
        self.table = weights(trainer)[0].astype(np.float64)
        self.kernel = weights(trainer)[1][:, 0].astype(np.float64)
        self.bias = float(np.asarray(trainer.model.over.bias[...])[0])

    def pooled(self, batch):
        return self.table[ids_of(batch)].sum(axis=1)

    def predict(self, pooled):
        return 1 / (1 + np.exp(-(pooled @ self.kernel + self.bias)))

    def update(self, batch, pooled):
        ids, labels = ids_of(batch), batch[1]
        error = (self.predict(pooled) - labels) / len(labels)
        rows = np.zeros_like(self.table)
        np.add.at(rows, ids, (error[:, None] * self.kernel)[:, None])
        self.kernel = self.kernel - 0.5 * error @ pooled
        self.bias -= 0.5 * error.sum()
        self.table -= 0.5 * rows
