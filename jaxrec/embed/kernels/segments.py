"""Bags of several features in one array: which feature, output row and factor an entry has."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Int32

from jaxrec.embed.kernels.base import BagLayout, Weights
from jaxrec.ragged.key_segments import starts_of


def segment_of(index: Int32[Array, "*n"], sizes: Sequence[int]) -> Int32[Array, "*n"]:
    """Return the segment of each index, given the sizes of consecutive segments."""
    if len(set(sizes)) == 1:
        return jax.lax.div(index, jnp.int32(sizes[0]))
    # Sizes differ, so there are two segments at least, and `past` is not empty. Features are few:
    # to compare with each start takes less than a search.
    past = [(index >= start).astype(jnp.int32) for start in starts_of(sizes)[1:]]
    return functools.reduce(operator.add, past)


def bag_rows(
    bags: Int32[Array, "*n"], features: Int32[Array, "..."], layout: BagLayout
) -> Int32[Array, "*n"]:
    """Return the output row of each bag.

    ``bags`` counts feature by feature: first all bags of feature 0, then those of feature 1, and so
    on. ``features`` has the feature of each bag, or one feature for all.
    """
    if not layout.is_interleaved:
        return bags
    sample = bags - features * layout.strides[0]
    return sample * layout.num_features + features


def scale_dtype(weights: Weights, layout: BagLayout) -> DTypeLike | None:
    """Return the type of the lookups' factors; None: all factors are 1."""
    if weights is None:
        return jnp.float32 if any(layout.means) else None
    return jnp.promote_types(weights.dtype, jnp.float32) if any(layout.means) else weights.dtype
