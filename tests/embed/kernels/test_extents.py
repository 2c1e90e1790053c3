"""Where bags begin and end, in the order of the output."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrec.embed.kernels import BagLayout
from jaxrec.embed.kernels.extents import bag_extents, bag_features, bag_rows


def layout(strides: tuple[int, ...], interleave: bool = True) -> BagLayout:
    """Two features, of 6 and of 4 positions; the second one's ids come first in the batch."""
    return BagLayout((10, 3), (6, 4), (2, 0), strides, (0, 9), (9, 9), (False, False), interleave)


def test_same_number_of_bags():
    # Lengths: the second feature's 1, 2, then the first one's 4, 0.
    uniform = layout((2, 2))
    starts, ends = bag_extents(jnp.array([1, 2, 4, 0], jnp.int32), uniform)
    np.testing.assert_array_equal(starts, [10, 14, 3, 4])
    np.testing.assert_array_equal(ends, [14, 14, 4, 6])
    bags = jnp.arange(4, dtype=jnp.int32)
    features = bag_features(bags, uniform)
    np.testing.assert_array_equal(features, [0, 0, 1, 1])
    np.testing.assert_array_equal(bag_rows(bags, features, uniform), [0, 2, 1, 3])


def test_different_numbers_of_bags():
    uneven = layout((1, 2))
    starts, ends = bag_extents(jnp.array([1, 2, 4], jnp.int32), uneven)
    np.testing.assert_array_equal(starts, [10, 3, 4])
    np.testing.assert_array_equal(ends, [14, 4, 6])
    bags = jnp.arange(3, dtype=jnp.int32)
    features = bag_features(bags, uneven)
    np.testing.assert_array_equal(features, [0, 1, 1])
    np.testing.assert_array_equal(bag_rows(bags, features, uneven), bags)


def test_bags_that_do_not_alternate():
    by_feature = layout((2, 2), interleave=False)
    starts, ends = bag_extents(jnp.array([1, 2, 4, 0], jnp.int32), by_feature)
    np.testing.assert_array_equal(starts, [10, 14, 3, 4])
    np.testing.assert_array_equal(ends, [14, 14, 4, 6])
    bags = jnp.arange(4, dtype=jnp.int32)
    features = bag_features(bags, by_feature)
    np.testing.assert_array_equal(features, [0, 0, 1, 1])
    np.testing.assert_array_equal(bag_rows(bags, features, by_feature), bags)
    alone = BagLayout((0,), (6,), (0,), (2,), (0,), (9,), (False,), interleave=False)
    np.testing.assert_array_equal(bag_features(bags[:2], alone), [0, 0])


def test_wrong_lengths_stay_in_their_segment():
    starts, ends = bag_extents(jnp.array([3, 2**30, 5, -7], jnp.int32), layout((2, 2)))
    assert (np.asarray(starts) <= np.asarray(ends)).all()
    assert np.asarray(ends).max() <= 16
    np.testing.assert_array_equal(ends[2:], [6, 7])
