"""Rows that leave the devices."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed import rows
from jaxrec.embed.slots import TableRows
from jaxrec.tier import Dynamic, ahead, make
from tests.embed.test_store import HostTables

CONFIGS = [jaxrec.EmbeddingBagConfig(name, 20, 8) for name in ("a", "b")]


@pytest.mark.parametrize("has_own_memory", [False, True])
def test_the_rows_of_all_tables_leave_together(has_own_memory, monkeypatch):
    """Into pinned memory, but for devices that compute in the host's memory, as CPUs do."""
    collection = jaxrec.EmbeddingBagCollection(
        CONFIGS, optimizer=jaxrec.optim.rowwise_adagrad(0.1), rngs=nnx.Rngs(0)
    )
    store = collection.tables.get_value()
    requests = [TableRows("a", np.array([3, 0])), TableRows("b", np.array([19]))]
    if has_own_memory:
        monkeypatch.setattr(rows, "_has_own_memory", lambda device: True)
    leaving = rows.read(store, requests, is_leaving=True)
    assert len(leaving.arrays) == 1
    kind = "pinned_host" if has_own_memory else jax.devices()[0].default_memory().kind
    for array in jax.tree.leaves(dict(leaving.arrays)):
        assert array.sharding.memory_kind == kind
    first, second = leaving.to_host()
    np.testing.assert_array_equal(first["rows"], collection.table("a")[np.array([3, 0])])
    np.testing.assert_array_equal(second["rows"], collection.table("b")[np.array([19])])


def test_a_store_whose_reads_call_back():
    def made():
        config = jaxrec.EmbeddingBagConfig("a", 14, 4)
        return jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0), store=HostTables.init)

    model = make(made, {"a": Dynamic(store="memory://")})
    # All of them are evicted, and return.
    ids = [np.arange(4) + 4 * (step % 6) for step in range(12)]
    lengths = np.ones(4, np.int32)
    batches = [(jaxrec.KeyedJaggedArray.from_lengths(["a"], x, lengths, id_bits=64),) for x in ids]
    values = [np.asarray(model(features).values) for (features,) in ahead(model, batches, 1)]
    for first, again in zip(values[:6], values[6:], strict=True):
        np.testing.assert_array_equal(first, again)
