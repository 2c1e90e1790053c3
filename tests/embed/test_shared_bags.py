"""Pooled lookups and updates of batches whose samples share bags (``inverse_indices``)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrec
from tests import golden
from tests.embed.test_golden import UNIT_SGD, assert_pooled_case, load_tables

Bag = jaxrec.EmbeddingBagConfig


VBE_CASES = [(name, case) for name, case in golden.cases("vbe") if name.startswith("ebc")]


@pytest.mark.parametrize(("name", "case"), VBE_CASES, ids=[name for name, _ in VBE_CASES])
def test_variable_batch_per_feature(name, case):
    """Recorded from TorchRec: bags are pooled once, for all samples that share them."""
    arrays = golden.load("vbe", name)
    keys = [str(key) for key in arrays["keys"]]
    batch = jaxrec.KeyedJaggedArray.from_lengths(
        keys=keys,
        values=arrays["values"],
        lengths=arrays["lengths"],
        weights=arrays.get("weights"),
        strides=arrays["stride_per_key"].tolist(),
        inverse_indices=arrays["inverse_indices"],
    )
    table_names = sorted(name for name in arrays if name.startswith("table_"))
    # The manifest leaves out which features each table has: one table per key, in order.
    tables = [
        Bag(
            name.removeprefix("table_"),
            *arrays[name].shape,
            feature_names=(str(key),),
            pooling=case["meta"]["pooling"].lower(),
        )
        for name, key in zip(table_names, arrays["out_keys"], strict=True)
    ]
    collection = jaxrec.EmbeddingBagCollection(
        tables, optimizer=UNIT_SGD, is_weighted=case["meta"]["weighted"], rngs=nnx.Rngs(0)
    )
    load_tables(collection, arrays)
    assert_pooled_case(collection, batch, arrays, case["tolerance"])


def test_more_bags_than_samples():
    """Bags that no sample has are pooled in vain, and their rows are not updated."""
    batch = jaxrec.KeyedJaggedArray.from_lists(
        {"a": [[1], [2], [3], [1, 4]]}, inverse_indices=[[3, 1]]
    )
    collection = jaxrec.EmbeddingBagCollection(
        [Bag("a", 6, 2)], optimizer=UNIT_SGD, rngs=nnx.Rngs(0)
    )
    before = np.asarray(collection.table("a"))
    pooled, gradients = jaxrec.value_and_grad(lambda m: m(batch).values.sum())(collection)
    np.testing.assert_allclose(pooled, before[[1, 4, 2]].sum(), rtol=1e-6)
    collection.apply_gradients(gradients.tables[""], 0)
    change = before - np.asarray(collection.table("a"))
    np.testing.assert_allclose(change[:, 0], [0, 1, 1, 0, 1, 0], rtol=1e-6)


def test_rows_of_bags_that_no_sample_has_keep_weights_and_state():
    """Momentum and weight decay pass them by, as all rows that do not occur."""
    optimizer = jaxrec.optim.adam(0.1, weight_decay=0.5)
    collection = jaxrec.EmbeddingBagCollection(
        [Bag("a", 4, 2)], optimizer=optimizer, rngs=nnx.Rngs(0)
    )
    bags = {"a": [[1], [2]]}

    def step(number, inverse_indices):
        batch = jaxrec.KeyedJaggedArray.from_lists(bags, inverse_indices=inverse_indices)
        _, gradients = jaxrec.value_and_grad(lambda m: m(batch).values.sum())(collection)
        collection.apply_gradients(gradients.tables[""], number)
        arrays = {"rows": collection.table("a")} | collection.table_state("a")
        return {name: np.asarray(array) for name, array in arrays.items()}

    first, second = step(0, [[0, 1]]), step(1, [[0, 0]])
    for name, array in second.items():
        assert (array[1] != first[name][1]).all()
        np.testing.assert_array_equal(array[2], first[name][2])


def test_samples_that_share_a_bag_are_bounded_one_by_one():
    """As if each had a bag of its own, in whichever way samples are spread over devices."""
    collection = jaxrec.EmbeddingBagCollection(
        [Bag("a", 4, 2)], optimizer=jaxrec.optim.sgd(1.0, clip_value=0.5), rngs=nnx.Rngs(0)
    )
    shared = jaxrec.KeyedJaggedArray.from_lists({"a": [[1], [2]]}, inverse_indices=[[0, 1, 0]])
    apart = jaxrec.KeyedJaggedArray.from_lists({"a": [[3]]})
    before = np.asarray(collection.table("a"))
    slopes = jnp.array([[1.0, 0.25], [-1.0, 2.0], [3.0, 0.5]])

    def loss(model):
        return (model(shared).values * slopes).sum() + 2 * model(apart).values.sum()

    _, gradients = jaxrec.value_and_grad(loss)(collection)
    collection.apply_gradients(gradients.tables[""], 0)
    change = before - np.asarray(collection.table("a"))
    np.testing.assert_allclose(change, [[0, 0], [1, 0.75], [-0.5, 0.5], [0.5, 0.5]], atol=1e-6)


def test_features_of_different_numbers_of_bags_need_inverse_indices():
    batch = jaxrec.KeyedJaggedArray.from_lengths(["a", "b"], [1, 2, 3], [1, 1, 1], strides=[2, 1])
    collection = jaxrec.EmbeddingBagCollection([Bag("a", 6, 2), Bag("b", 6, 2)], rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"features a, b have \(2, 1\) bags"):
        collection(batch)


TBE_CASES = [(name, case) for name, case in golden.cases("vbe") if name.startswith("tbe")]


@pytest.mark.parametrize(("name", "case"), TBE_CASES, ids=[name for name, _ in TBE_CASES])
def test_variable_batch_follows_fbgemm(name, case):
    """Recorded from FBGEMM: bags of each feature in rank order, its output by rank and feature."""
    arrays = golden.load("vbe", name)
    per_rank = arrays["batch_size_per_feature_per_rank"]
    dims, rows = case["meta"]["dims"], case["meta"]["rows"]
    keys = [f"f{f}" for f in range(len(dims))]
    strides = per_rank.sum(axis=1)
    samples = int(strides.max())
    batch = jaxrec.KeyedJaggedArray.from_offsets(
        keys,
        arrays["ids"],
        arrays["offsets"],
        strides=strides.tolist(),
        # Sample b has bag b of each feature; features with fewer bags repeat their last.
        inverse_indices=np.minimum(np.arange(samples), strides[:, None] - 1),
    )
    kind = jaxrec.optim.sgd if "sgd" in name else jaxrec.optim.rowwise_adagrad
    collection = jaxrec.EmbeddingBagCollection(
        [Bag(key, n, d) for key, n, d in zip(keys, rows, dims, strict=True)],
        optimizer=kind(case["meta"]["hyper"]["lr"]),
        rngs=nnx.Rngs(0),
    )
    for f, key in enumerate(keys):
        collection.load_table(key, arrays[f"w0_{f}"])

    def by_rank(of_feature):
        """The peer's flat order: by rank, then by feature."""
        ends = np.cumsum(per_rank, axis=1)
        return np.concatenate(
            [
                np.asarray(of_feature[f])[ends[f, r] - per_rank[f, r] : ends[f, r]].reshape(-1)
                for r in range(per_rank.shape[1])
                for f in range(len(keys))
            ]
        )

    # The peer's flat gradient, put back at the place of each bag.
    place = by_rank(
        [
            np.arange(n * d).reshape(n, d) + 10_000 * f
            for f, (n, d) in enumerate(zip(strides, dims, strict=True))
        ]
    )
    cotangents = [np.zeros((samples, d), np.float32) for d in dims]
    for at, value in zip(place, arrays["grad_out"], strict=True):
        cotangents[at // 10_000].reshape(-1)[at % 10_000] = value

    def loss(model):
        pooled = model(batch)
        total = sum((pooled[key] * c).sum() for key, c in zip(keys, cotangents, strict=True))
        return total, pooled

    (_, pooled), gradients = nnx.jit(jaxrec.value_and_grad(loss, has_aux=True))(collection)
    out = by_rank([pooled[key][:n] for key, n in zip(keys, strides, strict=True)])
    np.testing.assert_allclose(out, arrays["out"], **case["tolerance"])
    collection.apply_gradients(gradients.tables[""], 0)
    for f, key in enumerate(keys):
        np.testing.assert_allclose(collection.table(key), arrays[f"w_{f}"], **case["tolerance"])
        if f"momentum1_{f}" in arrays:
            state = collection.table_state(key)["accumulator"]
            np.testing.assert_allclose(state, arrays[f"momentum1_{f}"], **case["tolerance"])
