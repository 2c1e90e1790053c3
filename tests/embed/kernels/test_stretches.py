"""Sums without atomics: of any stretches, chunk by chunk, and in what GPUs are given to run."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec import optim
from jaxrec.embed.kernels import reference
from jaxrec.embed.kernels.stretches import sum_by_table, sum_in_chunks, sum_stretches
from tests.embed.kernels.cases import case
from tests.embed.kernels.gpu_cases import lowered_for_cuda
from tests.fuzz import max_examples

VALUES = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)


def load(terms: tuple[jax.Array, jax.Array | None]) -> jax.Array:
    rows, scales = terms
    values = jnp.asarray(VALUES)[rows]
    return values if scales is None else values * scales[:, None]


@functools.partial(jax.jit, static_argnums=(2, 3))
def in_chunks(terms, segments: jax.Array, count: int, chunk: int) -> jax.Array:
    return sum_in_chunks(load, terms, segments, count, VALUES.shape[1], chunk)


def expected(rows: np.ndarray, scales: np.ndarray, segments: np.ndarray, count: int) -> np.ndarray:
    sums = np.zeros((count, VALUES.shape[1]))
    inside = (segments >= 0) & (segments < count)
    np.add.at(sums, segments[inside], (VALUES[rows].astype(float) * scales[:, None])[inside])
    return sums


@settings(max_examples=max_examples(30))
@given(
    lengths=st.lists(st.integers(1, 40), max_size=12),
    chunk=st.sampled_from([1, 2, 7, 64, 1000]),
    seed=st.integers(0, 99),
)
def test_any_lengths_and_chunks(lengths: list[int], chunk: int, seed: int):
    rng = np.random.default_rng(seed)
    # Some segments are outside, and their numbers are in no order.
    numbers = rng.permutation(len(lengths) + 4)[: len(lengths)] - 2
    segments = np.repeat(numbers, lengths).astype(np.int32)
    rows = rng.integers(0, len(VALUES), segments.size).astype(np.int32)
    scales = rng.normal(size=segments.size).astype(np.float32)
    count = max(len(lengths), 1)
    sums = in_chunks((rows, scales), segments, count, chunk)
    np.testing.assert_allclose(sums, expected(rows, scales, segments, count), rtol=1e-5, atol=1e-5)


def test_a_stretch_of_many_chunks():
    rows = np.arange(100_000, dtype=np.int32) % len(VALUES)
    segments = np.repeat(np.int32([4, 0, 2]), [30, 99_000, 970])
    sums = in_chunks((rows, None), segments, 5, 1024)
    np.testing.assert_allclose(
        sums, expected(rows, np.ones(rows.size), segments, 5), rtol=1e-4, atol=1e-3
    )


def test_what_is_not_finite_stays_in_its_stretch():
    scales = np.float32([1, np.nan, 1, np.inf, 1])
    segments = np.int32([0, 0, 1, 7, 2])
    sums = in_chunks((np.arange(5), scales), segments, 3, 2)
    assert np.isnan(sums[0]).all()
    np.testing.assert_array_equal(sums[1:], VALUES[[2, 4]])


@pytest.mark.parametrize("form", [sum_in_chunks, sum_stretches])
def test_no_positions(form):
    empty = jnp.zeros(0, jnp.int32)
    np.testing.assert_array_equal(form(load, (empty, None), empty, 2, 3), np.zeros((2, 3)))


def test_sums_by_table():
    values, tables = VALUES[:, 0], np.random.default_rng(1).integers(0, 3, 300).astype(np.int32)
    sums = sum_by_table(jnp.asarray(values), jnp.asarray(tables), 4)
    np.testing.assert_allclose(sums, np.bincount(tables, values, 4), rtol=1e-5, atol=1e-6)


def adds_floats_by_scatter(program: str) -> bool:
    scatters = re.findall(r"stablehlo\.scatter.*?stablehlo\.return", program, re.DOTALL)
    return any(re.search(r"stablehlo\.add .*tensor<b?f\d+>", each) for each in scatters)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_gpus_add_no_floats_by_atomics(clip_norm):
    this = case("different")
    lookups = reference.flatten_bags(*this.arrays, this.layout, this.num_rows)
    optimizer = optim.adagrad(0.1, clip_norm=clip_norm)
    state = optimizer.init(*this.table.shape)

    def step(table, state, arrays, lookups, gradient):
        pooled = reference.pooled_lookup(table, *arrays, this.layout, "float32")
        starts = (0, this.num_rows // 2)
        updated = reference.fused_update(
            table, state, lookups, gradient, optimizer, jnp.int32(0), starts
        )
        return pooled, updated, reference.sum_rows(lookups, gradient, this.num_rows)

    program = lowered_for_cuda(step, this.table, state, this.arrays, lookups, this.gradient)
    assert not adds_floats_by_scatter(program)


def test_additions_by_scatter_are_found():
    rows = jnp.zeros(5, jnp.int32)
    program = lowered_for_cuda(lambda x: jax.ops.segment_sum(x, rows, 3), jnp.ones((5, 2)))
    assert adds_floats_by_scatter(program)
