"""Jagged with dense arrays, against loops."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import given, settings

from jaxrec.ragged import fbgemm
from tests.ragged.jagged_cases import BATCH, LENGTH, flatten, lengths, make_rows, padded, seeds


@given(lengths, seeds)
@settings(max_examples=20)
def test_elementwise(lengths, seed):
    rows = make_rows(lengths, seed, 2)
    values, offsets = flatten(rows)
    y, z = np.random.default_rng(seed).integers(-8, 8, (2, BATCH, LENGTH, 2)).astype(np.float32)
    # A dense row that is too short counts as zero from there on.
    y_rows = [padded([row], len(x))[0] for row, x in zip(y, rows, strict=True)]
    z_rows = [padded([row], len(x))[0] for row, x in zip(z, rows, strict=True)]
    pairs = list(zip(rows, y_rows, z_rows, strict=True))

    total, added, added_two, product = apply_all(values, offsets, y, z)
    np.testing.assert_array_equal(total, padded(rows, LENGTH) + y)
    np.testing.assert_array_equal(added, flatten([a + b for a, b, _ in pairs], 0)[0])
    np.testing.assert_array_equal(added_two, flatten([a + b + c for a, b, c in pairs], 0)[0])
    np.testing.assert_array_equal(product, flatten([a * b for a, b, _ in pairs], 0)[0])


@jax.jit
def apply_all(x, offsets, y, z):
    return (
        fbgemm.jagged_dense_elementwise_add(x, offsets, y),
        fbgemm.jagged_dense_elementwise_add_jagged_output(x, offsets, y),
        fbgemm.jagged_dense_dense_elementwise_add_jagged_output(x, offsets, y, z),
        fbgemm.jagged_dense_elementwise_mul(x, offsets, y),
    )


def test_gradients_know_no_padding():
    values, offsets = flatten(make_rows([2, 0, 5, 1], 0))
    y = np.arange(BATCH * LENGTH, dtype=np.float32).reshape(BATCH, LENGTH)

    def loss(x, y):
        return sum((out**2).sum() for out in apply_all(x, offsets, y, y))

    for gradient in jax.jit(jax.grad(loss, (0, 1)))(values, y):
        assert np.isfinite(gradient).all()
    assert not np.any(jax.grad(loss)(values, y)[8:])
