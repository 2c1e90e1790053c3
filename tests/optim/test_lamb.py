"""The trust ratio where a norm is zero; elsewhere the golden cases hold it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import optim

KINDS = pytest.mark.parametrize("kind", [optim.lamb, optim.partial_rowwise_lamb])


def update(optimizer, rows, gradients):
    rows, gradients = jnp.asarray(rows, jnp.float32), jnp.asarray(gradients, jnp.float32)
    return optimizer.update(rows, gradients, optimizer.init(*rows.shape), jnp.int32(0))[0]


@KINDS
def test_a_row_of_zeros_takes_the_step_of_adam(kind):
    found = update(kind(0.1), [[0.0, 0.0]], [[2.0, -2.0]])
    np.testing.assert_allclose(found, [[-0.1, 0.1]], rtol=1e-6)


@KINDS
def test_no_gradient_and_no_decay_changes_nothing(kind):
    found = update(kind(0.1), [[3.0, 4.0]], [[0.0, 0.0]])
    np.testing.assert_array_equal(found, [[3.0, 4.0]])


@KINDS
def test_decay_alone_shrinks_by_the_rate(kind):
    # r = wd w, so that |w| / |r| r = w.
    found = update(kind(0.1, weight_decay=0.5), [[3.0, 4.0]], [[0.0, 0.0]])
    np.testing.assert_allclose(found, [[2.7, 3.6]], rtol=1e-6)


@KINDS
def test_rows_are_scaled_each_by_its_own_length(kind):
    found = update(kind(0.1), [[4.0, 4.0], [0.5, 0.5]], [[1.0, -1.0], [1.0, -1.0]])
    np.testing.assert_allclose(found, [[3.6, 4.4], [0.45, 0.55]], rtol=1e-6)
