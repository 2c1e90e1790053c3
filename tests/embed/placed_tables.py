"""Collections in every placement, on one device and over eight, and their tables in NumPy."""

from __future__ import annotations

import itertools

import jax
import numpy as np
from flax import nnx

import jaxrec
from jaxrec import mesh as m

OPTIMIZERS = {
    "sgd": jaxrec.optim.sgd(0.1),
    "rowwise_adagrad": jaxrec.optim.rowwise_adagrad(0.1),
    "adam": jaxrec.optim.adam(0.1),
}
PLACEMENTS = {
    "one_device": None,
    "data_parallel": m.data_parallel(),
    "table_wise": m.table_wise(device=5),
    "row_wise": m.row_wise(),
    "row_wise_some": m.row_wise(devices=(1, 5, 6)),
    "column_wise": m.column_wise(devices=(2, 7)),
    "table_row_wise": m.table_row_wise(host=1),
    "table_column_wise": m.table_column_wise(host=1),
    "grid": m.grid(),
}
CASES = [
    *itertools.product(PLACEMENTS, ["rowwise_adagrad"]),
    ("one_device", "adam"),
    ("one_device", "sgd"),
    ("row_wise", "adam"),
    ("row_wise", "sgd"),
    ("grid", "adam"),
]


def make_collection(placement, optimizer):
    """Three tables, two of them of one width, with random rows and state; and these in NumPy."""
    configs = [
        jaxrec.EmbeddingBagConfig("user", 70, 8),
        jaxrec.EmbeddingBagConfig("item", 101, 8),
        jaxrec.EmbeddingBagConfig("wide", 33, 16),
    ]

    def made():
        return jaxrec.EmbeddingBagCollection(
            configs, optimizer=OPTIMIZERS[optimizer], rngs=nnx.Rngs(0)
        )

    if PLACEMENTS[placement] is None:
        collection = made()
    else:
        plan = jaxrec.plan.ShardingPlan.from_dict(
            {config.name: PLACEMENTS[placement] for config in configs}
        )
        mesh = jax.make_mesh((2, 4), ("host", "device"))
        collection = jaxrec.shard(made, plan, mesh)
    rng = np.random.default_rng(0)
    tables = {}
    for config in configs:
        shape = config.num_embeddings, config.embedding_dim
        tables[config.name] = {"rows": rng.normal(size=shape).astype(np.float32)}
        collection.load_table(config.name, tables[config.name]["rows"])
        state = {
            name: rng.normal(size=array.shape).astype(array.dtype)
            for name, array in collection.table_state(config.name).items()
        }
        collection.load_table_state(config.name, state)
        tables[config.name] |= state
    return collection, tables


def assert_tables(store, tables):
    for name, arrays in tables.items():
        np.testing.assert_array_equal(store.read(name), arrays["rows"], err_msg=name)
        for key, array in store.read_state(name).items():
            np.testing.assert_array_equal(array, arrays[key], err_msg=f"{name} {key}")
