"""Rows and samples picked from ragged arrays, against lists."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.ragged import KeyedJaggedArray, keyed_jagged_index_select
from jaxrec.ragged.fbgemm import jagged_index_select
from tests.ragged.jagged_cases import BATCH, flatten, lengths, make_rows, seeds
from tests.ragged.strategies import weights_like

picks = st.lists(st.integers(0, BATCH - 1), min_size=3, max_size=3)


@functools.partial(jax.jit, static_argnums=3)
def select(values, lengths, indices, capacity):
    return jagged_index_select(values, lengths, indices, capacity)


@given(lengths, picks, seeds)
@settings(max_examples=25)
def test_rows(lengths, indices, seed):
    rows = make_rows(lengths, seed, 2)
    values, _ = flatten(rows)
    out, out_lengths = select(values, np.array(lengths), np.array(indices), 15)
    picked = np.concatenate([rows[index] for index in indices])
    np.testing.assert_array_equal(out_lengths, [lengths[index] for index in indices])
    np.testing.assert_array_equal(out[: len(picked)], picked)
    np.testing.assert_array_equal(out[len(picked) :], 0)

    gradient = gradient_of(values, np.array(lengths), np.array(indices))
    counts = [np.full((length, 2), indices.count(row)) for row, length in enumerate(lengths)]
    np.testing.assert_array_equal(gradient, flatten(counts, 0)[0])


@jax.jit
def gradient_of(values, lengths, indices):
    return jax.grad(lambda v: select(v, lengths, indices, 15)[0].sum())(values)


def test_rows_without_jit_find_their_capacity():
    values, lengths = np.arange(6), np.array([1, 5])
    out, _ = jagged_index_select(values, lengths, np.array([1, 1]))
    np.testing.assert_array_equal(out, [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 0, 0])


def test_rows_under_jit_that_are_not_there_are_empty():
    values, lengths = np.array([1, 2, 3], np.int32), np.array([1, 2])
    out, out_lengths = select(values, lengths, np.array([5, 1, -1, 0]), 5)
    np.testing.assert_array_equal(out_lengths, [0, 2, 0, 1])
    np.testing.assert_array_equal(out, [2, 3, 1, 0, 0])


def test_rows_under_jit_beyond_the_capacity_show_in_the_lengths():
    values, lengths = np.array([1, 2, 3], np.int32), np.array([1, 2])
    out, out_lengths = select(values, lengths, np.array([1, 1]), 3)
    np.testing.assert_array_equal(out, [2, 3, 2])
    np.testing.assert_array_equal(out_lengths, [2, 2])


def test_errors():
    values, lengths = np.array([1, 2, 3], np.int32), np.array([1, 2])
    with pytest.raises(IndexError, match=r"indices\[1\] is 2; expected 0 to 1, one of 2 rows"):
        jagged_index_select(values, lengths, np.array([1, 2]))
    with pytest.raises(IndexError, match=r"indices\[0\] is -1"):
        jagged_index_select(values, lengths, np.array([-1]))
    with pytest.raises(ValueError, match="has 4 ids, but its capacity is 3; give it at least 4"):
        jagged_index_select(values, lengths, np.array([1, 1]), capacity=3)
    with pytest.raises(TypeError, match="a static capacity= is needed under jit"):
        jax.jit(jagged_index_select)(values, lengths, np.array([1]))


BAGS = st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=BATCH, max_size=BATCH)


@given(BAGS, BAGS, picks)
@settings(max_examples=25)
def test_samples(first, second, indices):
    rows = {"a": first, "b": second}
    batch = KeyedJaggedArray.from_lists(rows, weights_like(rows), capacities=[16, 16])
    selected = jax.device_get(select_samples(batch, np.array(indices)))
    assert selected.to_lists() == {key: [rows[key][i] for i in indices] for key in rows}
    weights = {key: column.weights_to_lists() for key, column in selected.to_dict().items()}
    assert weights == {key: [weights_like(rows)[key][i] for i in indices] for key in rows}
    assert selected.batch_size == 3
    for column in selected.to_dict().values():
        assert not np.any(column.values[column.lengths.sum() :])


select_samples = jax.jit(keyed_jagged_index_select)


def test_samples_without_jit_find_their_capacities():
    batch = KeyedJaggedArray.from_lists({"a": [[1] * 9, [2]], "b": [[3], [4]]})
    selected = keyed_jagged_index_select(batch, np.array([1, 0, 0]))
    assert selected.to_lists() == {"a": [[2], [1] * 9, [1] * 9], "b": [[4], [3], [3]]}
    assert selected.capacities == (24, 8)


def test_nothing_selected():
    batch = KeyedJaggedArray.from_lists({"a": [[1], [2]]})
    assert select_samples(batch, np.zeros(0, np.int32)).to_lists() == {"a": []}
    empty = KeyedJaggedArray.from_lists({"a": [[], []]}, capacities=[0])
    assert select_samples(empty, np.array([1, 1])).to_lists() == {"a": [[], []]}


def test_samples_of_a_variable_batch_keep_their_bags():
    batch = KeyedJaggedArray.from_lists(
        {"a": [[1], [2, 3]], "b": [[4], [], [5]]}, inverse_indices=[[0, 1, 1], [2, 0, 1]]
    )
    selected = keyed_jagged_index_select(batch, np.array([2, 0]))
    assert selected.to_lists() == batch.to_lists()
    np.testing.assert_array_equal(selected.inverse_indices, [[1, 0], [1, 2]])
    assert selected.batch_size == 2


def test_a_key_beyond_its_capacity_spoils_no_other():
    rows = {"a": [[1, 2], [3]], "b": [[4], [5, 6]]}
    batch = KeyedJaggedArray.from_lists(rows, weights_like(rows), capacities=[3, 8])
    selected = jax.jit(keyed_jagged_index_select)(batch, np.array([0, 0, 1]))
    assert selected["b"].to_lists() == [[4], [4], [5, 6]]
    assert selected["a"].to_lists() == [[-1, -1], [-1], []]
    assert np.isnan(np.concatenate(selected["a"].weights_to_lists())).all()
    with pytest.raises(ValueError, match="'a' has 5 ids, but its capacity is 3"):
        keyed_jagged_index_select(batch, np.array([0, 0, 1]), [3, 8])
    assert select_into(batch, np.array([0, 0, 1])).to_lists() == {
        "a": [[1, 2], [1, 2], [3]],
        "b": [[4], [4], [5, 6]],
    }


select_into = jax.jit(functools.partial(keyed_jagged_index_select, capacities={"a": 5}))


def test_samples_that_are_not_there():
    batch = KeyedJaggedArray.from_lists({"a": [[1], [2]]})
    with pytest.raises(IndexError, match=r"indices\[0\] is 2"):
        keyed_jagged_index_select(batch, np.array([2]))
    assert select_samples(batch, jnp.array([2, 1, -1])).to_lists() == {"a": [[], [2], []]}


def test_samples_of_keys_with_different_numbers_of_bags():
    batch = KeyedJaggedArray.from_lengths(["a", "b"], [1, 2, 3], [1, 1, 1], strides=[1, 2])
    with pytest.raises(ValueError, match=r"different numbers of bags, \(1, 2\), and no inverse"):
        keyed_jagged_index_select(batch, np.array([0]))
