"""The fields of `RowOptimizer` that the embedding kernels apply, through the reference kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import optim
from jaxrec.embed.kernels.base import Lookups
from jaxrec.embed.kernels.reference import fused_update


def per_id(rows) -> Lookups:
    return Lookups(jnp.asarray(rows, jnp.int32), None, None)


def test_clip_norm_is_per_table():
    # Tables of rows 0-2 and 3-5; row 6 is padding. Row 1 occurs twice, with a sum of (3, 0).
    gradients = jnp.array([[1.0, 0.0], [2.0, 0.0], [0.0, 4.0], [0.3, 0.4], [9.0, 9.0]])
    table, _ = fused_update(
        jnp.zeros((6, 2)),
        {},
        per_id([1, 1, 2, 4, 6]),
        gradients,
        optim.sgd(1.0, clip_norm=2.5),
        jnp.int32(0),
        table_starts=(0, 3),
    )
    # The first table's gradient has norm 5 and is halved, the second's norm is 0.5.
    expected = np.zeros((6, 2))
    expected[1], expected[2], expected[4] = (-1.5, 0), (0, -2), (-0.3, -0.4)
    np.testing.assert_allclose(table, expected, rtol=1e-6, atol=1e-12)


def test_a_norm_beyond_float32_shows():
    """No factor of zero stops the table without a word."""
    table, _ = fused_update(
        jnp.ones((2, 2)),
        {},
        per_id([1]),
        jnp.full((1, 2), 1e30),
        optim.sgd(1.0, clip_norm=1.0),
        jnp.int32(0),
    )
    np.testing.assert_array_equal(table, [[1, 1], [np.nan, np.nan]])


def test_clip_norm_scales_as_torchrec_does():
    gradients = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    rows = np.array([5, 1, 5, 0, 2, 2, 2, 5])
    table, _ = fused_update(
        jnp.zeros((6, 4)),
        {},
        per_id(rows),
        jnp.asarray(gradients),
        optim.sgd(1.0, clip_norm=0.75),
        jnp.int32(0),
    )
    summed = np.zeros((6, 4))
    np.add.at(summed, rows, gradients.astype(np.float64))
    norm = np.sqrt(np.sum(summed**2))
    np.testing.assert_allclose(table, -summed * 0.75 / (norm + 1e-6), rtol=1e-5, atol=1e-7)


def test_clip_value_is_applied_before_repeats_are_summed():
    table, _ = fused_update(
        jnp.zeros((2, 2)),
        {},
        per_id([0, 0, 0]),
        jnp.array([[3.0, -0.25], [0.25, -3.0], [3.0, 0.0]]),
        optim.sgd(1.0, clip_value=0.5),
        jnp.int32(0),
    )
    np.testing.assert_array_equal(table, [[-1.25, 0.75], [0, 0]])


def test_max_norm_bounds_touched_rows_only():
    table, _ = fused_update(
        jnp.full((3, 2), 10.0),
        {},
        per_id([1]),
        jnp.zeros((1, 2)),
        optim.sgd(1.0, max_norm=1.0),
        jnp.int32(0),
    )
    np.testing.assert_allclose(table, [[10, 10], [0.5**0.5, 0.5**0.5], [10, 10]], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_stochastic_rounding_keeps_small_updates(dtype):
    # Each update is a tenth of what lies between 1 and the number below it.
    update_size = float(jnp.finfo(dtype).epsneg) / 10
    table = jnp.ones((256, 8), dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def train(optimizer, table):
        def body(step, table):
            gradients = jnp.ones((256, 8))
            return fused_update(table, {}, per_id(np.arange(256)), gradients, optimizer, step)[0]

        return jax.lax.fori_loop(0, 40, body, table)

    nearest = train(optim.sgd(update_size, stochastic_rounding=False), table)
    np.testing.assert_array_equal(nearest, np.ones((256, 8), dtype))
    found = np.asarray(train(optim.sgd(update_size), table)).astype(np.float64)
    # The sum of 40 roundings of a variance of at most a quarter, over 2048 elements.
    deviation = 10 * update_size * np.sqrt(40 / 4 / found.size)
    assert abs(np.mean(1 - found) - 40 * update_size) < 5 * deviation


def test_stochastic_rounding_repeats():
    table = jnp.ones((16, 8), jnp.bfloat16)
    gradients = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)

    def update(step):
        rows = per_id(np.arange(16))
        return fused_update(table, {}, rows, gradients, optim.sgd(0.01), jnp.int32(step))[0]

    np.testing.assert_array_equal(update(0), update(0))
    assert np.any(np.asarray(update(0) != update(1)))
