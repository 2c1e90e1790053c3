"""Rows that leave the devices, into pinned memory of the host."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

import jaxrec
from jaxrec.embed import rows
from jaxrec.embed.slots import TableRows
from jaxrec.tier import Dynamic, ahead, make
from tests.embed.test_store import HostTables

CONFIGS = [jaxrec.EmbeddingBagConfig(name, 20, 8) for name in ("a", "b")]


def test_the_rows_of_all_tables_go_into_pinned_memory_together():
    collection = jaxrec.EmbeddingBagCollection(
        CONFIGS, optimizer=jaxrec.optim.rowwise_adagrad(0.1), rngs=nnx.Rngs(0)
    )
    store = collection.tables.get_value()
    requests = [TableRows("a", np.array([3, 0])), TableRows("b", np.array([19]))]
    leaving = rows.read(store, requests, is_leaving=True)
    assert len(leaving.arrays) == 1
    for array in jax.tree.leaves(dict(leaving.arrays)):
        assert array.sharding.memory_kind == "pinned_host"
    first, second = leaving.to_host()
    np.testing.assert_array_equal(first["rows"], collection.table("a")[np.array([3, 0])])
    np.testing.assert_array_equal(second["rows"], collection.table("b")[np.array([19])])


def test_a_store_whose_reads_call_back():
    def made():
        config = jaxrec.EmbeddingBagConfig("a", 14, 4)
        return jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0), store=HostTables.init)

    model = make(made, {"a": Dynamic(store="memory://")})
    ids = [
        np.arange(4) + 4 * (step % 6) for step in range(12)
    ]  # all of them are evicted, and return
    lengths = np.ones(4, np.int32)
    batches = [(jaxrec.KeyedJaggedArray.from_lengths(["a"], x, lengths, id_bits=64),) for x in ids]
    values = [np.asarray(model(features).values) for (features,) in ahead(model, batches, 1)]
    for first, again in zip(values[:6], values[6:], strict=True):
        np.testing.assert_array_equal(first, again)
