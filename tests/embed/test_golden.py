"""Forward values and gradients recorded from TorchRec's collections."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import jaxrec
from tests import golden

pytestmark = [pytest.mark.every_case, pytest.mark.jax_version]

# With this optimizer the change of a table is minus its gradient.
UNIT_SGD = jaxrec.optim.sgd(1.0)


def load_tables(collection, arrays):
    for config in collection.configs:
        collection.load_table(config.name, arrays[f"table_{config.name}"])


def assert_table_gradients(collection, gradients, arrays, tolerance):
    """Applies the gradients with unit SGD and compares how the tables change."""
    collection.apply_gradients(gradients.tables[""], step=0)
    for config in collection.configs:
        change = arrays[f"table_{config.name}"] - np.asarray(collection.table(config.name))
        np.testing.assert_allclose(change, arrays[f"grad_table_{config.name}"], **tolerance)


def bag_collection(case, arrays):
    tables = [
        jaxrec.EmbeddingBagConfig(
            table["name"],
            table["rows"],
            table["dim"],
            feature_names=table["features"],
            pooling=table["pooling"].lower(),
        )
        for table in case["meta"]["tables"]
    ]
    collection = jaxrec.EmbeddingBagCollection(
        tables, optimizer=UNIT_SGD, is_weighted=case["meta"]["is_weighted"], rngs=nnx.Rngs(0)
    )
    load_tables(collection, arrays)
    return collection


def batch_of(arrays, **more):
    return jaxrec.KeyedJaggedArray.from_lengths(
        keys=[str(key) for key in arrays["keys"]],
        values=arrays["values"],
        lengths=arrays["lengths"],
        weights=arrays.get("weights"),
        **more,
    )


def assert_pooled_case(collection, batch, arrays, tolerance):
    def loss(model, weights):
        pooled = model(dataclasses.replace(batch, weights=weights))
        return (pooled.values * arrays["grad_out"]).sum(), pooled

    evaluate = nnx.jit(jaxrec.value_and_grad(loss, has_aux=True))
    (_, pooled), gradients = evaluate(collection, batch.weights)
    assert list(pooled.keys) == [str(key) for key in arrays["out_keys"]]
    np.testing.assert_array_equal(pooled.dims, arrays["out_length_per_key"])
    np.testing.assert_allclose(pooled.values, arrays["out_values"], **tolerance)
    if "grad_weights" in arrays:
        gradient = jax.jit(jax.grad(lambda weights: loss(collection, weights)[0]))(batch.weights)
        packed = dataclasses.replace(batch, values=gradient)
        used = [np.concatenate([row for row in rows]) for rows in packed.to_lists().values()]
        np.testing.assert_allclose(np.concatenate(used), arrays["grad_weights"], **tolerance)
    assert_table_gradients(collection, gradients, arrays, tolerance)


@pytest.mark.parametrize(("name", "case"), golden.cases("ebc"), ids=golden.names("ebc"))
def test_embedding_bag_collection(name, case):
    arrays = golden.load("ebc", name)
    assert_pooled_case(bag_collection(case, arrays), batch_of(arrays), arrays, case["tolerance"])


@pytest.mark.parametrize(("name", "case"), golden.cases("ec"), ids=golden.names("ec"))
def test_embedding_collection(name, case):
    arrays = golden.load("ec", name)
    tables = [
        jaxrec.EmbeddingConfig(
            table["name"], table["rows"], table["dim"], feature_names=table["features"]
        )
        for table in case["meta"]["tables"]
    ]
    collection = jaxrec.EmbeddingCollection(
        tables, optimizer=UNIT_SGD, need_indices=case["meta"]["need_indices"], rngs=nnx.Rngs(0)
    )
    load_tables(collection, arrays)
    batch = batch_of(arrays)

    def loss(model):
        embeddings = model(batch)
        total = 0.0
        for key, jagged in embeddings.items():
            cotangent = arrays["grad__" + key.replace("@", "__at__")]
            total += (jagged.values[: len(cotangent)] * cotangent).sum()
        return total, embeddings

    (_, embeddings), gradients = nnx.jit(jaxrec.value_and_grad(loss, has_aux=True))(collection)
    order = []
    jax.eval_shape(lambda batch: order.extend(collection(batch)), batch)
    assert order == [str(key) for key in arrays["out_keys"]]
    for key, jagged in embeddings.items():
        suffix = key.replace("@", "__at__")
        expected = arrays[f"values__{suffix}"]
        np.testing.assert_array_equal(jagged.lengths, arrays[f"lengths__{suffix}"])
        np.testing.assert_allclose(jagged.values[: len(expected)], expected, **case["tolerance"])
        assert not np.any(jagged.values[len(expected) :])
        if case["meta"]["need_indices"]:
            used = jagged.weights[: len(expected)]
            np.testing.assert_array_equal(used, arrays[f"indices__{suffix}"])
    assert_table_gradients(collection, gradients, arrays, case["tolerance"])
