"""Sealed arrays: the same bits after any transformation, and no arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.embed.gradients import seal

CONTENT = {
    "rows": np.array([[-1, 0, 5], [2**31 - 1, -(2**31), 7]], np.int32),
    "scales": np.array([0.5, np.nan, -0.0, np.inf], np.float32),
    "flags": np.array([True, False]),
    "none": None,
}


def same(content):
    for name, expected in CONTENT.items():
        if expected is None:
            assert content[name] is None
        else:
            assert content[name].dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(content[name]), expected)


def test_opening_gives_what_was_sealed():
    same(seal(CONTENT).open())


def test_transformations_keep_the_bits():
    stacked = jax.jit(lambda: jax.lax.scan(lambda c, x: (c, seal(CONTENT)), 0, jnp.arange(2))[1])()
    same(jax.tree.map(lambda x: x[1], stacked).open())
    same(jax.jit(lambda sealed: sealed.open())(seal(CONTENT)))
    same(jax.device_put(seal(CONTENT), jax.devices()[3]).open())


@pytest.mark.parametrize(
    "operation",
    [jnp.negative, lambda x: x + x, lambda x: x * 0.5, jnp.abs, jnp.sum, lambda x: x > 0],
    ids=["-x", "x+x", "x*0.5", "abs", "sum", "x>0"],
)
def test_arithmetic_is_an_error(operation):
    with pytest.raises(TypeError):
        jax.tree.map(operation, seal(CONTENT))


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="bfloat16"):
        seal(jnp.zeros(2, jnp.bfloat16))
