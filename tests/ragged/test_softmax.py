"""Softmax over ragged rows, against NumPy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxrec.ragged.fbgemm import jagged_softmax
from tests.ragged.jagged_cases import CAPACITY, flatten, lengths, make_rows, seeds

softmax = jax.jit(jagged_softmax)


def oracle(row: np.ndarray) -> np.ndarray:
    powers = np.exp(row - row.max(axis=0, initial=-np.inf))
    return powers / powers.sum(axis=0)


@given(lengths, seeds)
@settings(max_examples=20)
def test_values_and_gradients(lengths, seed):
    rows = make_rows(lengths, seed, 2)
    values, offsets = flatten(rows)
    expected = [oracle(row) for row in rows]
    np.testing.assert_allclose(softmax(values, offsets), flatten(expected, 0)[0], atol=1e-6)

    cotangent = np.random.default_rng(seed).normal(size=(CAPACITY, 2)).astype(np.float32)
    parts = np.split(cotangent, offsets[1:])[: len(rows)]
    wanted = [y * (g - (y * g).sum(axis=0)) for y, g in zip(expected, parts, strict=True)]
    gradient = gradient_of(values, offsets, cotangent)
    np.testing.assert_allclose(gradient, flatten(wanted, 0)[0], atol=1e-5)


@jax.jit
def gradient_of(values, offsets, cotangent):
    return jax.grad(lambda v: (softmax(v, offsets) * cotangent).sum())(values)


def test_large_scores_do_not_overflow():
    values = np.array([1e30, 1e30, -1e30, 3e38, np.inf], np.float32)
    np.testing.assert_array_equal(softmax(values, np.array([0, 3, 4])), [0.5, 0.5, 0, 1, 0])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    values = jnp.zeros(3000, dtype)  # whose sum of powers float16 could not count one by one
    out = softmax(values, np.array([0, 3000]))
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, jnp.full(3000, 1 / 3000, dtype))


def test_nothing():
    assert softmax(jnp.ones((0, 2)), np.array([0])).shape == (0, 2)
    np.testing.assert_array_equal(softmax(jnp.ones(2), np.array([0, 0, 0])), [0, 0])
