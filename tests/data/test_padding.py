"""Batches filled up with samples of weight 0."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxrec
from jaxrec.data import ClickBatch, WeightedBatch, empty_batch, pad_batch
from jaxrec.data.padding import num_samples

pytestmark = pytest.mark.every_case

BAGS = {"a": [[1], [2, 3], []], "b": [[4, 4], [5, 5], [6, 6]]}


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_are_empty_and_arrays_repeat(weighted):
    scale = {"a": [[0.5], [1, 2], []], "b": [[1.0, 1.0]] * 3} if weighted else None
    batch = {
        "ids": jaxrec.KeyedJaggedArray.from_lists(BAGS, scale, capacities={"a": 9, "b": 6}),
        "y": np.array([[1.0, 2], [3, 4], [5, 6]], np.float32),
        "flag": np.array([True, False, True]),
    }
    padded, weights = pad_batch(batch, 5)
    assert padded["ids"].to_lists() == {key: [*bags, [], []] for key, bags in BAGS.items()}
    # The second key has the same form in each batch: two ids a sample, and nothing else.
    assert padded["ids"].capacity_per_key == {"a": 9, "b": 10}
    if weighted:
        np.testing.assert_array_equal(padded["ids"].weights[:3], [0.5, 1, 2])
        np.testing.assert_array_equal(padded["ids"].weights[9:15], np.ones(6))
    np.testing.assert_array_equal(padded["y"], [[1, 2], [3, 4], [5, 6], [5, 6], [5, 6]])
    np.testing.assert_array_equal(padded["flag"], [True, False, True, True, True])
    np.testing.assert_array_equal(weights, np.float32([1, 1, 1, 0, 0]))
    assert (padded["y"].dtype, weights.dtype) == (np.float32, np.float32)


def test_full_batches_stay():
    batch = jaxrec.KeyedJaggedArray.from_lists(BAGS), np.zeros(3)
    padded, weights = pad_batch(batch, 3)
    assert padded is batch
    np.testing.assert_array_equal(weights, np.ones(3))


def test_weights_stay():
    """Padding a second time, or samples with weights of their own."""
    given = WeightedBatch(np.arange(2), np.float32([0.5, 2]))
    padded = pad_batch(pad_batch(given, 3), 4)
    np.testing.assert_array_equal(padded.batch, [0, 1, 1, 1])
    np.testing.assert_array_equal(padded.weights, [0.5, 2, 0, 0])


def test_shared_bags():
    """Variable batch per feature: samples of padding share an empty bag."""
    batch = jaxrec.KeyedJaggedArray.from_lists(
        {"a": [[1, 2], [3]], "b": [[4]]}, inverse_indices=np.array([[1, 0, 1], [0, 0, 0]])
    )
    padded, weights = pad_batch(batch, 6)
    assert padded.batch_size == num_samples(padded) == len(weights) == 6
    assert padded.to_lists() == {"a": [[1, 2], [3], []], "b": [[4], []]}
    np.testing.assert_array_equal(padded.inverse_indices, [[1, 0, 1, 2, 2, 2], [0, 0, 0, 1, 1, 1]])


def test_shared_bags_of_a_packer():
    rows = {"a": [[1, 2], [3]], "b": [[4]]}
    bags = np.array([[1, 0, 1], [0, 0, 0]])
    (padded, _), (alone, _) = (
        pad_batch(of.from_lists(rows, inverse_indices=bags), 6)
        for of in (jaxrec.Packer(), jaxrec.KeyedJaggedArray)
    )
    assert padded.expanded().to_lists() == alone.expanded().to_lists()


def test_padding_alone():
    batch = jaxrec.KeyedJaggedArray.from_lists({"a": []}), np.zeros((0, 2), np.float32)
    (features, x), weights = pad_batch(batch, 2)
    assert features["a"].to_lists() == [[], []]
    assert (x.tolist(), weights.tolist()) == ([[0, 0], [0, 0]], [0, 0])


@pytest.mark.parametrize("shared", [False, True])
def test_samples_are_counted_anywhere(shared):
    inverse = np.array([[0, 1, 2, 2]]) if shared else None
    bags = BAGS["a"] if shared else [*BAGS["a"], [7]]
    batch = jaxrec.KeyedJaggedArray.from_lists({"a": bags}, inverse_indices=inverse)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    assert num_samples((batch, np.zeros(4))) == 4
    assert num_samples(jaxrec.mesh.shard_batch({"x": batch}, mesh)) == 4
    assert num_samples(jaxrec.mesh.shard_batch({"x": np.zeros((4, 2))}, mesh)) == 4


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ((np.zeros(2), {"y": np.zeros(3)}), ValueError, r"got 2 in batch\[0\], 3 in batch\[1\]\['"),
        (np.zeros(5), ValueError, "a batch of 5 samples cannot be padded to batch_size=4"),
        ((), ValueError, "equally many samples, got no arrays"),
        ((np.zeros(2), 3.0), TypeError, r"batch\[1\] is 3.0; a batch must have arrays"),
        (
            WeightedBatch(np.zeros(2), np.ones(3)),
            ValueError,
            r"2 samples have weights of shape \(3",
        ),
        (
            {"f": jaxrec.KeyedJaggedArray.from_lists(BAGS)["a"]},
            TypeError,
            r"batch\['f'\] is a JaggedArray; batches have KeyedJaggedArray.from_dict's",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_padded(batch, error, message):
    with pytest.raises(error, match=message):
        pad_batch(batch, 4)


def test_not_on_a_mesh_and_not_to_nothing():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    on_mesh = jaxrec.mesh.shard_batch(jaxrec.KeyedJaggedArray.from_lists(BAGS), mesh)
    with pytest.raises(TypeError, match="batch is on a mesh; pad batches on the host"):
        pad_batch(on_mesh, 4)
    with pytest.raises(ValueError, match="batch_size is 0; it must be 1 or more"):
        pad_batch(np.zeros(0), 0)
    with pytest.raises(TypeError, match="must have arrays of samples, got"):
        num_samples(())
    with pytest.raises(TypeError, match="leading batch axis, got 3"):
        num_samples((3, np.zeros(2)))


def test_an_empty_batch_keeps_shapes_and_counts_for_nothing():
    """Of raw ids, shared bags and weights of ids; of a batch that has its weights in a field."""
    features = jaxrec.KeyedJaggedArray.from_lists(
        {"a": [[2**40, 1], [2]], "b": [[3], []]},
        weights={"a": [[1.0, 2.0], [3.0]], "b": [[4.0], []]},
        inverse_indices=[[1, 0, 1], [0, 0, 1]],
        id_bits=64,
    )
    dense = np.arange(3.0, dtype=np.float32)[:, None]
    for batch in (
        pad_batch((features, dense), 3),
        ClickBatch(dense, features, dense[:, 0], np.ones(3, np.float32)),
    ):
        empty = empty_batch(batch)
        assert type(empty) is type(batch)
        np.testing.assert_array_equal(empty.weights, np.zeros(3, np.float32))
        for leaf, before in zip(jax.tree.leaves(empty), jax.tree.leaves(batch), strict=True):
            assert (leaf.shape, leaf.dtype) == (before.shape, before.dtype)
        found = empty.features if isinstance(empty, ClickBatch) else empty.batch[0]
        assert [found[key].to_lists() for key in "ab"] == [[[]] * 2] * 2
        assert found.inverse_indices.tolist() == features.inverse_indices.tolist()
    for wrong in (features, (features, dense), dense):
        with pytest.raises(TypeError, match="has no weights of its samples; make batches with"):
            empty_batch(wrong)
