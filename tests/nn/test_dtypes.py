from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.nn.dtypes import promote


@pytest.mark.parametrize(
    ("dtype", "types", "expected"),
    [
        (None, ("bfloat16", "float32"), "float32"),
        (None, ("bfloat16", "float16"), "float32"),
        (None, ("bfloat16", "bfloat16"), "bfloat16"),
        ("bfloat16", ("float32", "float16"), "bfloat16"),
    ],
)
def test_types(dtype, types, expected):
    arrays = promote(dtype, *(jnp.ones(2, each) for each in types))
    assert [array.dtype for array in arrays] == [jnp.dtype(expected)] * 2


def test_values_stay():
    short, integers = promote("float32", np.float16([0.5, -2]), np.arange(2))
    np.testing.assert_array_equal(short, [0.5, -2])
    np.testing.assert_array_equal(integers, [0, 1])
