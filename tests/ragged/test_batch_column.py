"""No way through parts of a batch loses what the batch knows: shared bags, slots, raw ids."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import jax
import numpy as np
import pytest

from jaxrec.mesh import shard_batch
from jaxrec.ragged import JaggedArray, KeyedJaggedArray, equal

BAGS = {"a": [[1], [2, 3]], "b": [[4], [5, 6, 7], [8]], "c": [[9], [], []]}
INVERSE = [[1, 0, 0, 1], [2, 2, 0, 1], [0, 0, 1, 2]]


def make(kind: str) -> KeyedJaggedArray:
    weights = {key: [[0.5] * len(bag) for bag in bags] for key, bags in BAGS.items()}
    batch = KeyedJaggedArray.from_lists(
        BAGS, weights, inverse_indices=INVERSE, id_bits=64 if kind == "raw" else 32
    )
    if kind == "slots":
        batch = dataclasses.replace(batch, slot_keys=("c", "a"), sample_capacities=(32, 64, 8))
    if kind == "mesh":
        return shard_batch(batch, jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]))
    return jax.device_put(batch) if kind == "device" else batch


ROUND_TRIPS = {
    "to_dict": lambda batch: KeyedJaggedArray.from_dict(batch.to_dict()),
    "columns": lambda batch: KeyedJaggedArray.from_dict({key: batch[key] for key in batch.keys}),
    "permute": lambda batch: batch.permute([2, 0, 1]).permute([1, 2, 0]),
    "select": lambda batch: batch.select(["c", "a", "b"]).select(["a", "b", "c"]),
    "split": lambda batch: KeyedJaggedArray.concat(batch.split([1, 0, 2])),
    "tree": lambda batch: jax.tree.map(lambda leaf: leaf, batch),
    "columns_in_a_tree": lambda batch: KeyedJaggedArray.from_dict(
        jax.tree.map(lambda leaf: leaf, batch.to_dict())
    ),
    "replace": dataclasses.replace,
    "copy": copy.deepcopy,
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "pickled_columns": lambda batch: KeyedJaggedArray.from_dict(
        pickle.loads(pickle.dumps(batch.to_dict()))
    ),
    "capacities": lambda batch: batch.with_capacities({"a": 48}).with_capacities({"a": 8}),
}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["host", "device", "slots", "raw", "mesh"])
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_round_trips_lose_nothing(name, kind):
    batch = make(kind)
    again = ROUND_TRIPS[name](batch)
    assert equal(again, batch)
    assert jax.tree.structure(again) == jax.tree.structure(batch)
    assert type(again.values) is type(batch.values)
    np.testing.assert_array_equal(again.inverse_indices, batch.inverse_indices)


def test_round_trips_under_jit():
    batch = make("slots")
    again = jax.jit(lambda batch: KeyedJaggedArray.from_dict(batch.to_dict()))(batch)
    assert jax.tree.structure(again) == jax.tree.structure(batch)
    assert equal(again, batch)


def test_a_plain_batch_has_plain_columns():
    assert type(KeyedJaggedArray.from_lists(BAGS | {"b": [[], []], "c": [[], []]})["a"]) is (
        JaggedArray
    )


def test_columns_of_two_batches():
    """Those that share bags and those that do not make no batch, unless it is said how."""
    shared = dataclasses.replace(make("host"), weights=None)
    other = KeyedJaggedArray.from_lists({"d": [[1]] * 4})
    columns = shared.to_dict() | other.to_dict()
    with pytest.raises(ValueError, match=r"features \['d'\] have no inverse_indices, but others"):
        KeyedJaggedArray.from_dict(columns)
    joined = KeyedJaggedArray.from_dict(columns, inverse_indices=[*INVERSE, [0, 1, 2, 3]])
    assert joined.batch_size == 4
    short = KeyedJaggedArray.from_lists({"d": [[1]]}, inverse_indices=[[0, 0]])
    with pytest.raises(ValueError, match=r"different numbers of samples: \{'a': 4, .* 'd': 2\}"):
        KeyedJaggedArray.from_dict(shared.to_dict() | short.to_dict())


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["plain", "host", "device", "mesh"])
def test_a_part_without_keys_keeps_the_batch_size(kind):
    """As TorchRec's does."""
    batch = KeyedJaggedArray.from_lists({"a": [[1], [], [2]]}) if kind == "plain" else make(kind)
    size = batch.batch_size
    none, rest = batch.split([0, len(batch.keys)])
    assert none.keys == batch.select([]).keys == ()
    assert none.batch_size == batch.select([]).batch_size == rest.batch_size == size
    assert none.lengths.shape == (*batch.lengths.shape[:-1], 0)
    assert KeyedJaggedArray.concat([none, none]).batch_size == size
    assert equal(KeyedJaggedArray.concat([none, rest]), batch)


def test_columns_are_equal_with_what_they_know():
    batch = make("host")
    again = jax.device_put(batch)
    assert equal(batch["a"], again["a"])
    assert not equal(batch["a"], JaggedArray.from_lists(BAGS["a"], [[0.5], [0.5, 0.5]]))
    other = dataclasses.replace(batch, inverse_indices=[[1, 0, 1, 1], *INVERSE[1:]])
    assert not equal(batch["a"], other["a"])
    assert equal(batch["b"], other["b"])
    assert not equal(batch, other)
