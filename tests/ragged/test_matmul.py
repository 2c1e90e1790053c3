"""Products with ragged matrices, against loops in float64."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings

from jaxrec.ragged import fbgemm
from tests.ragged.jagged_cases import BATCH, LENGTH, flatten, lengths, make_rows, padded, seeds

HEADS, DIM = 2, 3


def cut(rows: list[np.ndarray]) -> list[np.ndarray]:
    """Rows without what lies past LENGTH: zeros there."""
    return [padded([row[:LENGTH]], len(row))[0] for row in rows]


@given(lengths, seeds)
@settings(max_examples=20)
def test_products(lengths, seed):
    x_rows, y_rows = make_rows(lengths, seed, 2), make_rows(lengths, seed + 1, 3)
    (x, offsets), (y, _) = flatten(x_rows), flatten(y_rows)
    matrices = np.random.default_rng(seed).integers(-8, 8, (BATCH, 2, 4)).astype(np.float32)

    dense = dense_bmm(x, offsets, matrices)
    expected = [row @ matrix for row, matrix in zip(cut(x_rows), matrices, strict=True)]
    np.testing.assert_allclose(dense, flatten(expected, 0)[0], rtol=1e-6)

    jagged = jagged_bmm(x, y, offsets)
    expected = [a.T @ b for a, b in zip(cut(x_rows), cut(y_rows), strict=True)]
    np.testing.assert_allclose(jagged, expected, rtol=1e-6)


dense_bmm = jax.jit(functools.partial(fbgemm.jagged_dense_bmm, max_length=LENGTH))
jagged_bmm = jax.jit(functools.partial(fbgemm.jagged_jagged_bmm, max_length=LENGTH))
vectors_mul = jax.jit(fbgemm.batched_dense_vec_jagged_2d_mul)


@given(lengths, seeds)
@settings(max_examples=20)
def test_vectors_times_matrices(lengths, seed):
    rows = make_rows(lengths, seed, HEADS * DIM)
    values, offsets = flatten(rows)
    vectors = np.random.default_rng(seed).integers(-8, 8, (BATCH * HEADS, LENGTH))
    vectors = vectors.astype(np.float32)
    expected = [
        vectors[b * HEADS + h, : min(len(row), LENGTH)] @ row[:LENGTH, h * DIM : (h + 1) * DIM]
        for b, row in enumerate(rows)
        for h in range(HEADS)
    ]
    for b, length in enumerate(lengths):  # what exceeds a row is not read
        vectors[b * HEADS : (b + 1) * HEADS, length:] = np.nan
    np.testing.assert_allclose(vectors_mul(vectors, values, offsets), expected, rtol=1e-6)
    for gradient in gradients_of_vectors_mul(vectors, values, offsets):
        assert np.isfinite(gradient).all()


@jax.jit
def gradients_of_vectors_mul(vectors, values, offsets):
    return jax.grad(lambda *xs: (vectors_mul(*xs, offsets) ** 2).sum(), (0, 1))(vectors, values)


@pytest.mark.parametrize(("rows", "columns"), [(5, 6), (4, 5)], ids=["batch", "heads"])
def test_shapes_that_fit_no_heads(rows, columns):
    with pytest.raises(ValueError, match="fit no number of heads over a batch of 2; expected"):
        fbgemm.batched_dense_vec_jagged_2d_mul(
            np.ones((rows, 3), np.float32), np.ones((6, columns), np.float32), np.array([0, 1, 2])
        )
