"""FBGEMM's bucketize operations: the ids of a batch distributed over buckets, such as shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from jaxrec.ragged.arrays import AnyArray, take, to_device
from jaxrec.ragged.columns import bags_per_key
from jaxrec.ragged.offsets import complete_cumsum, segment_ids


class Bucketized(NamedTuple):
    """A ragged batch sorted by bucket; ids within a bucket keep their order.

    ``permute`` sorts any array with one element per id: ``weights[permute]`` are the weights, and
    ``lengths_range(lengths, capacity)[permute]`` the positions in the original bags.

    Attributes:
        lengths: ``[buckets * bags]`` int32, number of ids of each bag in each bucket, bucket by
            bucket.
        ids: ``[capacity]``, numbered within the bucket; zeros at padding.
        permute: ``[capacity]`` int32: original position of each id. Padding stays at the end.
        unbucketize_permute: ``[capacity]`` int32: new position of each id, the inverse of
            ``permute``.
    """

    lengths: Int32[Array, " buckets_bags"]
    ids: Int[Array, " capacity"]
    permute: Int32[Array, " capacity"]
    unbucketize_permute: Int32[Array, " capacity"]


def block_bucketize_sparse_features(
    lengths: Int[AnyArray, " bags"],
    ids: Int[AnyArray, " capacity"],
    block_sizes: Int[AnyArray, " features"],
    num_buckets: int,
    strides: Sequence[int] | None = None,
) -> Bucketized:
    """Distribute each feature's ids over equal blocks: id ``i`` goes to bucket ``i // block_size``.

    FBGEMM's op of that name. The id becomes ``i % block_size``. An id past the last block
    (``i >= block_size * num_buckets``, such as a raw id) goes to bucket ``i % num_buckets`` and
    becomes ``i // num_buckets``.

    Args:
        lengths: ``[bags]``, first all bags of the first feature.
        ids: ``[capacity]`` from 0, without padding between features.
        block_sizes: ``[features]`` rows of each feature's blocks, at least 1.
        num_buckets: Number of blocks of each feature.
        strides: Bags of each feature; None: all have the same number.

    Raises:
        ValueError: NumPy's ids do not fit the device's integers, or the strides the lengths.

    Example:
        >>> import numpy as np
        >>> dealt = block_bucketize_sparse_features(
        ...     np.array([2, 1]), np.array([7, 2, 5]), np.array([5]), num_buckets=2)
        >>> dealt.lengths.tolist(), dealt.ids.tolist()
        ([1, 0, 1, 1], [2, 2, 0])
    """
    ids = to_device(ids)
    features = _feature_of_each(lengths, strides, block_sizes.shape[0], ids.shape[0])
    size = take(to_device(block_sizes), features).astype(ids.dtype)
    block = ids // size
    is_blocked = block < num_buckets
    buckets = jnp.where(is_blocked, block, ids % num_buckets)
    return _dealt(
        lengths, jnp.where(is_blocked, ids % size, ids // num_buckets), buckets, num_buckets
    )


def boundary_bucketize_sparse_features(
    lengths: Int[AnyArray, " bags"],
    ids: Int[AnyArray, " capacity"],
    boundaries: Int[AnyArray, "features boundaries"],
    strides: Sequence[int] | None = None,
) -> Bucketized:
    """Distribute each feature's ids over uneven blocks, numbered from the start of each block.

    FBGEMM's ``block_bucketize_sparse_features`` with ``block_bucketize_pos``.

    Args:
        lengths: ``[bags]``, first all bags of the first feature.
        ids: ``[capacity]``, without padding between features.
        boundaries: ``[features, num_buckets + 1]`` ascending: bucket ``p`` has the ids from
            ``boundaries[f, p]`` up to but not including ``boundaries[f, p + 1]``. Ids below the
            first go to the first bucket, ids past the last to the last.
        strides: Bags of each feature; None: all have the same number.

    Raises:
        ValueError: NumPy's ids do not fit the device's integers, or the strides the lengths.
    """
    ids, boundaries = to_device(ids), to_device(boundaries)
    num_buckets = boundaries.shape[1] - 1
    features = _feature_of_each(lengths, strides, boundaries.shape[0], ids.shape[0])
    inner = take(boundaries[:, 1:-1], features)
    buckets = jnp.sum(ids[:, None] >= inner, axis=1)
    return _dealt(lengths, ids - take(boundaries, features, buckets), buckets, num_buckets)


def bucketize_sparse_features(
    lengths: Int[AnyArray, " bags"], ids: Int[AnyArray, " capacity"], num_buckets: int
) -> Bucketized:
    """Distribute ids in turn: ``i`` goes to bucket ``i % num_buckets``.

    FBGEMM's op of that name. The id becomes ``i // num_buckets``.

    Args:
        lengths: ``[bags]``.
        ids: ``[capacity]`` from 0.
        num_buckets: Number of buckets.

    Raises:
        ValueError: NumPy's ids do not fit the device's integers.
    """
    ids = to_device(ids)
    return _dealt(lengths, ids // num_buckets, ids % num_buckets, num_buckets)


def _dealt(
    lengths: Int[AnyArray, " bags"],
    ids: Int[Array, " capacity"],
    buckets: Int[Array, " capacity"],
    num_buckets: int,
) -> Bucketized:
    """Sort a batch by bucket; ``ids`` are already numbered within their buckets."""
    capacity, bags = ids.shape[0], lengths.shape[0]
    offsets = complete_cumsum(jnp.asarray(lengths).astype(jnp.int32))
    is_padding = jnp.arange(capacity) >= offsets[-1]
    buckets = jnp.where(is_padding, num_buckets, buckets).astype(jnp.int32)
    # Padding has the bucket past the last, so it sorts to the end. A stable sort keeps the order of
    # a bag's ids.
    permute = jnp.argsort(buckets, stable=True).astype(jnp.int32)
    places = jnp.arange(capacity, dtype=jnp.int32)
    dealt_bags = jnp.where(
        is_padding, num_buckets * bags, buckets * bags + segment_ids(offsets, capacity)
    )
    return Bucketized(
        jax.ops.segment_sum(jnp.ones_like(places), dealt_bags, num_buckets * bags),
        jnp.where(is_padding, 0, ids)[permute],
        permute,
        jnp.zeros_like(places).at[permute].set(places, unique_indices=True),
    )


def _feature_of_each(
    lengths: Int[AnyArray, " bags"], strides: Sequence[int] | None, features: int, capacity: int
) -> Int32[Array, " {capacity}"]:
    """Return the number of the feature that each position belongs to; padding gets the last."""
    strides = bags_per_key(features, lengths.shape[0], strides)
    ends = complete_cumsum(jnp.asarray(lengths).astype(jnp.int32))[np.cumsum((0, *strides))]
    return jnp.minimum(segment_ids(ends, capacity), features - 1)
