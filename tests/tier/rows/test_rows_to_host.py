"""Rows that leave the devices: gathered by one program, into pinned memory of the host."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

import jaxrec
from jaxrec.embed import rows
from jaxrec.embed.slots import TableRows

CONFIGS = [jaxrec.EmbeddingBagConfig(name, 20, 8) for name in ("a", "b")]


def test_one_program_writes_the_rows_of_all_tables_into_pinned_memory():
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
    (group,) = store.groups
    program = rows._read.lower(store, np.zeros(64, np.int32), group, True, True).compile().as_text()
    assert "callback" not in program
