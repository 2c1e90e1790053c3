"""Bags that samples share: each sample's own ids, in whichever way the bags are named."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxrec.mesh import shard_batch
from jaxrec.ragged import KeyedJaggedArray

BAGS = {"a": [[1], [2, 3], []], "b": [[4], [5, 6, 7], [8], [9]]}
INVERSE = {"a": [2, 1, 1, 0], "b": [1, 1, 1, 3]}
EXPANDED = {key: [BAGS[key][bag] for bag in INVERSE[key]] for key in BAGS}


def make(**options) -> KeyedJaggedArray:
    return KeyedJaggedArray.from_lists(BAGS, inverse_indices=INVERSE, **options)


@pytest.mark.every_case
@pytest.mark.parametrize("place", [lambda b: b, jax.device_put], ids=["host", "device"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "jit"])
def test_each_sample_gets_the_ids_of_its_bag(place, is_compiled):
    weights = {key: [[id_ / 10 for id_ in bag] for bag in bags] for key, bags in BAGS.items()}
    batch = place(make(weights=weights, capacities={"a": 4}))
    expand = jax.jit(KeyedJaggedArray.expanded) if is_compiled else KeyedJaggedArray.expanded
    expanded = expand(batch)
    assert expanded.to_lists() == EXPANDED
    assert expanded.inverse_indices is None
    # "a" has 5 ids in a capacity of 4, which is doubled; "b" has 10 in 8.
    assert expanded.capacities == batch.sample_capacities == (8, 16)
    assert expanded.strides == (4, 4)
    for key, bags in EXPANDED.items():
        found = expanded[key].weights_to_lists()
        assert [np.round(bag, 4).tolist() for bag in found] == [[i / 10 for i in b] for b in bags]
    assert isinstance(expanded.values, np.ndarray) == (
        isinstance(batch.values, np.ndarray) and not is_compiled
    )


def test_raw_ids_stay_raw():
    raw = {"a": [[2**40], [-7, 3], []], "b": BAGS["b"]}
    batch = KeyedJaggedArray.from_lists(raw, inverse_indices=INVERSE, id_bits=64).expanded()
    assert batch["a"].to_lists() == [[], [-7, 3], [-7, 3], [2**40]]
    assert type(batch.values).__name__ == "RawIds"


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_batch_over_a_mesh_is_expanded_device_by_device(kind):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
    batch = shard_batch(make(), mesh)
    for expand in (KeyedJaggedArray.expanded, jax.jit(KeyedJaggedArray.expanded)):
        expanded = expand(batch)
        parts = [jax.tree.map(lambda x, d=d: np.asarray(x)[d], expanded) for d in range(2)]
        for key, bags in EXPANDED.items():
            assert [bag for part in parts for bag in part.to_lists()[key]] == bags


def test_capacities_that_nothing_is_known_of_are_the_largest_possible():
    @jax.jit
    def expand(values, lengths, inverse):
        batch = KeyedJaggedArray(
            values, lengths, None, inverse, keys=("a", "b"), capacities=(8, 8), strides=(3, 4)
        )
        return batch.expanded()

    batch = make()
    expanded = expand(batch.values, batch.lengths, batch.inverse_indices)
    assert expanded.capacities == (32, 32)
    assert expanded.to_lists() == EXPANDED
    known = dataclasses.replace(jax.device_put(batch), sample_capacities=())
    assert known.expanded().capacities == batch.sample_capacities


def test_ids_beyond_a_capacity_show():
    """Where jit hides how many there are; nothing is left out without a word."""
    batch = jax.device_put(make())
    small = dataclasses.replace(batch, sample_capacities=(4, 16))
    expanded = jax.jit(KeyedJaggedArray.expanded)(small)
    assert set(np.asarray(expanded["a"].values).tolist()) == {-1}
    assert expanded["b"].to_lists() == EXPANDED["b"]
    # On the host it is made large enough.
    assert dataclasses.replace(make(), sample_capacities=(4, 16)).sample_capacities == (8, 16)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "inverse",
    [
        INVERSE,
        {"b": np.array(INVERSE["b"]), "a": tuple(INVERSE["a"])},
        (["b", "a"], np.array([INVERSE["b"], INVERSE["a"]])),
        list(INVERSE.values()),
    ],
    ids=["by_name", "in_another_order", "pair_of_torchrec", "lists"],
)
def test_inverse_indices_come_in_several_forms(inverse):
    batch = KeyedJaggedArray.from_lists(BAGS, inverse_indices=inverse)
    np.testing.assert_array_equal(batch.inverse_indices, list(INVERSE.values()))
    columns = {key: column for key, column in batch.to_dict().items()}
    again = KeyedJaggedArray.from_dict(columns, inverse_indices=inverse)
    np.testing.assert_array_equal(again.inverse_indices, batch.inverse_indices)
    on_device = {key: jnp.array(bags) for key, bags in INVERSE.items()}
    again = dataclasses.replace(batch, inverse_indices=on_device)
    np.testing.assert_array_equal(again.inverse_indices, batch.inverse_indices)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("inverse", "kind", "message"),
    [
        ({"a": [0]}, ValueError, r"lack the features \['b'\]"),
        (INVERSE | {"c": [0]}, ValueError, r"name \['c'\], but the features are \['a', 'b'\]"),
        ({"a": [0, 1], "b": [0]}, ValueError, r"got the shapes \{'a': \(2,\), 'b': \(1,\)\}"),
        ({"a": [0.5], "b": [0]}, TypeError, "inverse_indices of feature 'a': bag numbers must be"),
        ((["a"], [[0], [0]]), ValueError, "name 1 features and have 2 rows"),
        ({"a": [3], "b": [0]}, ValueError, "feature 'a', sample 0 is 3, but the feature has 3"),
    ],
    ids=["missing", "unknown", "sizes", "floats", "rows", "bag"],
)
def test_inverse_indices_by_name_are_checked(inverse, kind, message):
    with pytest.raises(kind, match=message):
        KeyedJaggedArray.from_lists(BAGS, inverse_indices=inverse)


def test_capacities_of_samples_are_pinned():
    options = {"sample_capacities": {"a": 12}}
    for batch in (make(**options), KeyedJaggedArray.from_dict(make().to_dict(), **options)):
        assert batch.sample_capacities == (12, 16)
        assert batch.expanded().to_lists() == EXPANDED
    assert make(sample_capacities=[5, 10]).expanded().capacities == (5, 10)
    message = "sample_capacities, the ids of all samples: feature 'b' has 10 ids, .* capacity is 9"
    for pack in (make, lambda **options: KeyedJaggedArray.from_dict(make().to_dict(), **options)):
        with pytest.raises(ValueError, match=message):
            pack(sample_capacities={"b": 9})
        with pytest.raises(ValueError, match=r"name \['c'\]"):
            pack(sample_capacities={"c": 9})


def test_candidates_without_padding_stay_without():
    """Bags of equally many ids, such as the candidates of a session, are rows of an array."""
    batch = KeyedJaggedArray.from_lists(
        {"c": [[1, 2], [3, 4], [5, 6]]}, inverse_indices={"c": [0, 2, 2, 1]}, capacities=[6]
    ).expanded()
    assert batch.values.reshape(4, 2).tolist() == [[1, 2], [5, 6], [5, 6], [3, 4]]
