"""The extent of each bag's ids, for kernels that walk over bags."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxrec.embed.kernels.base import BagLayout


def bag_extents(
    lengths: Int32[Array, " all_bags"], layout: BagLayout
) -> tuple[Int32[Array, " bags"], Int32[Array, " bags"]]:
    """Return the start and end of each bag's ids among all ids, in output order.

    Bags whose lengths are wrong never reach past their feature's segment.
    """
    counts = [
        lengths[start : start + stride]
        for start, stride in zip(layout.length_starts, layout.strides, strict=True)
    ]
    begins = np.asarray(layout.id_starts, np.int32)
    limits = begins + np.asarray(layout.capacities, np.int32)
    if layout.is_interleaved:
        starts, ends = _extents(jnp.stack(counts), begins[:, None], limits[:, None])
        return starts.T.reshape(-1), ends.T.reshape(-1)
    extents = [_extents(*feature) for feature in zip(counts, begins, limits, strict=True)]
    return (
        jnp.concatenate([starts for starts, _ in extents]),
        jnp.concatenate([ends for _, ends in extents]),
    )


def bag_features(bags: Int32[Array, "*n"], layout: BagLayout) -> Int32[Array, "*n"]:
    """Return the feature of each row of the output."""
    if layout.is_interleaved:
        return jax.lax.rem(bags, jnp.int32(layout.num_features))
    # There are two features at least.
    past = [(bags >= bag).astype(jnp.int32) for bag in np.cumsum(layout.strides[:-1]).tolist()]
    return functools.reduce(operator.add, past)


def _extents(
    counts: Int32[Array, "*features bags"],
    begin: np.ndarray | np.int32,
    limit: np.ndarray | np.int32,
) -> tuple[Int32[Array, "*features bags"], Int32[Array, "*features bags"]]:
    """Return the starts and ends of consecutive bags from ``begin``, cut off at ``limit``."""
    counts = jnp.maximum(counts, 0)
    ends = begin + jnp.cumsum(counts, axis=-1, dtype=jnp.int32)
    return jnp.minimum(ends - counts, limit), jnp.minimum(ends, limit)
