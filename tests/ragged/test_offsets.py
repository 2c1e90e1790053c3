"""Lengths, offsets, segments and positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec import ragged
from jaxrec.ragged.offsets import bag_ids, bag_starts, spread

lengths = st.lists(st.integers(0, 4), min_size=5, max_size=5)
CAPACITY = 20


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@given(st.lists(st.integers(0, 9), max_size=6))
@settings(max_examples=10)
def test_cumsums(place, lengths):
    array = place(np.array(lengths, np.int32))
    total = np.cumsum(lengths).astype(np.int32)
    np.testing.assert_array_equal(ragged.inclusive_cumsum(array), total)
    np.testing.assert_array_equal(ragged.complete_cumsum(array), [0, *total])
    np.testing.assert_array_equal(ragged.exclusive_cumsum(array), [0, *total][:-1])
    for cumsum in (ragged.inclusive_cumsum, ragged.complete_cumsum, ragged.exclusive_cumsum):
        assert isinstance(cumsum(array), type(array))
        assert cumsum(array).dtype == np.int32


@given(lengths)
def test_segments_and_positions(lengths):
    segments = [row for row, length in enumerate(lengths) for _ in range(length)]
    positions = [place for length in lengths for place in range(length)]
    spare = CAPACITY - len(segments)
    ids, places = of_lengths(np.array(lengths, np.int32))
    np.testing.assert_array_equal(ids, segments + [5] * spare)
    np.testing.assert_array_equal(places, positions + [0] * spare)


@jax.jit
def of_lengths(lengths):
    offsets = ragged.complete_cumsum(lengths)
    return ragged.segment_ids(offsets, CAPACITY), ragged.lengths_range(lengths, CAPACITY)


def test_nothing():
    assert ragged.segment_ids(np.array([0]), 0).shape == (0,)
    assert ragged.segment_ids(np.array([0]), 2).tolist() == [0, 0]
    assert ragged.offsets_range(np.array([0]), 2).tolist() == [0, 0]
    assert ragged.lengths_range(np.zeros(0, np.int32), 2).tolist() == [0, 0]


pytestmark = pytest.mark.every_case

CASES = {
    "one key": ([2, 0, 3], (3,), (7,)),
    "two keys": ([1, 2, 0, 4], (2, 2), (5, 4)),
    "unequal strides": ([1, 0, 2, 3, 0], (1, 4), (2, 9)),
    "a key of padding": ([0, 0, 1], (2, 1), (3, 1)),
    "full": ([2, 1, 3], (2, 1), (3, 3)),
    "a key without bags": ([2, 1], (0, 2), (0, 3)),
}
cases = pytest.mark.parametrize(("lengths", "strides", "capacities"), CASES.values(), ids=CASES)


def count(lengths, strides, capacities):
    starts, ids, bag, position = [], [], 0, 0
    for stride, capacity in zip(strides, capacities, strict=True):
        end = position + capacity
        for _ in range(stride):
            starts.append(position)
            ids += [bag] * lengths[bag]
            position += lengths[bag]
            bag += 1
        ids += [sum(strides)] * (end - position)
        position = end
    return starts, ids


@cases
def test_starts_and_bags_of_positions(lengths, strides, capacities):
    starts, ids = count(lengths, strides, capacities)
    lengths = np.array(lengths, np.int32)
    np.testing.assert_array_equal(bag_starts(lengths, strides, capacities), starts)
    np.testing.assert_array_equal(bag_ids(lengths, strides, capacities), ids)


@cases
def test_spread(lengths, strides, capacities):
    keys = np.arange(len(strides), dtype=np.int32)
    np.testing.assert_array_equal(spread(keys, strides), np.repeat(keys, strides))
