"""Permutations of segments known at run time, against lists."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.ragged import fbgemm

SEGMENTS, BAGS, CAPACITY = 3, 2, 24
bags = st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=6, max_size=6)
orders = st.lists(st.integers(0, SEGMENTS - 1), min_size=SEGMENTS, max_size=SEGMENTS)


@given(bags, orders)
@settings(max_examples=25)
def test_segments(bags, order):
    flat = [value for bag in bags for value in bag]
    values = np.array(flat + [-9] * (CAPACITY - len(flat)), np.int32)
    lengths = np.array([len(bag) for bag in bags], np.int32)
    moved = [bags[segment * BAGS + bag] for segment in order for bag in range(BAGS)]
    expected = [value for bag in moved for value in bag]

    out_lengths, out_values, out_weights = permute(
        np.array(order), lengths.reshape(SEGMENTS, BAGS), values, values.astype(np.float32) / 4
    )
    np.testing.assert_array_equal(out_lengths.reshape(-1), [len(bag) for bag in moved])
    padded = expected + [0] * (CAPACITY - len(expected))
    np.testing.assert_array_equal(out_values, padded)
    np.testing.assert_array_equal(out_weights, np.array(padded) / 4)

    totals = lengths.reshape(SEGMENTS, BAGS).sum(axis=1)
    places = expand(
        np.array(order), np.append(0, np.cumsum(totals)), np.append(0, np.cumsum(totals[order]))
    )
    np.testing.assert_array_equal(values[places[: len(expected)]], expected)
    np.testing.assert_array_equal(places[len(expected) :], len(flat))


permute = jax.jit(functools.partial(fbgemm.permute_sparse_data, capacity=CAPACITY))
expand = jax.jit(functools.partial(fbgemm.expand_into_jagged_permute, capacity=CAPACITY))


@given(st.permutations(range(6)))
@settings(max_examples=10)
def test_invert(order):
    inverse = fbgemm.invert_permute(np.array(order))
    np.testing.assert_array_equal(np.array(order)[inverse], np.arange(6))


def test_without_weights_and_capacity():
    lengths, values, weights = fbgemm.permute_sparse_data(
        np.array([1, 0]), np.array([1, 2]), np.array([7, 8, 9])
    )
    assert (lengths.tolist(), values.tolist()) == ([2, 1], [8, 9, 7, 0, 0, 0, 0, 0])
    assert weights is None


def test_errors():
    with pytest.raises(IndexError, match=r"indices\[1\] is 2"):
        fbgemm.permute_sparse_data(np.array([1, 2]), np.array([1, 2]), np.array([7, 8, 9]))
    with pytest.raises(ValueError, match="has 4 ids, but its capacity is 3"):
        fbgemm.permute_sparse_data(
            np.array([1, 1]), np.array([1, 2]), np.array([7, 8, 9]), capacity=3
        )
