"""Small models of the kinds that the examples train, with batches of ragged features."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxrec
from jaxrec.nn import (
    DLRM,
    MLP,
    DCNv2,
    DeepFM,
    EmbeddingTower,
    SASRec,
    TwoTower,
    candidate_scores,
)

ROWS = {"user": 50, "item": 70, "tags": 30}
NUM_DENSE = 3
CANDIDATES = 5


class Case(NamedTuple):
    """A model, the function of it that is exported, and its batches.

    Attributes:
        function: Function of the model and the arguments of a batch; None: the model's call.
        batch: Makes the arguments for some samples; feature "tags" has empty bags.
    """

    model: nnx.Module
    function: Callable[..., Any] | None
    batch: Callable[[int], tuple[Any, ...]]

    def expected(self, *batch: Any) -> Any:
        function = self.function or (lambda model, *batch: model(*batch))
        self.model.eval()
        return nnx.jit(function)(self.model, *batch)


def features(samples: int, names: tuple[str, ...] = tuple(ROWS)) -> jaxrec.KeyedJaggedArray:
    rng = np.random.default_rng(samples)
    most = {"user": 1, "item": 3, "tags": 9}
    return jaxrec.KeyedJaggedArray.from_lists(
        {
            name: [
                rng.integers(0, ROWS[name], rng.integers(0, most[name] + 1)).tolist()
                for _ in range(samples)
            ]
            for name in names
        },
        bounds={name: ROWS[name] for name in names},
    )


def clicks(samples: int) -> tuple[Any, ...]:
    dense = np.random.default_rng(samples).standard_normal((samples, NUM_DENSE))
    return dense.astype(np.float32), features(samples)


def collection(rngs: nnx.Rngs, dim: int = 8) -> jaxrec.EmbeddingBagCollection:
    tables = [
        jaxrec.EmbeddingBagConfig(name, rows, dim, initializer=nnx.initializers.normal(0.5))
        for name, rows in ROWS.items()
    ]
    return jaxrec.EmbeddingBagCollection(tables, rngs=rngs)


@functools.cache
def dlrm() -> Case:
    rngs = nnx.Rngs(0)
    sizes = {"bottom_layer_sizes": (8, 8), "top_layer_sizes": (8, 1)}
    return Case(DLRM(collection(rngs), num_dense=NUM_DENSE, **sizes, rngs=rngs), None, clicks)


@functools.cache
def dcn_v2() -> Case:
    rngs = nnx.Rngs(0)
    model = DCNv2(
        collection(rngs), num_dense=NUM_DENSE, cross_layers=2, deep_layer_sizes=(8,), rngs=rngs
    )
    return Case(model, None, clicks)


@functools.cache
def deepfm() -> Case:
    rngs = nnx.Rngs(0)
    linear = [
        jaxrec.EmbeddingBagConfig(f"{name} (linear)", rows, 1, (name,), initializer="normal")
        for name, rows in ROWS.items()
    ]
    model = DeepFM(
        collection(rngs),
        jaxrec.EmbeddingBagCollection(linear, rngs=rngs),
        num_dense=NUM_DENSE,
        deep_layer_sizes=(8, 1),
        rngs=rngs,
    )
    return Case(model, None, clicks)


@functools.cache
def two_tower() -> Case:
    rngs = nnx.Rngs(0)

    def tower(*names: str) -> EmbeddingTower:
        tables = [
            jaxrec.EmbeddingBagConfig(name, ROWS[name], 8, pooling="mean", initializer="normal")
            for name in names
        ]
        embeddings = jaxrec.EmbeddingBagCollection(tables, rngs=rngs)
        return EmbeddingTower(embeddings, MLP(8 * len(names), (8, 4), rngs=rngs))

    model = TwoTower(tower("user", "tags"), tower("item"))
    batch = functools.partial(features, names=("user", "tags"))
    return Case(model, TwoTower.query, lambda samples: (batch(samples),))


@functools.cache
def sasrec() -> Case:
    rngs = nnx.Rngs(0)
    table = jaxrec.EmbeddingConfig("item", 40, 8, ("history", "candidates"), initializer="normal")
    model = SASRec(
        jaxrec.EmbeddingCollection([table], rngs=rngs), max_length=9, num_blocks=1,
        dropout_rate=0.3, block_size=8, rngs=rngs,
    )  # fmt: skip

    def score(model, batch):
        out = model(batch)
        return candidate_scores(out["history"], out["candidates"].values)

    def batch(samples: int) -> tuple[Any, ...]:
        rng = np.random.default_rng(samples)
        history = [rng.integers(0, 40, rng.integers(0, 10)).tolist() for _ in range(samples)]
        candidates = rng.integers(0, 40, (samples, CANDIDATES)).tolist()
        return (
            jaxrec.KeyedJaggedArray.from_lists(
                {"history": history, "candidates": candidates},
                capacities={"candidates": samples * CANDIDATES},
            ),
        )

    return Case(model, score, batch)


MODELS = {each.__name__: each for each in (dlrm, dcn_v2, deepfm, two_tower, sasrec)}


class Several(nnx.Module):
    """A model with outputs in a dict, and inputs in one."""

    def __init__(self, rngs: nnx.Rngs):
        self.embeddings = collection(rngs)
        self.over = nnx.Linear(8 * len(ROWS), 2, rngs=rngs)

    def __call__(self, inputs):
        pooled = self.embeddings(inputs["features"]).values
        out = self.over(pooled) + jnp.asarray(inputs["bias"])[:, None]
        return {"scores": (out[:, 0], out[:, 1]), "pooled": pooled}
