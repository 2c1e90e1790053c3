"""Ragged to padded dense and back, against loops."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.ragged.fbgemm import dense_to_jagged, jagged_to_padded_dense
from tests.ragged.jagged_cases import (
    BATCH,
    CAPACITY,
    LENGTH,
    flatten,
    lengths,
    make_rows,
    padded,
    seeds,
)


@functools.partial(jax.jit, static_argnums=2)
def to_dense(values, offsets, length):
    return jagged_to_padded_dense(values, offsets, length, -1.5)


to_jagged = jax.jit(dense_to_jagged, static_argnums=2)


@given(lengths, seeds)
@settings(max_examples=30)
def test_there_and_back(lengths, seed):
    rows = make_rows(lengths, seed, 2)
    values, offsets = flatten(rows)
    np.testing.assert_array_equal(to_dense(values, offsets, LENGTH), padded(rows, LENGTH, -1.5))
    whole = to_dense(values, offsets, 5)
    np.testing.assert_array_equal(whole, padded(rows, 5, -1.5))
    np.testing.assert_array_equal(to_jagged(whole, offsets, CAPACITY), flatten(rows, 0)[0])


@given(lengths, seeds)
@settings(max_examples=20)
def test_gradients(lengths, seed):
    rows = make_rows(lengths, seed)
    values, offsets = flatten(rows)
    cotangent = np.arange(1, 4 * LENGTH + 1, dtype=np.float32).reshape(4, LENGTH)

    gradient = gradient_of_dense(values, offsets, cotangent)
    expected = [np.pad(cotangent[b, :n], (0, max(n - LENGTH, 0))) for b, n in enumerate(lengths)]
    np.testing.assert_array_equal(gradient, flatten(expected, 0)[0])

    cotangent = np.arange(1, CAPACITY + 1, dtype=np.float32)
    dense = np.ones((4, LENGTH), np.float32)
    gradient = gradient_of_jagged(dense, offsets, cotangent)
    split = np.split(cotangent.astype(np.float64), offsets[1:])[:4]
    np.testing.assert_array_equal(gradient, padded(split, LENGTH))


@jax.jit
def gradient_of_dense(values, offsets, cotangent):
    return jax.grad(lambda v: (to_dense(v, offsets, LENGTH) * cotangent).sum())(values)


@jax.jit
def gradient_of_jagged(dense, offsets, cotangent):
    return jax.grad(lambda d: (to_jagged(d, offsets, CAPACITY) * cotangent).sum())(dense)


def test_three_levels():
    tree = [[[[1, 2], []], [[3]]], [], [[[4, 5, 6]]]]
    offsets = [np.array([0, 2, 2, 3]), np.array([0, 2, 3, 4]), np.array([0, 2, 2, 3, 6])]
    values = np.arange(1, 9, dtype=np.int32)
    dense = jax.jit(lambda v, o: jagged_to_padded_dense(v, o, [2, 2, 2], -1))(values, offsets)
    expected = np.full((3, 2, 2, 2), -1)
    for index in np.ndindex(expected.shape):
        node = tree
        for step in index:
            node = node[step] if isinstance(node, list) and step < len(node) else None
        if node is not None:
            expected[index] = node
    np.testing.assert_array_equal(dense, expected)


def test_no_rows_and_no_length():
    values = np.ones((3, 2), np.float32)
    assert jagged_to_padded_dense(values, np.array([0]), 4).shape == (0, 4, 2)
    assert jagged_to_padded_dense(values, np.array([0, 2]), 0).shape == (1, 0, 2)
    assert jagged_to_padded_dense(values[:0], np.array([0, 0]), 1, 7).tolist() == [[[7, 7]]]
    assert dense_to_jagged(values[:, None], np.array([0, 0, 1, 1]), 2).tolist() == [[1, 1], [0, 0]]
    assert dense_to_jagged(values[:, :0], np.array([0, 0, 1, 1]), 2).shape == (2,)


def test_levels_and_lengths_must_match():
    with pytest.raises(ValueError, match="2 levels of offsets but 1 lengths"):
        jagged_to_padded_dense(np.ones(3), [np.array([0, 1]), np.array([0, 3])], 2)


def test_wide_integers_are_not_cut():
    with pytest.raises(ValueError, match="1099511627776 does not fit int32; see split_int64"):
        jagged_to_padded_dense(np.array([2**40]), np.array([0, 1]), 1)
    with jax.enable_x64(True):
        dense = jagged_to_padded_dense(np.array([2**40]), np.array([0, 1]), 1)
        assert int(dense[0, 0]) == 2**40


@given(st.lists(lengths, min_size=2, max_size=2), seeds)
@settings(max_examples=25, deadline=None)
def test_several_levels_there_and_back(inner_lengths, seed):
    """Two outer rows of four inner rows each, of up to five elements."""
    inner = [length for row in inner_lengths for length in row]
    rows = make_rows(inner, seed, 2)
    values = np.zeros((2 * CAPACITY, 2), np.float32)
    values[: sum(inner)] = np.concatenate(rows)
    levels = [np.array([0, BATCH, 2 * BATCH]), np.cumsum([0, *inner])]
    dense = jagged_to_padded_dense(values, levels, [BATCH, 5])
    found = dense_to_jagged(dense, levels, 2 * CAPACITY)
    np.testing.assert_array_equal(found, values)

    kept = [np.where(np.arange(len(row))[:, None] < LENGTH, row, 0) for row in rows]
    values[: sum(inner)] = np.concatenate(kept)
    narrow = dense_to_jagged(dense[:, :, :LENGTH], levels, 2 * CAPACITY)
    np.testing.assert_array_equal(narrow, values)


def test_an_outer_row_that_is_cut_goes_on_with_zeros():
    dense = np.array([[[1, 2]], [[3, 4]]])  # one inner row of each outer one
    levels = [np.array([0, 2, 3]), np.array([0, 1, 3, 4])]
    assert dense_to_jagged(dense, levels, 6).tolist() == [1, 0, 0, 3, 0, 0]


def test_three_levels_there_and_back():
    levels = [np.array([0, 1, 2]), np.array([0, 2, 3]), np.array([0, 1, 1, 3])]
    values = np.array([1.0, 2.0, 3.0])
    dense = jagged_to_padded_dense(values, levels, [1, 2, 2])
    np.testing.assert_array_equal(dense_to_jagged(dense, levels, 3), values)


@pytest.mark.parametrize("levels", [[], [np.array([0, 1])] * 2], ids=len)
def test_levels_need_axes(levels):
    with pytest.raises(ValueError, match=f"{len(levels)} levels of offsets need a dense array of"):
        dense_to_jagged(np.zeros((1, 2)), levels, 4)
