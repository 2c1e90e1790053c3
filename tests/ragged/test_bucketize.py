"""Ids dealt out to buckets, against loops."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.ragged import fbgemm

FEATURES, BATCH, CAPACITY, BUCKETS = 2, 2, 16, 3
bags = st.lists(
    st.lists(st.integers(0, 40) | st.integers(0, 2**31 - 1), max_size=4),
    min_size=FEATURES * BATCH,
    max_size=FEATURES * BATCH,
)


def deal(bags, place_of):
    """Bags of each bucket, and for each id of them where it was; ``place_of(feature, id)``."""
    start, places = 0, []
    for index, bag in enumerate(bags):
        for offset, value in enumerate(bag):
            bucket, local = place_of(index // BATCH, value)
            places.append((bucket, index, start + offset, local))
        start += len(bag)
    places.sort(key=lambda place: place[0])
    lengths = np.zeros(BUCKETS * len(bags), int)
    for bucket, index, _, _ in places:
        lengths[bucket * len(bags) + index] += 1
    return lengths, [local for *_, local in places], [was for *_, was, _ in places]


def check(dealt, bags, place_of):
    lengths, ids, permute = deal(bags, place_of)
    count = len(ids)
    np.testing.assert_array_equal(dealt.lengths, lengths)
    np.testing.assert_array_equal(dealt.ids, ids + [0] * (CAPACITY - count))
    np.testing.assert_array_equal(dealt.permute[:count], permute)
    np.testing.assert_array_equal(dealt.permute[dealt.unbucketize_permute], np.arange(CAPACITY))
    np.testing.assert_array_equal(dealt.unbucketize_permute[count:], np.arange(count, CAPACITY))


def flat(bags):
    values = np.concatenate([np.zeros(0, int), *map(np.array, bags)]).astype(np.int32)
    values = np.pad(values, (0, CAPACITY - values.size), constant_values=5)
    return np.array([len(bag) for bag in bags]), values


@given(bags, st.sampled_from([(1, 1), (10, 3), (2**30, 7)]))
@settings(max_examples=25)
def test_blocks(bags, sizes):
    def place_of(feature, value):
        if value // sizes[feature] < BUCKETS:
            return divmod(value, sizes[feature])
        return value % BUCKETS, value // BUCKETS

    check(blocks(*flat(bags), np.array(sizes)), bags, place_of)


@given(bags)
@settings(max_examples=25)
def test_boundaries(bags):
    boundaries = np.array([[0, 4, 4, 30], [1, 2, 20, 100]])

    def place_of(feature, value):
        bucket = int(np.sum(value >= boundaries[feature, 1:-1]))
        return bucket, value - boundaries[feature, bucket]

    check(uneven(*flat(bags), boundaries), bags, place_of)


@given(bags)
@settings(max_examples=25)
def test_in_turn(bags):
    check(in_turn(*flat(bags)), bags, lambda _, value: (value % BUCKETS, value // BUCKETS))


blocks = jax.jit(functools.partial(fbgemm.block_bucketize_sparse_features, num_buckets=BUCKETS))
uneven = jax.jit(fbgemm.boundary_bucketize_sparse_features)
in_turn = jax.jit(functools.partial(fbgemm.bucketize_sparse_features, num_buckets=BUCKETS))


@pytest.mark.parametrize(
    "call",
    [
        lambda ids: fbgemm.block_bucketize_sparse_features(np.array([1]), ids, np.array([5]), 2),
        lambda ids: fbgemm.boundary_bucketize_sparse_features(
            np.array([1]), ids, np.array([[0, 5]])
        ),
        lambda ids: fbgemm.bucketize_sparse_features(np.array([1]), ids, 2),
    ],
    ids=["blocks", "boundaries", "in_turn"],
)
def test_wide_ids_are_not_cut(call):
    with pytest.raises(ValueError, match="1099511627776 does not fit int32; see split_int64"):
        call(np.array([2**40]))
    with jax.enable_x64(True):
        assert call(np.array([2**40])).ids.dtype == np.int64


def test_strides_that_do_not_fit():
    with pytest.raises(ValueError, match="3 lengths do not divide among 2 keys"):
        fbgemm.block_bucketize_sparse_features(
            np.array([1, 0, 1]), np.array([1, 2]), np.array([5, 5]), 2
        )
