"""Batches of 64-bit ids as words, on one device and over a mesh."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrec
from jaxrec.tier.managed_collision import id_words
from jaxrec.tier.managed_collision.id_batch import as_id_batch

IDS = {"user": [[-(2**63), 5], [], [2**63 - 1], [2**32]], "item": [[7], [8, 9], [10], []]}


def to_lists(batch, device=...):
    """The ids by feature and sample."""
    features = batch.features
    lengths, values = np.asarray(features.lengths)[device], np.asarray(features.values)[device]
    result, bag = {}, 0
    for (key, part), stride in zip(batch.segments.items(), features.strides, strict=True):
        ends = np.cumsum(lengths[bag : bag + stride])
        result[key] = [each.tolist() for each in np.split(values[part], ends)[:-1]]
        bag += stride
    return result


def test_ids_of_64_bits():
    batch = id_words(jaxrec.KeyedJaggedArray.from_lists(IDS, id_bits=64), hour=12)
    assert to_lists(batch) == IDS
    assert batch.features.values.low.dtype == np.uint32
    assert int(batch.hour) == 12
    # Wide ids without an hour, as `jaxrec.mesh.shard_batch` puts them on a mesh, are taken, too.
    without_hour = as_id_batch(batch.features)
    assert to_lists(without_hour) == IDS
    assert int(without_hour.hour) == -1
    assert batch.is_valid.tolist() == [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4


def test_weights_and_shared_bags():
    features = jaxrec.KeyedJaggedArray.from_lists(
        {"user": [[2**40, 3]], "item": [[4], [5]]},
        {"user": [[0.5, 2.0]], "item": [[1.0], [1.0]]},
        inverse_indices=[[0, 0], [1, 0]],
        id_bits=64,
    )
    batch = id_words(features)
    assert to_lists(batch) == {"user": [[2**40, 3]], "item": [[4], [5]]}
    assert abs(int(batch.hour) - time.time() / 3600) < 2
    np.testing.assert_array_equal(batch.features.weights, features.weights)
    np.testing.assert_array_equal(batch.features.inverse_indices, features.inverse_indices)


@pytest.mark.parametrize("capacities", [None, {"user": 4, "item": 4}])
def test_a_batch_over_a_mesh(capacities):
    mesh = jax.make_mesh((2,), ("data",))
    features = jaxrec.KeyedJaggedArray.from_lists(IDS, id_bits=64)
    batch = id_words(features, mesh, capacities=capacities, hour=3)
    assert batch.features.values.shape == (2, 8 if capacities else 16)
    assert len(batch.features.values.low.sharding.device_set) == 2
    for device in range(2):
        expected = {key: bags[2 * device : 2 * device + 2] for key, bags in IDS.items()}
        assert to_lists(batch, device) == expected
    assert batch.hour.sharding.is_fully_replicated


def test_wrong_batches(unchecked):
    with pytest.raises(TypeError, match="KeyedJaggedArray on the host"):
        id_words([1, 2])
    on_device = jax.tree.map(jnp.asarray, jaxrec.KeyedJaggedArray.from_lists({"a": [[1]]}))
    with pytest.raises(TypeError, match="on the host"):
        id_words(on_device)
    features = jaxrec.KeyedJaggedArray.from_lists({"a": [[1]] * 3}, id_bits=64)
    with pytest.raises(ValueError, match="does not divide"):
        id_words(features, jax.make_mesh((2,), ("data",)))
