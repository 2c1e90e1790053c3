"""Rows by raw id: a small table with a store reads and writes as one that has room for all ids."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxrec
from jaxrec.tier import Dynamic, ahead, make, shared
from jaxrec.tier.planning.tier import tier_of
from tests.tier import models

NAMES = ("item", "query", "item_wide")
STEPS, VOCABULARY, SAMPLES = 30, 300, 4
SETTINGS = Dynamic(store="memory://", unknown=shared(3))


def make_model(rows, devices=1, settings=SETTINGS):
    def made():
        return make(lambda: models.Ranker(rows, "adam"), dict.fromkeys(NAMES, settings))

    if devices == 1:
        return made()
    mesh = jax.make_mesh((devices,), ("data",))
    placements = dict.fromkeys((*NAMES, "age"), jaxrec.mesh.row_wise())
    placements["query"] = jaxrec.mesh.column_wise([0, 1])
    return jaxrec.shard(made, jaxrec.plan.ShardingPlan.from_dict(placements), mesh)


def collection_of(model, name):
    return model.wide if name == "item_wide" else model.embeddings


def rows_and_state(model, name, ids):
    collection = collection_of(model, name)
    return {"rows": collection.rows(name, ids), **collection.row_state(name, ids)}


def assert_same_rows(model, other, names, tolerance=0.0):
    for table in NAMES:
        expected = rows_and_state(other, table, names)
        for key, array in rows_and_state(model, table, names).items():
            np.testing.assert_allclose(
                array, expected[key], rtol=0, atol=tolerance, err_msg=f"{table} {key}"
            )


def end_of(batches, model, other, check=lambda: None):
    """Train two models side by side; call a check after every fourth step."""
    optimizers = [jaxrec.Optimizer(each, optax.sgd(0.1)) for each in (model, other)]
    iterators = [ahead(each, batches, look_ahead=2) for each in (model, other)]
    for number, pair in enumerate(zip(*iterators, strict=True)):
        for each, optimizer, (x, y) in zip((model, other), optimizers, pair, strict=True):
            models.train_step(each, optimizer, x, jnp.asarray(y))
        if number % 4 == 3:
            check()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_rows_are_those_of_a_table_with_room(devices):
    batches, names = models.stream(STEPS, VOCABULARY, samples=8 if devices == 8 else SAMPLES)
    small, large = make_model(100 if devices == 1 else 176, devices), make_model(600, 1)
    tolerance = 0.0 if devices == 1 else 1e-5
    # Some of these ids have rows, some are in the store, some have not come yet.
    order = np.random.default_rng(1).permutation(np.tile(names, 2))
    end_of(batches, small, large, lambda: assert_same_rows(small, large, order, tolerance))
    stored = tier_of(small).vocabularies[0].transfer.store
    assert 0 < len(stored) < VOCABULARY

    seen, _ = tier_of(large).vocabularies[0].vocabulary.map.items()
    seen = np.random.default_rng(2).permutation(seen)
    new = np.random.default_rng(3).normal(size=(seen.size, 8)).astype(np.float32)
    for model in (small, large):
        state = model.embeddings.row_state("item", seen)
        model.embeddings.load_rows("item", seen, new)
        model.embeddings.load_row_state("item", seen, {k: 2 * x + 1 for k, x in state.items()})
        np.testing.assert_array_equal(model.embeddings.rows("item", seen), new)
    assert_same_rows(small, large, order, tolerance)
    # They are trained from there.
    more, _ = models.stream(STEPS, VOCABULARY, samples=8 if devices == 8 else SAMPLES)
    end_of(more, small, large)
    assert_same_rows(small, large, order, tolerance)


def trained(rows=100):
    batches, names = models.stream(STEPS, VOCABULARY, samples=SAMPLES)
    model = make_model(rows)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    for x, y in ahead(model, batches, look_ahead=2):
        models.train_step(model, optimizer, x, jnp.asarray(y))
    return model, names


def test_ids_without_a_row():
    model, _ = trained()
    ids = np.array([2**60, 5, 2**60])
    table, state = model.embeddings.table("item"), model.embeddings.table_state("item")
    unknown = SETTINGS.unknown.rows_of(ids)
    np.testing.assert_array_equal(model.embeddings.rows("item", ids), np.asarray(table)[unknown])
    for key, array in model.embeddings.row_state("item", ids).items():
        np.testing.assert_array_equal(array, np.asarray(state[key])[unknown])
    with pytest.raises(ValueError, match=r"table 'item': id 5 has no row; an id gets one in a tr"):
        model.embeddings.load_rows("item", [5], np.ones((1, 8)))
    np.testing.assert_array_equal(model.embeddings.table("item"), table)


def test_a_row_on_its_way_back_is_not_set():
    batches, _ = models.stream(STEPS, VOCABULARY, samples=SAMPLES)
    model = make_model(100)
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.1))
    refused = 0
    for x, y in ahead(model, [*batches, *batches], look_ahead=2):
        models.train_step(model, optimizer, x, jnp.asarray(y))
        tier = tier_of(model)
        waiting = [moves[0].assignment.new_ids for moves in tier._pending.after(-1)]
        ids = np.concatenate([np.zeros(0, np.int64), *waiting])
        is_stored, _ = tier.vocabularies[0].transfer.store.get(ids)
        if is_stored.any():
            one = ids[is_stored][:1]
            before = model.embeddings.rows("item", one)
            with pytest.raises(RuntimeError, match=f"the row of id {one[0]} is on its way back"):
                model.embeddings.load_rows("item", one, np.ones((1, 8)))
            np.testing.assert_array_equal(model.embeddings.rows("item", one), before)
            refused += 1
    assert refused > 0


def test_strings_and_unsigned_ids():
    config = jaxrec.EmbeddingBagConfig("city", 10, 2)
    model = make(
        lambda: jaxrec.EmbeddingBagCollection([config], rngs=nnx.Rngs(0)), {"city": Dynamic()}
    )
    large = 2**64 - 5
    batch = {"city": np.array([["Rome"], ["Oslo"]])}
    numbers = {"city": np.array([[large], [7]], np.uint64)}
    for data in (batch, numbers):
        features = jaxrec.KeyedJaggedArray.from_dense(data, id_bits=64)
        for ready in ahead(model, [features]):
            expected = np.asarray(model(ready)["city"])
        ids = data["city"][:, 0]
        np.testing.assert_array_equal(model.rows("city", ids), expected)
        np.testing.assert_array_equal(model.rows("city", ids.tolist()), expected)
    np.testing.assert_array_equal(model.rows("city", [-5, 7]), expected)
    model.load_rows("city", ["Oslo"], np.ones((1, 2)))
    np.testing.assert_array_equal(model.rows("city", ["Oslo", "Paris"]), [[1, 1], [0, 0]])


@pytest.mark.parametrize(
    ("ids", "kind", "message"),
    [
        ([-1], ValueError, "table 'item': feature 'item', sample 0: id -1 is reserved"),
        ([3, 2**64], ValueError, "sample 1: id 18446744073709551616 does not fit 64 bits"),
        ([0.5], TypeError, r"table 'item': .* id 0.5 \(float\) is neither"),
        ([[3]], ValueError, r"table 'item': ids have one axis, got .* \[1, 1\]"),
        ([2**64 - 5, -5], (TypeError, ValueError), "table 'item'"),
    ],
    ids=["reserved", "beyond_64_bits", "float", "axes", "same_bits"],
)
def test_ids_that_cannot_be(ids, kind, message, unchecked):
    model = make_model(100)
    with pytest.raises(kind, match=message):
        model.embeddings.load_rows("item", ids, np.ones((len(ids), 8)))


def test_plain_tables_of_the_model_have_row_indices():
    model, names = trained()
    expected = np.asarray(model.embeddings.table("age"))
    np.testing.assert_array_equal(model.embeddings.rows("age", [9, 0]), expected[[9, 0]])
    with pytest.raises(ValueError, match="table 'age' has the rows 0 to 9, got id"):
        model.embeddings.rows("age", names[:1])
    with pytest.raises(KeyError, match="nowhere"):
        model.embeddings.rows("nowhere", [1])


def test_a_model_within_another():
    """The vocabularies are found by the paths that `make` saw."""
    model, names = trained()
    outer = nnx.Dict({"ranker": model})
    rows = outer["ranker"].wide.rows("item_wide", names)
    np.testing.assert_array_equal(rows, model.wide.rows("item_wide", names))
