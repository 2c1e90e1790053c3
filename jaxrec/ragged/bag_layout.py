"""Positions of the bags of a keyed batch in its padded arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.offsets import complete_cumsum


def bag_starts(
    lengths: Int32[AnyArray, " bags"], strides: Sequence[int], capacities: Sequence[int]
) -> Int32[Array, " bags"]:
    """Return the first position of each bag in ``values``, padding counted."""
    offsets = jnp.asarray(complete_cumsum(lengths))
    first = offsets[np.cumsum((0, *strides))[:-1]]
    return offsets[:-1] + spread(_starts(capacities) - first, strides)


def bag_ids(
    lengths: Int32[AnyArray, " bags"], strides: Sequence[int], capacities: Sequence[int]
) -> Int32[Array, " capacity"]:
    """Return the bag of each position; ``sum(strides)`` at padding."""
    total, bags = sum(capacities), sum(strides)
    ends = bag_starts(lengths, strides, capacities) + lengths
    # The bag of a position is the number of bags that end at or before it.
    ids = _count_marks(jnp.zeros(total, jnp.int32).at[ends].add(1, mode="drop"))
    per_key = jnp.diff(complete_cumsum(jnp.asarray(lengths))[np.cumsum((0, *strides))])
    starts = _starts(capacities)
    padding = jnp.zeros(total, jnp.int32)
    # The static ends come first: JAX 0.12 cannot scatter them into an array that `jax.vmap` maps.
    padding = padding.at[starts + np.array(capacities, np.int32)].add(-1, mode="drop")
    padding = padding.at[starts + per_key].add(1, mode="drop")
    return jnp.where(_count_marks(padding) > 0, bags, ids)


def spread(per_key: Any, strides: Sequence[int]) -> Array:
    """Repeat one element per key for each of its bags."""
    if len(set(strides)) <= 1:
        return jnp.repeat(jnp.asarray(per_key), strides[0] if strides else 0)
    return jnp.repeat(
        jnp.asarray(per_key), np.array(strides, np.int32), total_repeat_length=sum(strides)
    )


def _starts(capacities: Sequence[int]) -> np.ndarray:
    return np.cumsum((0, *capacities))[:-1].astype(np.int32)


def _count_marks(marks: Int32[Array, " n"]) -> Int32[Array, " n"]:
    return jnp.cumsum(marks, dtype=jnp.int32)
