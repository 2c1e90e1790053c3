from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrec.optim.norm import limit_norm, trust_ratio


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
