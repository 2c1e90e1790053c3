"""Every sharding type, collection, pooling and optimizer, on any number of devices, is one device.

The whole matrix takes a quarter of an hour: JAXREC_TEST_MATRIX=1 runs it, else a part is.
"""

from __future__ import annotations

import functools
import itertools
import math
import os

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import (
    column_wise,
    data_parallel,
    grid,
    row_wise,
    shard_batch,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tests.mesh.table_steps import BATCH, smooth_loss, train_tables

ROWS, DIM = 64, 8

# Placements that do for any number of devices; those that are given where they are not pooled too.
TYPES = {
    "data_parallel": data_parallel(),
    "table_wise": table_wise(0),
    "table_wise_rows": table_wise(0, exchange="rows"),
    "row_wise": row_wise(),
    "row_wise_sums": row_wise(exchange="pooled"),
    "column_wise": column_wise(),
    "table_row_wise": table_row_wise(0),
    "table_row_wise_sums": table_row_wise(0, exchange="pooled"),
    "table_column_wise": table_column_wise(0),
    "grid": grid(),
    "grid_sums": grid(exchange="pooled"),  # by rows where the optimizer needs whole rows
}
OPTIMIZERS = {
    "sgd": jaxrec.optim.sgd(0.1),
    "rowwise_adagrad": jaxrec.optim.rowwise_adagrad(0.1),
    "adam": jaxrec.optim.adam(0.01),
}
MESHES = {"1": (1, 1), "2": (1, 2), "4": (2, 2), "8": (2, 4), "8_of_4_hosts": (4, 2)}


def pooled(optimizer):
    configs = [
        jaxrec.EmbeddingBagConfig(f"{kind}_{pooling}", ROWS, DIM, pooling=pooling)
        for kind, pooling in itertools.product(TYPES, ("sum", "mean"))
    ]
    return jaxrec.EmbeddingBagCollection(configs, optimizer=optimizer, rngs=nnx.Rngs(0))


def per_id(optimizer):
    configs = [
        jaxrec.EmbeddingConfig(kind, ROWS, DIM) for kind in TYPES if not kind.endswith("sums")
    ]
    return jaxrec.EmbeddingCollection(configs, optimizer=optimizer, rngs=nnx.Rngs(0))


COLLECTIONS = {"pooled": pooled, "per_id": per_id}


def draw(kind, names, seed):
    """Random, power-law and adversarial ids: one id everywhere, or all on the first device."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 4, (len(names), BATCH))
    if kind == "same":
        sizes[:] = 3
    highest = {"random": ROWS, "power_law": ROWS, "same": 1, "first_device": ROWS // 8}[kind]
    bags = {}
    for name, counts in zip(names, sizes, strict=True):
        shares = rng.random(counts.sum()) ** (4 if kind == "power_law" else 1)
        ids = (shares * highest).astype(int)
        bags[name] = [part.tolist() for part in np.split(ids, np.cumsum(counts)[:-1])]
    return jaxrec.KeyedJaggedArray.from_lists(bags, capacities=dict.fromkeys(names, 48))


KINDS = ("random", "power_law", "same", "first_device", "random")


def train(model, place):
    names = [table.name for table in model.configs]
    losses = []
    for step, kind in enumerate(KINDS):
        batch = place(draw(kind, names, step))
        losses.append(float(train_tables(smooth_loss, model, [batch], step)))
    tables = {name: np.asarray(model.table(name)) for name in names}
    state = {name: jax.tree.map(np.asarray, model.table_state(name)) for name in names}
    return losses, tables, state


@functools.cache
def on_one_device(collection, optimizer):
    model = COLLECTIONS[collection](OPTIMIZERS[optimizer])
    return train(model, lambda batch: batch)


WHOLE = list(itertools.product(COLLECTIONS, OPTIMIZERS, MESHES, ("auto", "explicit")))
PART = [
    ("pooled", "rowwise_adagrad", "8", "explicit"),
    ("pooled", "rowwise_adagrad", "1", "auto"),
    ("pooled", "sgd", "8_of_4_hosts", "auto"),
    ("per_id", "adam", "4", "auto"),
    ("per_id", "sgd", "2", "explicit"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collection", "optimizer", "devices", "axes"),
    WHOLE if os.environ.get("JAXREC_TEST_MATRIX") == "1" else PART,
)
def test_equal_to_one_device(collection, optimizer, devices, axes):
    losses, tables, state = on_one_device(collection, optimizer)
    kind = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[axes]
    shape = MESHES[devices]
    mesh = jax.make_mesh(
        shape,
        ("host", "device"),
        axis_types=(kind,) * 2,
        devices=jax.devices()[: math.prod(shape)],
    )
    model = COLLECTIONS[collection](OPTIMIZERS[optimizer])
    types = TYPES | ({"grid_sums": grid()} if OPTIMIZERS[optimizer].needs_whole_rows else {})
    placements = {
        table.name: types[table.name.removesuffix("_sum").removesuffix("_mean")]
        for table in model.configs
    }
    jaxrec.shard(model, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)
    with jax.set_mesh(mesh):
        found = train(model, lambda batch: shard_batch(batch, mesh))
    np.testing.assert_allclose(found[0], losses, rtol=1e-6)
    for name in tables:
        assert_close(found[1][name], tables[name])
        for key, array in state[name].items():
            # Squares have twice the relative error of what they are squares of.
            assert_close(found[2][name][key], array, 2e-6)


def assert_close(array, expected, tolerance=1e-6):
    """Equal to so much of the size of what is in the array."""
    scale = np.abs(expected).max()
    np.testing.assert_allclose(array, expected, rtol=0, atol=max(tolerance * scale, 1e-12))
