"""A store of rows that ids are given: everything but ids is that of the store with the arrays."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import jaxrec
from jaxrec.embed import Tables
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.tier.store import TierStore

CONFIGS = [
    jaxrec.EmbeddingBagConfig("open", 20, 4, ["f"]),
    jaxrec.EmbeddingBagConfig("plain", 30, 4, ["g"]),
]


@pytest.fixture
def inner() -> Tables:
    collection = jaxrec.EmbeddingBagCollection(
        CONFIGS, optimizer=jaxrec.optim.adam(0.1), rngs=nnx.Rngs(0)
    )
    return collection.tables.get_value()


@pytest.fixture
def store(inner) -> TierStore:
    return TierStore(inner, "the tier", ("f",))


def test_whole_tables(store, inner):
    np.testing.assert_array_equal(store.read("open"), inner.read("open"))
    values = np.arange(80.0).reshape(20, 4)
    changed = store.write("open", values)
    assert isinstance(changed, TierStore)
    np.testing.assert_array_equal(changed.read("open"), values)
    state = {name: np.ones_like(x) for name, x in changed.read_state("open").items()}
    changed = changed.write_state("open", state)
    for name, array in changed.read_state("open").items():
        np.testing.assert_array_equal(array, state[name])
    shapes, view = changed.checkpoint_shapes("open"), changed.checkpoint_view("open")
    assert jax.tree.map(np.shape, view) == jax.tree.map(np.shape, shapes)
    loaded = changed.from_checkpoint("plain", changed.checkpoint_view("plain"), 30)
    assert isinstance(loaded, TierStore)


def test_rows(store):
    (slots,) = store.row_slots("open", np.array([3, 5]))
    indices = store.devices.put(slots.slots)
    rows, state = store.read_rows(slots.group, indices)
    np.testing.assert_array_equal(rows, np.asarray(store.read("open"))[[3, 5]])
    changed = store.write_rows(slots.group, indices, rows + 1, state)
    assert isinstance(changed, TierStore)
    np.testing.assert_array_equal(changed.read("open")[3], store.read("open")[3] + 1)


def test_bounds_are_those_of_plain_tables(store, inner):
    assert inner.bounds == {"f": 20, "g": 30}
    assert store.bounds == {"g": 30}


def test_a_wrapped_store_is_unwrapped(store, inner):
    assert store.placed is inner
    assert store.with_placed(inner) == store
    assert jax.tree.leaves(store.without_rows) == []
    assert store.layout is inner.layout
    assert store.groups == inner.groups


MESSAGE = (
    "the tables of feature 'f' have an open vocabulary, and the batch has its ids, not its rows; "
    r"iterate over jaxrec.tier.ahead\(model, batches\) and call the model with what it yields"
)


def test_ids_are_no_rows(store):
    features = KeyedJaggedArray.from_lists({"f": [[1]], "g": [[2]]})
    for method in (store.route, store.lookup):
        with pytest.raises(TypeError, match=MESSAGE):
            method(features)
    with_rows = dataclasses.replace(features, slot_keys=("f",))
    assert store.route(with_rows) == {}
    pooled, _ = store.lookup(with_rows)
    assert jax.tree.leaves(pooled)
