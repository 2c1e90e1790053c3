from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.metrics.total import Total


def test_sums_are_exact_where_float32_stops():
    """Python's exact sum of the terms, beside a float32 sum, which loses the small ones."""
    terms = np.float32([16_777_216.0, *[1.0] * 1000, 0.25, -7.5])

    def add(total, term):
        return total + term, None

    total, _ = jax.jit(lambda terms: jax.lax.scan(add, Total.zeros(()), terms))(terms)
    assert float(total.on_host()) == math.fsum(terms)
    assert float(jax.lax.scan(lambda x, term: (x + term, None), jnp.float32(0), terms)[0]) != (
        math.fsum(terms)
    )


def test_two_sums_are_added():
    values = np.random.default_rng(0).normal(size=(2, 50, 3)).astype(np.float32) * 1e6
    totals = []
    for half in values:
        total = Total.zeros((3,))
        for term in jnp.asarray(half):
            total = total + term
        totals.append(total)
    expected = np.float64(values).sum(axis=(0, 1))
    np.testing.assert_allclose((totals[0] + totals[1]).on_host(), expected, rtol=1e-12, atol=1e-6)
