"""64-bit ids as two words: their form, order and arithmetic, by NumPy and Python's integers."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrec.ragged import KeyedJaggedArray, equal, join_int64, split_int64, validate
from jaxrec.ragged.wide_ids import (
    WideIds,
    argsort_words,
    concatenate_wide,
    find_runs,
    narrow,
    search_words,
    widen,
)


@given(hnp.arrays(np.int64, hnp.array_shapes(min_dims=0, max_dims=2, min_side=0)))
def test_round_trip(ids):
    words = split_int64(ids)
    assert words.dtype == np.uint32
    assert words.shape == (*ids.shape, 2)
    np.testing.assert_array_equal(join_int64(words), ids)


@given(st.integers(0, 2**64 - 1))
def test_words_of_unsigned_ids(value):
    (words,) = split_int64(np.array([value], np.uint64))
    assert (int(words[0]) << 32) + int(words[1]) == value
    assert join_int64(words).view(np.uint64) == value


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_words_pass_through_a_device(x64):
    ids = np.array([-1, 2**40 + 3, -(2**63), 2**63 - 1])
    with jax.enable_x64(x64):
        words = jax.jit(lambda words: words[::-1])(jnp.asarray(split_int64(ids)))
        assert words.dtype == jnp.uint32
    np.testing.assert_array_equal(join_int64(words), ids[::-1])


def test_python_ints():
    np.testing.assert_array_equal(join_int64(split_int64([1, 2**62])), [1, 2**62])


def test_errors():
    with pytest.raises(ValueError, match="id 36893488147419103232 does not fit 64 bits"):
        split_int64([1, 2**65])
    with pytest.raises(TypeError, match="ids must be integers, not of type float64"):
        split_int64(np.ones(2))


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


rng = np.random.default_rng(0)
VALUES = [0, 1, 2**16, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
VALUES += rng.integers(2**64, size=40, dtype=np.uint64).tolist()
OTHERS = VALUES[::-1]


def wide_ids(values):
    return jax.tree.map(jnp.asarray, WideIds.of(np.array(values, np.uint64)))


def integers(ids):
    return np.asarray(ids).view(np.uint64).tolist()


OPERATIONS = {
    "add": (operator.add, operator.add),
    "add_a_number": (lambda a, b: a + 2**63, lambda a, b: a + 2**63),
    "multiply": (operator.mul, operator.mul),
    "exclusive_or": (operator.xor, operator.xor),
    "shift_right": (lambda a, b: a.shift_right(33), lambda a, b: a >> 33),
    "rotate_left": (lambda a, b: a.rotate_left(27), lambda a, b: a << 27 | a >> 37),
}


@pytest.mark.parametrize(("operation", "expected"), OPERATIONS.values(), ids=OPERATIONS)
def test_modulo_2_to_the_64(operation, expected):
    got = integers(operation(wide_ids(VALUES), wide_ids(OTHERS)))
    assert got == [expected(a, b) % 2**64 for a, b in zip(VALUES, OTHERS, strict=True)]


@pytest.mark.parametrize(
    "divisor", [1, 2, 100, 2**16 - 1, 2**16, 10**6, 2**24, 2**28 + 1, 10**9 + 7, 2**31 - 1]
)
def test_remainder(divisor):
    rest = wide_ids(VALUES) % divisor
    assert rest.tolist() == [value % divisor for value in VALUES]


BOUNDS = np.array([-(2**63), -1, 0, 2**31, 2**32 - 1, 2**32, 2**63 - 1])
IDS = np.concatenate(
    [BOUNDS, BOUNDS, rng.integers(-(2**63), 2**63 - 1, 50), rng.integers(9, size=30)]
)


def words(ids):
    return jnp.asarray(split_int64(np.asarray(ids, np.int64)))


def test_order():
    np.testing.assert_array_equal(argsort_words(words(IDS)), np.argsort(IDS, stable=True))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 64, 93])
def test_search(size):
    ordered = np.sort(IDS[:size])
    np.testing.assert_array_equal(
        search_words(words(ordered), words(IDS)), np.searchsorted(ordered, IDS)
    )


@pytest.mark.parametrize("is_valid", [IDS < 5, IDS == 0, IDS != IDS], ids=["some", "one", "none"])
def test_distinct_ids(is_valid):
    runs = find_runs(words(IDS), jnp.asarray(is_valid))
    distinct, run = np.unique(IDS[is_valid], return_inverse=True)
    assert int(runs.count) == distinct.size
    np.testing.assert_array_equal(join_int64(np.asarray(runs.ids))[: distinct.size], distinct)
    np.testing.assert_array_equal(np.asarray(runs.run)[is_valid], run)
    assert (np.asarray(runs.run)[~is_valid] == IDS.size).all()
