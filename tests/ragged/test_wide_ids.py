"""Ids of 64 bits on devices, by NumPy's int64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrec.ragged import KeyedJaggedArray, equal, validate
from jaxrec.ragged.wide_ids import WideIds, concatenate_wide, narrow, widen

EDGES = [-(2**63), -(2**32), -1, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]
numbers = st.integers(-(2**63), 2**63 - 1) | st.sampled_from(EDGES)
ids_of_64_bits = hnp.arrays(np.int64, 9, elements=numbers)


@given(ids_of_64_bits, st.integers(1, 2**63 - 1) | st.sampled_from([1, 2**31, 2**32, 2**40]))
def test_arithmetic_on_two_words(ids, bound):
    wide = WideIds.of(ids)
    assert (wide.shape, wide.ndim, wide.size, len(wide)) == (ids.shape, 1, ids.size, ids.size)
    assert wide.dtype == np.int64
    np.testing.assert_array_equal(np.asarray(wide), ids)
    np.testing.assert_array_equal(wide.is_below(bound), (ids >= 0) & (ids < bound))
    low = (ids.astype(object) - bound) % 2**32
    np.testing.assert_array_equal(np.asarray(wide.minus(bound)), low.astype(np.uint32))
    fits = (ids >= 0) & (ids < 2**31)
    np.testing.assert_array_equal(narrow(wide), np.where(fits, ids, -1))
    np.testing.assert_array_equal(np.asarray(wide[1:]), ids[1:])
    np.testing.assert_array_equal(np.asarray(concatenate_wide([wide, wide])), [*ids, *ids])


@given(hnp.arrays(np.int32, 9))
def test_narrow_ids_become_wide_and_back(ids):
    np.testing.assert_array_equal(np.asarray(widen(ids)), ids)
    np.testing.assert_array_equal(narrow(ids), ids)
    np.testing.assert_array_equal(narrow(widen(ids)), np.maximum(ids, -1))


def test_jax_takes_them_as_two_arrays_only():
    wide = WideIds.of(np.array([2**40, 5]))
    with pytest.raises(TypeError, match=r"two words of 32 bits.*np.asarray"):
        jnp.asarray(wide)
    with pytest.raises(TypeError, match="two words of 32 bits"):
        jnp.where(wide, 1, 0)
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda ids: ids[::-1])(wide)), [5, 2**40])


def test_keys_of_a_batch_of_wide_ids():
    batch = KeyedJaggedArray.from_lists({"a": [[2**40, 1]], "b": [[7]]}, id_bits=64)
    wide = batch._with(values=WideIds.of(np.asarray(batch.values)))
    swapped = np.asarray(batch.permute([1, 0]).values)
    np.testing.assert_array_equal(np.asarray(wide["a"].values)[:2], [2**40, 1])
    for permuted in (
        wide.permute([1, 0]),
        jax.jit(lambda batch: batch.permute([1, 0]))(wide),
        KeyedJaggedArray.concat([wide.select(["b"]), wide.select(["a"])]),
    ):
        assert permuted.keys == ("b", "a")
        np.testing.assert_array_equal(np.asarray(permuted.values), swapped)
    assert "values=int64[16]" in repr(wide)


def test_batches_are_refitted_compared_and_validated():
    batch = KeyedJaggedArray.from_lists({"a": [[2**40, 1]], "b": [[7]]}, id_bits=64)
    wide = batch._with(values=WideIds.of(np.asarray(batch.values)))
    grown = wide.with_capacities({"a": 40})
    assert grown.capacities == (40, 8)
    for same in (wide, grown, wide.permute([1, 0]), batch):
        assert equal(same, grown)
        assert equal(grown, same)
        assert jax.jit(equal)(wide, grown)
    other = KeyedJaggedArray.from_lists({"a": [[2**40 + 2**32, 1]], "b": [[7]]}, id_bits=64)
    other = other._with(values=WideIds.of(np.asarray(other.values)))
    assert not equal(other, wide)
    assert not jax.jit(equal)(other, wide)

    assert validate(grown) is grown
    assert validate(grown, {"a": 2**40 + 1}) is grown
    with pytest.raises(ValueError, match=r"feature 'a', sample 0: id 1099511627776 is outside"):
        validate(grown, {"a": 2**40})
    bad = grown._with(values=WideIds.of(np.asarray(grown.values) - 7))
    with pytest.raises(ValueError, match="feature 'a', sample 0: id -6 is negative; ids are at "):
        validate(bad)
