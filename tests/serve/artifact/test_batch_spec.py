"""Nesting of batches and results as plain data."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest

from jaxrec.serve.artifact.batch_spec import Structure, flatten, leaves_of, unflatten

pytestmark = pytest.mark.jax_version


class Point(NamedTuple):
    x: int


VALUES = {
    "leaf": 1,
    "dict": {"b": 1, "a": 2},
    "list": [1, 2],
    "tuple": (1, 2),
    "nested": {"x": [1, (2, {"y": 3})], "z": ()},
    "empty": {},
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_return_through_a_file(value):
    structure, leaves = flatten(value, "value")
    assert structure.num_leaves == len(leaves)
    assert leaves_of(structure, value, "value") == [leaf for _, leaf in leaves]
    read = msgspec.json.decode(msgspec.json.encode(structure), type=Structure)
    assert unflatten(read, [leaf for _, leaf in leaves]) == value


def test_names_of_leaves():
    _, leaves = flatten(({"a": [1, 2]}, 3), "batch")
    assert [name for name, _ in leaves] == ["batch[0]['a'][0]", "batch[0]['a'][1]", "batch[1]"]


def test_other_orders_and_sequences_are_taken():
    structure, _ = flatten({"a": (1, 2), "b": 3}, "batch")
    assert leaves_of(structure, {"b": 3, "a": [1, 2]}, "batch") == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([1], TypeError, "batch must be a dict, got list"),
        ({"a": (1, 2)}, KeyError, "batch lacks 'b'"),
        ({"a": (1, 2), "b": 3, "c": 4}, ValueError, "batch has 'c', but its keys are 'a', 'b'"),
        ({"a": 1, "b": 3}, TypeError, r"batch\['a'\] must be a tuple, got int"),
        ({"a": (1,), "b": 3}, ValueError, r"batch\['a'\] must have 2 elements, got 1"),
    ],
    ids=["no dict", "missing", "unknown", "no tuple", "length"],
)
def test_other_structures_are_refused(value, error, message):
    structure, _ = flatten({"a": (1, 2), "b": 3}, "batch")
    with pytest.raises(error, match=message):
        leaves_of(structure, value, "batch")


def test_values_that_a_file_cannot_hold():
    with pytest.raises(TypeError, match="batch is a dict with the key 1; its keys must be strings"):
        flatten({1: 2}, "batch")
    with pytest.raises(TypeError, match=r"batch\[0\] is a Point; give a plain tuple"):
        flatten((Point(1),), "batch")
