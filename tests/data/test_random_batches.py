"""Random batches: shapes, ranges, and the same numbers whoever asks."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest

from jaxrec.data import RandomBatches, Shard
from jaxrec.ragged import equal, validate

pytestmark = pytest.mark.every_case

KEYS = ("user", "item", "tags")
BATCHES = RandomBatches(
    KEYS,
    batch_size=64,
    hash_sizes=(5, 1000, 1),
    ids_per_feature=(1, 6, 3),
    min_ids=(1, 2, 0),
    num_dense=4,
    num_batches=12,
    is_weighted=True,
    seed=7,
)


def same(one, other) -> bool:
    return bool(
        equal(one.features, other.features)
        and np.array_equal(one.dense, other.dense)
        and np.array_equal(one.labels, other.labels)
    )


def test_shapes_and_ranges():
    lengths = {key: set() for key in KEYS}
    for batch in BATCHES:
        validate(batch.features, dict(zip(KEYS, (5, 1000, 1), strict=True)))
        assert batch.features.capacities == (64, 384, 192)
        assert (batch.dense.shape, batch.dense.dtype) == ((64, 4), np.float32)
        assert set(batch.labels) == {0.0, 1.0}
        assert (batch.weights == 1).all()
        for key in KEYS:
            lengths[key] |= set(batch.features[key].lengths.tolist())
    assert lengths == {"user": {1}, "item": {2, 3, 4, 5, 6}, "tags": {0, 1, 2, 3}}
    ids = np.concatenate([batch.features["item"].values[:100] for batch in BATCHES])
    assert len(np.unique(ids)) > 600
    dense = np.concatenate([batch.dense for batch in BATCHES])
    assert abs(dense.mean()) < 0.1
    assert abs(dense.std() - 1) < 0.1


def test_a_batch_depends_on_its_number_alone():
    batches = list(BATCHES)
    assert len(batches) == len(BATCHES) == 12
    for start in (0, 5, 12):
        resumed = list(BATCHES.from_batch(start, threads=3))
        assert len(resumed) == 12 - start
        assert all(map(same, resumed, batches[start:]))
    copy = pickle.loads(pickle.dumps(BATCHES))
    assert copy == BATCHES
    assert same(copy[3], batches[3])
    assert not any(same(one, other) for one, other in itertools.combinations(batches, 2))


def test_processes_and_seeds_have_other_batches():
    shards = [RandomBatches(KEYS, 8, shard=Shard(index, 2))[0] for index in range(2)]
    others = [RandomBatches(KEYS, 8)[0], RandomBatches(KEYS, 8, seed=1)[0], *shards]
    assert not any(same(one, other) for one, other in itertools.combinations(others, 2))


def test_batches_repeat_and_stay():
    batches = RandomBatches(KEYS, 8, num_distinct=3)
    assert batches[0] is batches[3]
    assert same(batches[1], RandomBatches(KEYS, 8)[1])
    assert [batch is batches[i % 3] for i, batch in zip(range(7), batches, strict=False)] == [
        True
    ] * 7


def test_no_end():
    batches = RandomBatches(KEYS, 8)
    with pytest.raises(TypeError, match="have no end, and no length"):
        len(batches)
    assert same(next(batches.from_batch(10**9)), batches[10**9])


def test_defaults_are_torchrecs():
    batch = RandomBatches(["a"], 16)[0]
    assert batch.dense.shape == (16, 50)
    assert batch.features.lengths.tolist() == [2] * 16
    assert batch.features.values.max() < 100
    assert RandomBatches((), 4, num_dense=0)[0].features.keys == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": ("a", "a")}, "keys occur more than once"),
        ({"batch_size": 0}, "batch_size is an integer of 1 or more, got 0"),
        ({"num_dense": -1}, "num_dense is an integer of 0 or more"),
        ({"num_batches": 1.5}, "num_batches is an integer"),
        ({"num_distinct": 0}, "num_distinct is an integer of 1 or more"),
        ({"seed": None}, "seed is an integer of 0 or more, got None"),
        ({"hash_sizes": (1, 2)}, "hash_sizes has 2 numbers for 3 keys"),
        ({"hash_sizes": (9, 0, 9)}, "hash_sizes of feature 'item' is an integer from 1"),
        ({"ids_per_feature": -1}, "ids_per_feature of feature 'user' is an integer from 0"),
        (
            {"min_ids": 3},
            "feature 'user' has min_ids of 3, above its ids_per_feature of 2",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        RandomBatches(**{"keys": KEYS, "batch_size": 4} | arguments)


@pytest.mark.parametrize("index", [-1, 12])
def test_no_such_batch(index):
    with pytest.raises(IndexError, match=f"there are 12 batches, and no batch {index}"):
        BATCHES[index]
