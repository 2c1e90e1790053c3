"""Parts shared by the benchmarks of training steps: a small model, its batches, timing, memory."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxrec


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model of one table and a small tower on top, and its batch."""

    rows: int = 2_000_000
    dim: int = 64
    batch: int = 4096
    bag: int = 4


class Tower(nnx.Module):
    """Embeddings of one feature, then two dense layers."""

    def __init__(self, embeddings: nnx.Module, dim: int, rngs: nnx.Rngs):
        self.embeddings = embeddings
        self.hidden = nnx.Linear(dim, 32, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, pooled: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(pooled)))[:, 0]


def draw_ids(shape: Shape, seed: int) -> np.ndarray:
    """``[batch, bag]`` log-uniform ids, as real ids are: few frequent, many rare."""
    uniform = np.random.default_rng(seed).random((shape.batch, shape.bag))
    return np.minimum(shape.rows**uniform - 1, shape.rows - 1).astype(np.int32)


def draw_labels(shape: Shape, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2, shape.batch).astype(np.float32)


def fused_step(shape: Shape, optimizer: jaxrec.optim.RowOptimizer) -> tuple[Any, Callable]:
    """State and step of the model with a jaxrec table."""
    config = jaxrec.EmbeddingBagConfig("item", shape.rows, shape.dim)
    rngs = nnx.Rngs(0)
    embeddings = jaxrec.EmbeddingBagCollection([config], optimizer=optimizer, rngs=rngs)
    model = Tower(embeddings, shape.dim, rngs)
    dense = jaxrec.Optimizer(model, optax.adam(1e-3))

    def loss_fn(model, ids, labels):
        lengths = jnp.full(shape.batch, shape.bag, jnp.int32)
        batch = jaxrec.KeyedJaggedArray(
            ids.reshape(-1),
            lengths,
            keys=("item",),
            capacities=(ids.size,),
            strides=(shape.batch,),
        )
        logits = model(model.embeddings(batch).values)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

    def update(model, optimizer, ids, labels):
        loss, gradients = jaxrec.value_and_grad(loss_fn)(model, ids, labels)
        optimizer.update(model, gradients)
        return loss

    return _jitted(model, dense, update)


def dense_step(shape: Shape, tx: optax.GradientTransformation) -> tuple[Any, Callable]:
    """State and step of the usual Flax way: `nnx.Embed`, and optax over all parameters."""
    rngs = nnx.Rngs(0)
    model = Tower(nnx.Embed(shape.rows, shape.dim, rngs=rngs), shape.dim, rngs)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_fn(model, ids, labels):
        logits = model(model.embeddings(ids).sum(axis=1))
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

    def update(model, optimizer, ids, labels):
        loss, gradients = nnx.value_and_grad(loss_fn)(model, ids, labels)
        optimizer.update(model, gradients)
        return loss

    return _jitted(model, optimizer, update)


def pure_step(model: nnx.Module, optimizer: nnx.Module, update: Callable) -> tuple[Any, Callable]:
    """State of both, and a pure function of state and batch that updates them."""
    graphdef, state = nnx.split((model, optimizer))

    def step(state, *batch):
        model, optimizer = nnx.merge(graphdef, state)
        loss = update(model, optimizer, *batch)
        return nnx.state((model, optimizer)), loss

    return state, step


def _jitted(model: nnx.Module, optimizer: nnx.Module, update: Callable) -> tuple[Any, Callable]:
    state, step = pure_step(model, optimizer, update)
    return state, jax.jit(step, donate_argnums=0)


def compile_step(state: Any, step: Any, shape: Shape) -> jax.stages.Compiled:
    return step.lower(state, draw_ids(shape, 0), draw_labels(shape, 0)).compile()


def time_step(state: Any, compiled: Callable, shape: Shape, seconds: float) -> list[float]:
    """Milliseconds of each step for about ``seconds``, on eight batches in turn."""
    batches = [(draw_ids(shape, s), draw_labels(shape, s)) for s in range(8)]
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        state, loss = compiled(state, *batches[len(times) % 8])
        jax.block_until_ready((state, loss))
        times.append((time.perf_counter() - start) * 1e3)
    return times[2:]


def table_copies(compiled: jax.stages.Compiled, shape: Shape) -> list[str]:
    """Instructions of the program that copy an array of the table's shape."""
    pattern = re.compile(rf"\[{shape.rows}(,{shape.dim})?\]\S* copy\(")
    return [line.strip() for line in compiled.as_text().splitlines() if pattern.search(line)]


def total_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
