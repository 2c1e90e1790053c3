from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.optim.moments import adam_direction, moving_average

VALUES = np.random.default_rng(0).normal(size=(4, 3, 2))


@pytest.mark.parametrize(("b1", "b2"), [(0.9, 0.999), (0.0, 0.99999), (0.5, 0.0)])
def test_direction_of_several_steps(b1, b2):
    """In float64 each average is a weighted mean of all values, the weights summing to 1."""
    first = second = jnp.zeros((3, 2))
    for step, value in enumerate(jnp.float32(VALUES), 1):
        first, second = moving_average(first, value, b1), moving_average(second, value**2, b2)
        found = adam_direction(first, second, jnp.int32(step), b1=b1, b2=b2, eps=1e-8)
        seen, ages = VALUES[:step], np.arange(step)[::-1]
        means = [
            np.average(values, axis=0, weights=np.float64(decay) ** ages)
            for values, decay in ((seen, b1), (seen**2, b2))
        ]
        np.testing.assert_allclose(found, means[0] / np.sqrt(means[1]), rtol=2e-5)
