"""Equality by value against nested lists."""

from __future__ import annotations

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.ragged import JaggedArray, KeyedArray, KeyedJaggedArray, equal
from tests.ragged.strategies import nested_batches, weights_like

pytestmark = pytest.mark.every_case

LISTS = {"a": [[1, 2], []], "b": [[], [3]]}


def other_layout(batch: KeyedJaggedArray, order: list[int]) -> KeyedJaggedArray:
    """The same batch with other capacities, other padding and another order of keys."""
    batch = batch.with_capacities([2 * capacity + 1 for capacity in batch.capacities])
    values = np.where(np.asarray(batch.segment_ids) < sum(batch.strides), batch.values, 99)
    return dataclasses.replace(batch, values=values.astype(np.int32)).permute(order)


@given(nested_batches(max_batch=3), st.data())
@settings(max_examples=25, deadline=None)
def test_lists_decide(lists, data):
    weights = weights_like(lists) if data.draw(st.booleans()) else None
    batch = KeyedJaggedArray.from_lists(lists, weights)
    order = data.draw(st.permutations(range(len(batch.keys))))
    assert equal(batch, other_layout(batch, order)) is True

    changed, changed_weights = copy.deepcopy(lists), copy.deepcopy(weights)
    bags = [(key, i) for key, rows in lists.items() for i, bag in enumerate(rows) if bag]
    if bags:
        key, i = data.draw(st.sampled_from(bags))
        what = data.draw(st.sampled_from(["id", "shorter"] + ["weight"] * (weights is not None)))
        if what == "id":
            changed[key][i][-1] ^= 1
        elif what == "weight":
            changed_weights[key][i][-1] += 0.5
        else:
            changed[key][i].pop()
            if weights is not None:
                changed_weights[key][i].pop()
        other = KeyedJaggedArray.from_lists(changed, changed_weights)
        assert equal(batch, other_layout(other, order)) is False


@pytest.mark.parametrize(
    "other",
    [
        KeyedJaggedArray.from_lists({"a": LISTS["a"]}),
        KeyedJaggedArray.from_lists({"a": LISTS["a"], "c": LISTS["b"]}),
        KeyedJaggedArray.from_lists({key: [*rows, []] for key, rows in LISTS.items()}),
        KeyedJaggedArray.from_lists(LISTS, weights_like(LISTS)),
        KeyedJaggedArray.from_lists(LISTS, inverse_indices=[[0, 1], [0, 1]]),
        dataclasses.replace(KeyedJaggedArray.from_lists(LISTS), slot_keys=("a",)),
    ],
    ids=["fewer_keys", "other_keys", "more_samples", "weights", "inverse_indices", "slots"],
)
def test_what_counts_beside_the_ids(other):
    batch = KeyedJaggedArray.from_lists(LISTS)
    assert not equal(batch, other)
    assert not equal(other, batch)
    assert equal(other, jax.device_put(other))


def test_inverse_indices_follow_their_keys():
    batch = KeyedJaggedArray.from_lists(LISTS, inverse_indices=[[0, 1], [1, 1]])
    assert equal(batch, batch.permute([1, 0]))
    other = KeyedJaggedArray.from_lists(LISTS, inverse_indices=[[1, 1], [0, 1]])
    assert not equal(batch, other)


def test_under_jit():
    batch = jax.device_put(KeyedJaggedArray.from_lists(LISTS))
    other = other_layout(KeyedJaggedArray.from_lists(LISTS), [1, 0])
    compare = jax.jit(equal)
    assert compare(batch, other)
    assert not compare(batch, other.permute([0, 1])._with(values=other.values + 1))
    assert jax.jit(lambda a: equal(a, batch.select(["a"])))(batch) is not True


def test_over_devices():
    lists = [LISTS, {"a": [[4], [5]], "b": [[], []]}]
    one, other = (
        jax.tree.map(
            lambda *arrays: np.stack(arrays),
            *[KeyedJaggedArray.from_lists(each, capacities=(size, 8)) for each in lists],
        )
        for size in (4, 16)
    )
    assert equal(one, other)
    assert not equal(one, jax.tree.map(lambda array: array[::-1], other))


def test_columns():
    column = JaggedArray.from_lists([[1.5, 2.0], []])
    assert equal(column, JaggedArray.from_lists([[1.5, 2.0], []], capacity=20))
    assert not equal(column, JaggedArray.from_lists([[1.5], [2.0]]))
    assert not equal(column, JaggedArray.from_lists([[np.nan, 2.0], []]))
    deep = JaggedArray.from_lists([[np.ones(2)], [np.zeros(2)]])
    assert equal(deep, dataclasses.replace(deep, values=jnp.asarray(deep.values)))
    assert not equal(deep, column)


def test_raw_ids_and_empty_batches():
    raw = {"user": [["anna"], [2**40]]}
    with pytest.raises(TypeError):
        KeyedJaggedArray.from_lists(raw, id_bits=64)  # mixed
    raw = {"user": [[2**40], [-7]]}
    batch = KeyedJaggedArray.from_lists(raw, id_bits=64)
    assert equal(batch, KeyedJaggedArray.from_lists(raw, id_bits=64, capacities={"user": 32}))
    assert equal(KeyedJaggedArray.empty(), KeyedJaggedArray.empty())


def test_dense_blocks():
    blocks = {"a": jnp.ones((2, 1)), "b": jnp.zeros((2, 3))}
    one = KeyedArray.from_arrays(blocks)
    other = KeyedArray.from_arrays({"b": blocks["b"], "a": blocks["a"]})
    assert equal(one, other)
    assert not equal(one, KeyedArray.from_arrays(blocks | {"a": jnp.zeros((2, 1))}))
    assert not equal(one, KeyedArray.from_arrays(blocks | {"a": jnp.ones((2, 2))}))


def test_other_things_are_named():
    batch = KeyedJaggedArray.from_lists(LISTS)
    with pytest.raises(TypeError, match=r"got KeyedJaggedArray and JaggedArray"):
        equal(batch, batch["a"])
    with pytest.raises(TypeError, match=r"equal compares a JaggedArray.* got \[1\]"):
        equal([1], batch)
