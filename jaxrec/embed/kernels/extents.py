"""The extent of each bag's ids, for kernels that walk over bags."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxrec.embed.kernels.base import BagLayout
from jaxrec.ragged.key_segments import take_segments


def bag_extents(
    lengths: Int32[Array, " all_bags"], layout: BagLayout
) -> tuple[Int32[Array, " bags"], Int32[Array, " bags"]]:
    """Return the start and end of each bag's ids among all ids, feature by feature.

    Bags whose lengths are wrong never reach past their feature's segment.
    """
    counts = jnp.maximum(take_segments(lengths, layout.length_starts, layout.strides), 0)
    begins = np.asarray(layout.id_starts, np.int32)
    limits = begins + np.asarray(layout.capacities, np.int32)
    if len(set(layout.strides)) == 1:
        counts = counts.reshape(layout.num_features, -1)
        begins, limits = begins[:, None], limits[:, None]
        sums = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
    else:
        # A sum over all bags, less the sum before the feature. Both may wrap around.
        feature = np.repeat(np.arange(layout.num_features), layout.strides)
        begins, limits = begins[feature], limits[feature]
        total = jnp.cumsum(counts, dtype=jnp.int32)
        first_bags = np.cumsum(layout.strides) - layout.strides
        sums = total - (total - counts)[first_bags[feature]]
    ends = begins + sums
    extents = jnp.minimum(ends - counts, limits), jnp.minimum(ends, limits)
    return extents[0].reshape(-1), extents[1].reshape(-1)


def bag_features(bags: Int32[Array, "*n"], layout: BagLayout) -> Int32[Array, "*n"]:
    """Return the feature of each bag, given bags feature by feature."""
    if len(set(layout.strides)) == 1:
        return jax.lax.div(bags, jnp.int32(layout.strides[0]))
    # There are two features at least.
    past = [(bags >= bag).astype(jnp.int32) for bag in np.cumsum(layout.strides[:-1]).tolist()]
    return functools.reduce(operator.add, past)


def bag_rows(
    bags: Int32[Array, "*n"], features: Int32[Array, "*n"], layout: BagLayout
) -> Int32[Array, "*n"]:
    """Return the row of the output of each bag, given bags feature by feature."""
    if not layout.is_interleaved:
        return bags
    sample = bags - features * layout.strides[0]
    return sample * layout.num_features + features
