from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrec
from jaxrec.optim.norm import cut_rows, limit_norm, trust_ratio


def test_limit_norm():
    rows = jnp.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [-6.0, 8.0]])
    np.testing.assert_allclose(
        limit_norm(rows, 1.0), [[0.6, 0.8], [0.3, 0.4], [0, 0], [-0.6, 0.8]], rtol=1e-6
    )
    # Rows within the bound keep their bits.
    np.testing.assert_array_equal(limit_norm(rows, 10.0), rows)
    assert limit_norm(rows, None) is rows


def test_limit_norm_keeps_nan_in_its_row():
    found = limit_norm(jnp.array([[jnp.nan, 1.0], [3.0, 4.0]]), 1.0)
    assert np.isnan(found[0, 0])
    np.testing.assert_allclose(found[1], [0.6, 0.8], rtol=1e-6)


def test_trust_ratio_is_one_where_a_norm_is_zero():
    numerator, denominator = (
        jnp.array([[2.0], [0.0], [2.0], [0.0]]),
        jnp.array([[4.0], [4], [0], [0]]),
    )
    assert trust_ratio(numerator, denominator).tolist() == [[0.5], [1.0], [1.0], [1.0]]


CUTTABLE = [
    jaxrec.optim.rowwise_adagrad(0.1, weight_decay=0.1, weight_decay_mode="l2"),
    jaxrec.optim.partial_rowwise_adam(0.1),
    jaxrec.optim.lamb(0.1, weight_decay=0.1),
    jaxrec.optim.partial_rowwise_lamb(0.1),
    jaxrec.optim.lars_sgd(0.1, weight_decay=0.1),
    jaxrec.optim.rowwise_rmsprop(0.1),
    jaxrec.optim.sgd(0.1, max_norm=0.5),
]


@pytest.mark.parametrize("optimizer", CUTTABLE, ids=lambda optimizer: type(optimizer).__name__)
def test_parts_of_rows_move_as_whole_rows_do(optimizer):
    """Given the sums over whole rows, columns that lie apart move as they do together."""
    rng = np.random.default_rng(0)
    rows, gradients = (jnp.asarray(rng.normal(size=(5, 6)), jnp.float32) for _ in range(2))
    state = {key: value + 0.5 for key, value in optimizer.init(5, 6).items()}
    expected, expected_state = optimizer.update(rows, gradients, state, jnp.int32(3))

    def sums_asked_for():
        """What the optimizer asks for, sum by sum, of whole rows."""
        asked = []

        def total(sums):
            asked.append(sums)
            return sums

        with cut_rows(6, total):
            optimizer.update(rows, gradients, state, jnp.int32(3))
        return iter(asked)

    for columns in (slice(0, 2), slice(2, 6)):
        sums = sums_asked_for()
        part = {key: x if x.ndim == 1 else x[:, columns] for key, x in state.items()}
        with cut_rows(6, lambda _, sums=sums: next(sums)):
            found, found_state = optimizer.update(
                rows[:, columns], gradients[:, columns], part, jnp.int32(3)
            )
        np.testing.assert_allclose(found, expected[:, columns], rtol=1e-6)
        for key, x in expected_state.items():
            np.testing.assert_allclose(
                found_state[key], x if x.ndim == 1 else x[:, columns], rtol=1e-6
            )
