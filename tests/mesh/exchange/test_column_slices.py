"""Updates of rows whose columns lie on two devices, beside NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import jaxrec
from jaxrec.mesh import column_wise
from tests.mesh.exchange.harness import DEVICES, DIM, RATE, ROWS, Harness

pytestmark = pytest.mark.jax_version

IDS = [[], [3, 3, 9], *([i, (i + 5) % 16] for i in range(2 * DEVICES - 2))]
VALUES = np.random.default_rng(0).normal(size=(2 * DEVICES, DIM))


def adagrad(rows, gradient):
    """The rows after a first step of row-wise Adagrad."""
    squares = (gradient**2).mean(axis=1, keepdims=True)
    return rows - RATE * gradient / (np.sqrt(squares) + 1e-8)


def adagrad_of_clipped(rows, gradient):
    return adagrad(rows, gradient / np.linalg.norm(gradient))


def bounded_sgd(rows, gradient):
    """The rows after a step of SGD, their norms bounded by 4."""
    new = rows - RATE * gradient
    return new * np.minimum(1, 4 / np.maximum(np.linalg.norm(new, axis=1, keepdims=True), 1e-9))


@pytest.mark.parametrize(
    ("optimizer", "oracle"),
    [
        (jaxrec.optim.rowwise_adagrad(RATE), adagrad),
        (jaxrec.optim.rowwise_adagrad(RATE, clip_norm=1.0), adagrad_of_clipped),
        (jaxrec.optim.sgd(RATE, max_norm=4.0), bounded_sgd),
    ],
    ids=["mean_squares", "clip_norm", "max_norm"],
)
def test_sums_are_over_whole_rows(optimizer, oracle):
    harness = Harness(column_wise([1, 6]), IDS, optimizer=optimizer)
    assert harness.placed.joins_slices
    of_slices = VALUES.reshape(-1, 1)  # each sample has a bag for each column slice
    gradient = harness.expected_gradient(VALUES)
    updated = np.isin(np.arange(ROWS), np.concatenate(IDS).astype(int))
    expected = np.where(updated[:, None], oracle(harness.table, gradient), harness.table)
    np.testing.assert_allclose(harness.update(of_slices, 4), expected, rtol=1e-5, atol=1e-5)
