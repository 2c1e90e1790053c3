"""64-bit ids as two words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrec.ragged import join_int64, split_int64


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
