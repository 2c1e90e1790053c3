"""Sums over ragged rows, against loops in float64."""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings

from jaxrec.ragged.fbgemm import segment_sum_csr
from tests.ragged.jagged_cases import CAPACITY, flatten, lengths, make_rows, seeds


@functools.partial(jax.jit, static_argnums=2)
def sums(values, csr_seg, batch_size):
    return segment_sum_csr(values, csr_seg, batch_size)


@given(lengths, seeds)
@settings(max_examples=20)
def test_sums_of_rows(lengths, seed):
    rows = make_rows(lengths, seed, 2)
    values, offsets = flatten(rows)
    np.testing.assert_allclose(sums(values, offsets, 1), [row.sum(axis=0) for row in rows])
    gradient = jax.grad(lambda v: (sums(v, offsets, 1) ** 2).sum())(values)
    expected = [np.tile(2 * row.sum(axis=0), (len(row), 1)) for row in rows]
    np.testing.assert_allclose(gradient, flatten(expected, 0)[0])


@given(lengths)
@settings(max_examples=20)
def test_sums_of_blocks(lengths):
    values = np.arange(CAPACITY, dtype=np.int32)
    csr = np.minimum(np.cumsum([0, *lengths]), CAPACITY // 2)
    expected = [values[2 * a : 2 * b].sum() for a, b in itertools.pairwise(csr)]
    np.testing.assert_array_equal(sums(values, csr, 2), expected)


@pytest.mark.parametrize("dtype", [np.int32, np.float16, np.float32])
def test_types_stay(dtype):
    assert sums(np.ones(3, dtype), np.array([0, 1, 3]), 1).dtype == dtype
