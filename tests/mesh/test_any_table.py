"""Tables that devices do not divide: fewer rows or columns than devices, and unequal parts.

All tables with all optimizers take minutes: JAXREC_TEST_MATRIX=1 runs them, else a few are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.mesh import column_wise, grid, row_wise, shard_batch, table_column_wise, table_row_wise
from jaxrec.tier.rows import first_rows
from tests.mesh.table_steps import BATCH, smooth_loss, train_tables

# Rows and columns of each table, its placement on 2 hosts of 4 devices, and where it moves next.
TABLES = {
    "few_rows": (5, 8, row_wise(), column_wise()),
    "few_rows_pooled": (5, 8, row_wise(exchange="pooled"), grid(exchange="pooled")),
    "few_rows_of_a_host": (3, 4, table_row_wise(1), row_wise()),
    "few_rows_of_a_host_pooled": (3, 4, table_row_wise(1, exchange="pooled"), column_wise()),
    "one_row": (1, 6, row_wise(), column_wise((1, 5, 6))),
    "uneven_rows": (
        40,
        8,
        row_wise((6, 1, 2), shares=(5, 1, 2), buckets=10),
        row_wise(shares=range(1, 9)),
    ),
    "columns_12_over_8": (40, 12, column_wise(), row_wise()),
    "columns_12_over_8_by_rows": (40, 12, column_wise(exchange="rows"), grid()),
    "columns_130_over_3": (24, 130, column_wise((6, 1, 3)), row_wise((2, 4, 7))),
    "columns_of_a_host": (24, 7, table_column_wise(1), grid((1, 0))),
    "few_columns": (24, 3, column_wise(), table_row_wise(0)),
    "grid_of_sums": (40, 8, grid(exchange="pooled"), column_wise()),
    "grid_of_sums_unequal": (3, 9, grid((1, 0), exchange="pooled"), column_wise((0, 2, 4, 6))),
    "grid_of_rows_unequal": (22, 9, grid((1, 0)), grid(exchange="pooled")),
    "one_device_twice": (24, 8, column_wise((3, 5, 3)), row_wise()),
    "one_host_twice": (24, 8, grid((1, 1), exchange="pooled"), row_wise()),
}
IS_WHOLE = os.environ.get("JAXREC_TEST_MATRIX") == "1"
POOLED = [
    "few_rows",
    "uneven_rows",
    "few_rows_of_a_host_pooled",
    "columns_130_over_3",
    "grid_of_sums_unequal",
]
PER_ID = ["few_rows", "uneven_rows", "columns_12_over_8_by_rows", "grid_of_rows_unequal"]
if IS_WHOLE:
    POOLED = list(TABLES)
    # Without pooling, rows travel.
    PER_ID = [
        name
        for name, (_, _, placement, _) in TABLES.items()
        if placement.exchange != "pooled" and name != "one_device_twice"
    ]
OPTIMIZERS = {
    "sgd": jaxrec.optim.sgd(0.1),
    "clipped": jaxrec.optim.sgd(0.1, clip_norm=0.05),
    "rowwise_adagrad": jaxrec.optim.rowwise_adagrad(0.1),
    "adam": jaxrec.optim.adam(0.01),
    "lamb": jaxrec.optim.lamb(0.01),
}


def make(kind, optimizer):
    if kind == "pooled":
        configs = [
            jaxrec.EmbeddingBagConfig(
                name, *TABLES[name][:2], pooling="mean" if "host" in name else "sum"
            )
            for name in POOLED
        ]
        return jaxrec.EmbeddingBagCollection(configs, optimizer=optimizer, rngs=nnx.Rngs(0))
    configs = [jaxrec.EmbeddingConfig(name, *TABLES[name][:2]) for name in PER_ID]
    return jaxrec.EmbeddingCollection(configs, optimizer=optimizer, rngs=nnx.Rngs(0))


def plan(kind, number):
    placements = {name: each[2 + number] for name, each in TABLES.items()}
    if kind == "per_id":
        placements = {
            name: dataclasses.replace(each, exchange="rows") for name, each in placements.items()
        }
    return jaxrec.plan.ShardingPlan.from_dict(placements)


def draw(model, seed):
    rng = np.random.default_rng(seed)
    bags = {
        config.name: [
            rng.integers(0, config.num_embeddings, rng.integers(0, 4)).tolist()
            for _ in range(BATCH)
        ]
        for config in model.configs
    }
    return jaxrec.KeyedJaggedArray.from_lists(bags, capacities=dict.fromkeys(bags, 48))


def train(model, steps, calls, place=lambda batch: batch):
    losses = []
    for step in steps:
        batches = [place(draw(model, (step, call))) for call in range(calls)]
        losses.append(float(train_tables(smooth_loss, model, batches, step)))
    return losses, read(model)


def read(model):
    return {
        config.name: {
            "rows": np.asarray(model.table(config.name)),
            **jax.tree.map(np.asarray, model.table_state(config.name)),
        }
        for config in model.configs
    }


@functools.cache
def on_one_device(kind, optimizer):
    model = make(kind, OPTIMIZERS[optimizer])
    return read(model), train(model, range(3), 1), train(model, range(3, 5), 2)


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((2, 4), ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def assert_close(tables, expected):
    for name, arrays in expected.items():
        for key, array in arrays.items():
            # Squares have twice the relative error of what they are squares of.
            tolerance = 1e-6 if key == "rows" else 2e-6
            atol = max(tolerance * np.abs(array).max(), 1e-12)
            np.testing.assert_allclose(
                tables[name][key], array, rtol=0, atol=atol, err_msg=f"{name} {key}"
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    list(itertools.product(["pooled", "per_id"], OPTIMIZERS))
    if IS_WHOLE
    else [("pooled", "lamb"), ("per_id", "rowwise_adagrad")],
)
def test_equal_to_one_device(mesh, kind, optimizer):
    first, (losses, tables), (more_losses, more_tables) = on_one_device(kind, optimizer)
    model = jaxrec.shard(lambda: make(kind, OPTIMIZERS[optimizer]), plan(kind, 0), mesh)
    for name, arrays in read(model).items():
        np.testing.assert_array_equal(arrays["rows"], first[name]["rows"])

    def place(batch):
        return shard_batch(batch, mesh)

    found = train(model, range(3), 1, place)
    np.testing.assert_allclose(found[0], losses, rtol=1e-6)
    assert_close(found[1], tables)

    # Moved to another plan, values stay as they are to the bit, and training goes on.
    jaxrec.shard(model, plan(kind, 1), mesh)
    for name, arrays in read(model).items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, found[1][name][key])
    found = train(model, range(3, 5), 2, place)
    np.testing.assert_allclose(found[0], more_losses, rtol=1e-6)
    assert_close(found[1], more_tables)


def test_some_rows_of_unequal_column_slices(mesh):
    """Rows and state that are read and set one by one, and rows of ids that are drawn anew."""
    config = jaxrec.EmbeddingBagConfig("user", num_embeddings=11, embedding_dim=7)
    model = jaxrec.EmbeddingBagCollection(
        [config], optimizer=jaxrec.optim.adam(clip_norm=1.0), rngs=nnx.Rngs(0)
    )
    placements = jaxrec.plan.ShardingPlan.from_dict({"user": column_wise((1, 6, 3))})
    sharded = jaxrec.shard(nnx.clone(model), placements, mesh)
    ids, values = [9, 2, 4], np.arange(21, dtype=np.float32).reshape(3, 7)
    np.testing.assert_array_equal(sharded.rows("user", ids), model.rows("user", ids))
    for each in (model, sharded):
        each.load_rows("user", ids, values)
        state = {"first_moment": values + 1, "second_moment": values + 2}
        each.load_row_state("user", ids, state)
    for read in (lambda each: each.table("user"), lambda each: each.row_state("user", ids)):
        jax.tree.map(np.testing.assert_array_equal, read(sharded), read(model))
    stored = sharded.tables.get_value().placed
    (placed,) = stored.layout.groups
    assert placed.group.dim == 3  # 3, 2 and 2 columns
    padding = np.asarray(stored.rows[placed.name]).reshape(8, 11, 3)[[6, 3], :, 2]
    np.testing.assert_array_equal(padding, 0)
    key = np.array([0, 5], np.uint32)
    new = first_rows.NewRows(config, np.array([3, 8]), np.array([70, 5]))
    fresh = [
        first_rows.reset(store, [new], key) for store in (model.tables.get_value().placed, stored)
    ]
    np.testing.assert_array_equal(fresh[1].read("user"), fresh[0].read("user"))
