"""Distinct ids against NumPy's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.ragged import KeyedJaggedArray, jagged_unique_indices

pytestmark = pytest.mark.every_case

CAPACITIES = (16, 8, 16)
small_ids = st.integers(0, 5) | st.sampled_from([2**31 - 1, 7])
GROUPS = [None, [["a"], ["b"], ["c"]], [["c", "a"], ["b"]], [["b", "a", "c"]]]


@functools.partial(jax.jit, static_argnums=1)
def unique_of(batch, groups):
    return jagged_unique_indices(batch, groups)


@given(
    st.fixed_dictionaries(
        {key: st.lists(st.lists(small_ids, max_size=4), min_size=2, max_size=2) for key in "abc"}
    ),
    st.sampled_from(GROUPS),
)
@settings(max_examples=30, deadline=None)
def test_numpy(lists, groups):
    batch = KeyedJaggedArray.from_lists(lists, capacities=CAPACITIES)
    static = None if groups is None else tuple(map(tuple, groups))
    unique, inverse = jax.device_get(unique_of(batch, static))
    found = unique.to_lists()
    groups = [[key] for key in batch.keys] if groups is None else groups
    assert list(found) == [group[0] for group in groups]
    for group in groups:
        ids = [id_ for key in group for bag in lists[key] for id_ in bag]
        assert found[group[0]] == [np.unique(np.array(ids, np.int64)).tolist()]

    is_id = np.asarray(batch.segment_ids) < sum(batch.strides)
    np.testing.assert_array_equal(unique.values[inverse[is_id]], batch.values[is_id])
    np.testing.assert_array_equal(inverse[~is_id], len(unique.values))
    # An id of one group is never that of another.
    starts = dict(zip(unique.keys, np.cumsum((0, *unique.capacities)), strict=False))
    bounds = np.cumsum((0, *batch.capacities))
    for group in groups:
        for key in group:
            index = batch.keys.index(key)
            part = slice(bounds[index], bounds[index + 1])
            own = inverse[part][is_id[part]]
            first = starts[group[0]]
            assert np.all((own >= first) & (own < first + unique.capacity_per_key[group[0]]))


def test_rows_are_looked_up_once_an_id():
    batch = KeyedJaggedArray.from_lists({"a": [[5, 3, 5], [3]]})
    unique, inverse = jagged_unique_indices(batch)
    table = jnp.arange(12.0).reshape(6, 2)
    rows = table[unique.values].at[inverse].get(mode="fill", fill_value=0)
    np.testing.assert_array_equal(rows[:4], table[jnp.array([5, 3, 5, 3])])
    np.testing.assert_array_equal(rows[4:], 0)


def test_no_ids_and_no_keys():
    unique, inverse = jagged_unique_indices(KeyedJaggedArray.from_lists({"a": [[], []]}))
    assert unique.to_lists() == {"a": [[]]}
    assert np.all(inverse == len(unique.values))
    unique, inverse = jagged_unique_indices(KeyedJaggedArray.empty())
    assert unique.keys == ()
    assert inverse.shape == (0,)


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([["a"]], ValueError, "each key is in one group"),
        ([["a", "b"], ["b"]], ValueError, "each key is in one group"),
        ([["a", "b"], []], ValueError, "a group has at least one key"),
        ([["a", "x"], ["b"]], KeyError, r"no keys \['x'\] among \['a', 'b'\]"),
    ],
    ids=["missing", "twice", "empty", "unknown"],
)
def test_groups_name_each_key_once(groups, error, message):
    batch = KeyedJaggedArray.from_lists({"a": [[1]], "b": [[2]]})
    with pytest.raises(error, match=message):
        jagged_unique_indices(batch, groups)


def test_raw_ids_are_refused():
    batch = KeyedJaggedArray.from_lists({"a": [[2**40]]}, id_bits=64)
    with pytest.raises(ValueError, match="raw 64-bit ids stay on the host"):
        jagged_unique_indices(batch)
