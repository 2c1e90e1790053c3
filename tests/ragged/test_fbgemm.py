"""Segments packed, unpacked, sliced and cut, against loops over lists."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.ragged.fbgemm import (
    jagged_1d_to_truncated_values,
    jagged_slice,
    pack_segments,
    segment_mask,
    unpack_segments,
)
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

starts = st.lists(st.integers(-1, 6), min_size=BATCH, max_size=BATCH)
pack = jax.jit(pack_segments, static_argnums=(2, 3))
unpack = jax.jit(unpack_segments, static_argnums=2)
mask = jax.jit(segment_mask, static_argnums=1)
cut = jax.jit(jagged_slice, static_argnums=(3, 4))
truncate = jax.jit(jagged_1d_to_truncated_values, static_argnums=(2, 3))


@given(lengths, seeds)
@settings(max_examples=25, deadline=None)
def test_packed(lengths, seed):
    rows = make_rows(lengths, seed, 2)
    values, _ = flatten(rows)
    found = pack(values, np.array(lengths), LENGTH, -np.inf)
    np.testing.assert_array_equal(found, padded(rows, LENGTH, -np.inf))
    np.testing.assert_array_equal(
        mask(np.array(lengths), LENGTH), np.arange(LENGTH) < np.array(lengths)[:, None]
    )


@given(lengths, seeds)
@settings(max_examples=25, deadline=None)
def test_unpacked(lengths, seed):
    rows = make_rows(lengths, seed, 2)
    found = unpack(padded(rows, LENGTH).astype(np.float32), np.array(lengths), CAPACITY)
    kept = [np.where(np.arange(len(row))[:, None] < LENGTH, row, 0) for row in rows]
    np.testing.assert_array_equal(found, flatten(kept, 0)[0])
    whole = unpack(padded(rows, 5).astype(np.float32), np.array(lengths), CAPACITY)
    np.testing.assert_array_equal(whole, flatten(rows, 0)[0])


@given(lengths, starts, seeds)
@settings(max_examples=25, deadline=None)
def test_slices(lengths, starts, seed):
    rows = make_rows(lengths, seed, 2)
    values, _ = flatten(rows)
    found, found_lengths = cut(values, np.array(lengths), np.array(starts), LENGTH)
    parts = [row[max(start, 0) :][:LENGTH] for row, start in zip(rows, starts, strict=True)]
    np.testing.assert_array_equal(found_lengths, [len(part) for part in parts])
    used = sum(map(len, parts))
    assert found.shape == (min(CAPACITY, BATCH * LENGTH), 2)
    np.testing.assert_array_equal(found[:used], np.concatenate(parts))
    np.testing.assert_array_equal(found[used:], 0)

    gradient = gradient_of(values, np.array(lengths), np.array(starts))
    counts = [
        ((np.arange(length) >= start) & (np.arange(length) < max(start, 0) + LENGTH))
        for length, start in zip(lengths, starts, strict=True)
    ]
    expected = np.concatenate([*counts, np.zeros(CAPACITY - sum(lengths))])
    np.testing.assert_array_equal(gradient[:, 0], expected)


@jax.jit
def gradient_of(values, lengths, starts):
    return jax.grad(lambda v: cut(v, lengths, starts, LENGTH)[0].sum())(values)


@given(lengths, seeds)
@settings(max_examples=25, deadline=None)
def test_truncated(lengths, seed):
    rows = make_rows(lengths, seed)
    values, _ = flatten(rows)
    found = truncate(values, np.array(lengths), LENGTH)
    parts = np.concatenate([row[:LENGTH] for row in rows])
    np.testing.assert_array_equal(found[: len(parts)], parts)
    np.testing.assert_array_equal(found[len(parts) :], 0)


def test_capacities():
    values, lengths = np.arange(1, 7), np.array([2, 4])
    assert truncate(values, lengths, 3, 10).tolist() == [1, 2, 3, 4, 5, 0, 0, 0, 0, 0]
    found, out_lengths = cut(values, lengths, np.array([0, 0]), 3, 4)  # too small
    assert (found.tolist(), out_lengths.tolist()) == ([1, 2, 3, 4], [2, 3])
    assert jagged_slice(values, lengths, np.array([0, 0]), 0)[0].shape == (0,)
    with pytest.raises(ValueError, match="max_length is 0 or more, got -1"):
        jagged_slice(values, lengths, np.array([0, 0]), -1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, bool], ids=lambda t: np.dtype(t).name)
def test_types_are_kept(dtype):
    values, lengths = jnp.ones(4, dtype), np.array([1, 3])
    results = [
        pack_segments(values, lengths, 2),
        unpack_segments(jnp.ones((2, 3), dtype), lengths, 4),
        jagged_slice(values, lengths, np.array([0, 1]), 2)[0],
    ]
    assert {result.dtype for result in results} == {jnp.dtype(dtype)}
    assert functools.reduce(lambda a, b: a + b, [result.size for result in results]) == 12
