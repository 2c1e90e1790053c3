"""Segments end to end, beside loops of NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.ragged.key_segments import take_segments

pytestmark = pytest.mark.every_case


def in_a_loop(array, starts, counts, sizes, fill):
    result = [np.zeros((0, *array.shape[1:]), array.dtype)]
    for start, count, size in zip(starts, counts, sizes, strict=True):
        result += [array[start : start + count], np.full((size - count, *array.shape[1:]), fill)]
    return np.concatenate(result).astype(array.dtype)


CASES = {
    "in units": ([8, 0, 16], [8, 8, 4], [8, 12, 4]),
    "of odd sizes": ([3, 11, 0], [5, 1, 2], [5, 4, 3]),
    "end to end": ([4, 9], [5, 3], [5, 3]),
    "end to end, padded": ([0, 5], [5, 3], [5, 7]),
    "one twice": ([2, 2, 0], [4, 4, 2], [4, 4, 2]),
    "empty ones": ([0, 7, 20, 1], [0, 3, 0, 2], [0, 3, 2, 2]),
    "padding first": ([0, 6], [0, 6], [2, 6]),
    "padding alone": ([0, 4], [0, 0], [3, 2]),
    "none": ([], [], []),
}


@pytest.mark.parametrize(("starts", "counts", "sizes"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("array", [np.arange(20, dtype=np.int32), np.ones((20, 3), np.float32)])
def test_segments_are_padded_and_joined(array, starts, counts, sizes):
    array = array + np.arange(20, dtype=array.dtype).reshape(20, *[1] * (array.ndim - 1))
    taken = jax.jit(lambda array: take_segments(array, starts, counts, sizes, fill=-7))(array)
    np.testing.assert_array_equal(taken, in_a_loop(array, starts, counts, sizes, -7), strict=True)


def test_sizes_are_counts_by_default():
    np.testing.assert_array_equal(take_segments(jnp.arange(6), [4, 0], [2, 3]), [4, 5, 0, 1, 2])


def test_an_array_without_elements():
    empty = take_segments(jnp.zeros((0, 2)), [0], [0], [3], fill=1)
    np.testing.assert_array_equal(empty, np.ones((3, 2), np.float32), strict=True)


@pytest.mark.parametrize(("starts", "counts", "sizes"), CASES.values(), ids=CASES)
def test_gradients_go_back_to_their_positions(starts, counts, sizes):
    weights = np.random.default_rng(0).normal(size=sum(sizes)).astype(np.float32)
    gradient = jax.grad(lambda array: take_segments(array, starts, counts, sizes) @ weights)
    expected, position = np.zeros(20, np.float32), 0
    for start, count, size in zip(starts, counts, sizes, strict=True):
        expected[start : start + count] += weights[position : position + count]
        position += size
    np.testing.assert_allclose(gradient(np.zeros(20, np.float32)), expected, rtol=1e-6)


def test_the_program_does_not_grow_with_the_segments():
    def operations(count):
        starts = (4 * np.random.default_rng(0).permutation(count)).tolist()
        taken = jax.jit(lambda array: take_segments(array, starts, [4] * count, [8] * count))
        return taken.lower(jnp.zeros(4 * count)).as_text().count("\n")

    assert operations(200) == operations(10)
