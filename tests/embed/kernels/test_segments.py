"""Which feature, output row and factor an entry of several features' bags has."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.embed.kernels import BagLayout
from jaxrec.embed.kernels.segments import bag_rows, scale_dtype, segment_of


def layout(strides: tuple[int, ...], means: tuple[bool, ...], interleave: bool = True) -> BagLayout:
    each = range(len(strides))
    return BagLayout(
        tuple(6 * i for i in each), (6,) * len(each), tuple(each), strides, (0,) * len(each),
        (9,) * len(each), means, interleave,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("strides", "interleave", "features", "rows"),
    [
        ((3,), True, [0, 0, 0], [0, 1, 2]),
        ((2, 2), True, [0, 0, 1, 1], [0, 2, 1, 3]),
        ((2, 2), False, [0, 0, 1, 1], [0, 1, 2, 3]),
        ((1, 2), True, [0, 1, 1], [0, 1, 2]),
    ],
    ids=["one_feature", "alternating", "by_feature", "different_numbers"],
)
def test_features_and_rows_of_bags(strides, interleave, features, rows):
    made = layout(strides, (False,) * len(strides), interleave)
    bags = jnp.arange(made.num_bags, dtype=jnp.int32)
    found = segment_of(bags, made.strides)
    np.testing.assert_array_equal(found, features)
    np.testing.assert_array_equal(bag_rows(bags, found, made), rows)


@pytest.mark.parametrize(
    ("weights", "is_mean", "expected"),
    [
        (None, False, None),
        (None, True, jnp.float32),
        ("bfloat16", False, jnp.bfloat16),
        ("bfloat16", True, jnp.float32),
    ],
    ids=["none", "means", "weights", "weighted_means"],
)
def test_type_of_factors(weights, is_mean, expected):
    made = layout((2,), (is_mean,))
    weights = None if weights is None else jnp.ones(3, weights)
    assert scale_dtype(weights, made) == expected
