"""A DLRM whose tables are behind caches, beside the same model with whole tables.

Used by tests and by ``python -m benchmarks.tier exact``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxrec
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier import Cached, MissCounter, ahead, close, make

OPTIMIZERS = {
    "sgd": jaxrec.optim.sgd(0.1),
    "rowwise_adagrad": jaxrec.optim.rowwise_adagrad(0.05),
    "adam": jaxrec.optim.adam(0.01),
}
STORES = {
    "memory": "memory://",
    "file": "file://{path}/{table}",
    "rocksdb": "rocksdb://{path}/{table}",
    "redis": "redis://127.0.0.1:{port}/0?prefix={path}/{table}",
    "memory+rocksdb": "memory+rocksdb://{path}/{table}?memory=64KB",
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its batches."""

    steps: int = 200
    """Training steps."""
    tables: int = 4
    """Tables, each read by one feature."""
    rows: int = 20_000
    """Rows of a table."""
    cached: float = 0.05
    """Share of the rows that are on the devices."""
    dim: int = 16
    """Columns of a table."""
    batch: int = 64
    """Samples of a step."""
    bag: int = 3
    """Ids of a sample, for each feature."""
    seed: int = 0
    """Seed of the batches."""

    @property
    def names(self) -> list[str]:
        """Names of the tables, which are those of the features."""
        return [f"t{number}" for number in range(self.tables)]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        losses: Loss of each step, float32 ``[steps]``.
        arrays: All rows of each table, and their optimizer state, by name.
        lookups: Number of lookups that `MissCounter` checked.
        misses: Number of lookups whose row was not on the devices.
        statistics: `jaxrec.tier.statistics` of the first table; empty for whole tables.
    """

    losses: np.ndarray
    arrays: dict[str, np.ndarray]
    lookups: int = 0
    misses: int = 0
    statistics: dict[str, float] = dataclasses.field(default_factory=dict)


class _Model(nnx.Module):
    def __init__(self, sizes: Sizes, optimizer: str) -> None:
        rngs = nnx.Rngs(0)
        tables = [jaxrec.EmbeddingBagConfig(name, sizes.rows, sizes.dim) for name in sizes.names]
        self.dlrm = jaxrec.nn.DLRM(
            jaxrec.EmbeddingBagCollection(tables, optimizer=OPTIMIZERS[optimizer], rngs=rngs),
            num_dense=4,
            bottom_layer_sizes=(16, sizes.dim),
            top_layer_sizes=(16, 1),
            rngs=rngs,
        )


@nnx.jit(donate_argnums=(0, 1))
def _train_step(model, optimizer, batch):
    features, dense, labels = batch

    def loss_fn(model):
        logits = model.dlrm(dense, features)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

    loss, gradients = jaxrec.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def make_batches(sizes: Sizes) -> Iterator[Any]:
    """Yield batches of power-law ids, scattered over the tables."""
    rng = np.random.default_rng(sizes.seed)
    for _ in range(sizes.steps):
        shape = sizes.batch, sizes.bag
        ids = {name: rng.zipf(1.2, shape) % sizes.rows * 7919 % sizes.rows for name in sizes.names}
        dense = rng.normal(size=(sizes.batch, 4)).astype(np.float32)
        labels = rng.integers(0, 2, sizes.batch).astype(np.float32)
        yield KeyedJaggedArray.from_dense(ids), dense, labels


def train_whole(sizes: Sizes, optimizer: str, devices: int = 1) -> Outcome:
    """Train with whole tables."""
    model, mesh = _on_devices(lambda: _Model(sizes, optimizer), sizes, devices)
    batches = make_batches(sizes)
    if mesh is not None:
        batches = (jaxrec.mesh.shard_batch(batch, mesh) for batch in batches)
    return Outcome(_train(model, batches), _arrays(model, sizes))


def train_cached(
    sizes: Sizes,
    optimizer: str,
    store: str,
    path: str,
    port: int = 0,
    devices: int = 1,
    look_ahead: int = 2,
) -> Outcome:
    """Train with tables most of whose rows are in a store.

    Args:
        sizes: The sizes.
        optimizer: Name of the row optimizer.
        store: Name of the store, one of `STORES`.
        path: Absolute path without a slash at its end, of which nothing exists.
        port: Port of the Redis server.
        devices: Number of devices.
        look_ahead: Number of batches that are planned ahead.
    """
    url = STORES[store].replace("{path}", path).replace("{port}", str(port))
    settings = Cached(round(sizes.cached * sizes.rows), url)
    tables = dict.fromkeys(sizes.names, settings)
    model, _ = _on_devices(lambda: make(lambda: _Model(sizes, optimizer), tables), sizes, devices)
    counter = MissCounter(model)
    losses = _train(model, ahead(model, make_batches(sizes), look_ahead=look_ahead))
    statistics = jaxrec.tier.statistics(model)[sizes.names[0]]
    outcome = Outcome(
        losses,
        _arrays(model, sizes),
        sum(counter.lookups.values()),
        sum(counter.misses.values()),
        statistics,
    )
    close(model)
    return outcome


def compare(found: Outcome, expected: Outcome) -> dict[str, float]:
    """Return the largest difference of the losses, and that of the rows and the state.

    It is a share of the expected number, or a difference where that is below 1.
    """
    assert found.arrays.keys() == expected.arrays.keys()
    arrays = [_difference(found.arrays[name], x) for name, x in expected.arrays.items()]
    return {"losses": _difference(found.losses, expected.losses), "rows": max(arrays)}


def _on_devices(make_model: Any, sizes: Sizes, devices: int) -> tuple[Any, Any]:
    """Return a model, by rows over a mesh if there are several devices, and the mesh."""
    if devices == 1:
        return make_model(), None
    mesh = jax.make_mesh((devices,), ("data",))
    placement = dict.fromkeys(sizes.names, jaxrec.mesh.row_wise())
    plan = jaxrec.plan.ShardingPlan.from_dict(placement)
    return jaxrec.shard(make_model, plan, mesh), mesh


def _train(model: Any, batches: Any) -> np.ndarray:
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    return np.array([float(_train_step(model, optimizer, batch)) for batch in batches], np.float32)


def _arrays(model: Any, sizes: Sizes) -> dict[str, np.ndarray]:
    arrays, collection = {}, model.dlrm.embeddings
    for name in sizes.names:
        arrays[name] = np.asarray(collection.table(name))
        for key, array in collection.table_state(name).items():
            arrays[f"{name} {key}"] = np.asarray(array)
    return arrays


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    difference = np.abs(found.astype(np.float64) - expected)
    return float((difference / np.maximum(1, np.abs(expected))).max())
