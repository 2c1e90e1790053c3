"""Steps of `benchmarks.growth`: tables in one collection, separate or sharded, and their bound."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from benchmarks import mesh
from benchmarks.mesh import Workload
from benchmarks.training import pure_step
from jaxrec import embed

SEEDS = range(4)
_RATE = 0.01

# Ids that are read to measure a rate, and those of each bag.
_READ_IDS, _READ_BAG = 1 << 20, 128

Way = tuple[Any, Callable[[Any, Any], tuple[Any, Any]], list[Any]]


def make(workload: Workload, way: str) -> Way:
    """Return the state, the step ``(state, batch) -> (state, loss)`` and the batches of a way."""
    match way:
        case "fused":
            return _fused(workload)
        case "separate collections":
            return _collections(workload)
        case "nnx.Embed with optax":
            return _dense(workload)
        case _:
            return _sharded(workload, way)


def _batch(workload: Workload, seed: int) -> jaxrec.KeyedJaggedArray:
    ids = workload.draw(seed)
    return jaxrec.KeyedJaggedArray.from_lengths(
        workload.names,
        np.concatenate([each.reshape(-1) for each in ids]),
        np.full(workload.batch * workload.tables, workload.bag, np.int32),
        capacities=[each.size for each in ids],
    )


def _step(tables: Any, batch: Any) -> tuple[Any, Any]:
    return mesh.train_step(tables, batch, 0)


def _fused(workload: Workload) -> Way:
    optimizer = jaxrec.optim.sgd(_RATE) if workload.name == "tables" else mesh.optimizer()
    tables = embed.init_tables(mesh.configs(workload), optimizer, jax.random.key(0))
    return tables, _step, [jax.device_put(_batch(workload, seed)) for seed in SEEDS]


def _sharded(workload: Workload, way: str) -> Way:
    """Tables over all devices; on one device, tables that are not sharded."""
    tables, step, batches = _fused(workload)
    devices = jax.device_count()
    if devices == 1:
        return tables, step, batches
    kind, _, exchange = way.partition(":")
    placements = {
        name: jaxrec.mesh.table_wise(number % devices)
        if kind == "table_wise"
        else jaxrec.mesh.row_wise(exchange=exchange)
        for number, name in enumerate(workload.names)
    }
    over = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    tables = jaxrec.mesh.shard_tables(tables, placements, over)
    room = dict.fromkeys(workload.names, workload.batch // devices * workload.bag)
    host = [_batch(workload, seed) for seed in SEEDS]
    return tables, step, [jaxrec.mesh.shard_batch(x, over, capacities=room) for x in host]


def _collections(workload: Workload) -> Way:
    """A collection for each table, all in one compiled step."""
    tables = [
        embed.init_tables([config], jaxrec.optim.sgd(_RATE), jax.random.key(0))
        for config in mesh.configs(workload)
    ]
    lengths = np.full(workload.batch, workload.bag, np.int32)
    batches = [
        [
            jaxrec.KeyedJaggedArray.from_lengths(
                [name], ids.reshape(-1), lengths, capacities=[ids.size]
            )
            for name, ids in zip(workload.names, workload.draw(seed), strict=True)
        ]
        for seed in SEEDS
    ]

    def step(tables: Any, batch: Any) -> tuple[Any, Any]:
        results = [_step(*each) for each in zip(tables, batch, strict=True)]
        return [after for after, _ in results], sum(loss for _, loss in results)

    return tables, step, jax.device_put(batches)


def _dense(workload: Workload) -> Way:
    """An `nnx.Embed` for each table, all trained by one optax optimizer."""
    rngs = nnx.Rngs(0)
    model = nnx.List([nnx.Embed(rows, workload.dim, rngs=rngs) for rows in workload.row_counts])
    optimizer = nnx.Optimizer(model, optax.sgd(_RATE), wrt=nnx.Param)

    def loss_fn(model: Any, batch: Any) -> Any:
        pooled = [table(ids).sum(axis=1) for table, ids in zip(model, batch, strict=True)]
        return sum(jnp.square(each).mean() for each in pooled)

    def update(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, gradients = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, gradients)
        return loss

    state, step = pure_step(model, optimizer, update)
    return state, step, [jax.device_put(workload.draw(seed)) for seed in SEEDS]


def read_rate(workload: Workload, tables: Any = None) -> float:
    """Return the bytes a second at which lookups read random rows.

    Args:
        workload: The tables' sizes.
        tables: The tables; None: others of the same sizes.
    """
    batch = max(_READ_IDS // (workload.tables * _READ_BAG), 1)
    reading = dataclasses.replace(workload, batch=batch, bag=_READ_BAG, ids="uniform")
    tables = _fused(reading)[0] if tables is None else tables
    batches = [jax.device_put(_batch(reading, seed)) for seed in SEEDS]
    compiled = jax.jit(_pooled).lower(tables, batches[0]).compile()
    times = []
    for number in range(12):
        start = time.perf_counter()
        jax.block_until_ready(compiled(tables, batches[number % len(batches)]))
        times.append(time.perf_counter() - start)
    row_bytes = 4 * workload.dim
    return row_bytes * batch * _READ_BAG * workload.tables / float(np.median(times[2:]))


def _pooled(tables: Any, batch: Any) -> Any:
    return embed.lookup(tables, batch)[0].values
