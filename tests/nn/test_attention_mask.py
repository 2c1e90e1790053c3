"""The keys that each query sees are those of the formula; masks without sense are refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec.nn import hstu_attention, jagged_attention
from jaxrec.nn.attention_mask import key_intervals, make_mask
from tests.nn.attention_oracle import Mask

pytestmark = pytest.mark.every_case

LENGTHS = (7, 0, 1, 12, 3, 9)
TARGETS = (2, 0, 1, 5, 3, 0)

MASKS = {
    "causal": Mask(),
    "full": Mask(causal=False),
    "full-targets": Mask(causal=False, num_targets=TARGETS),
    "targets": Mask(num_targets=TARGETS),
    "groups": Mask(num_targets=TARGETS, target_group_size=2),
    "context": Mask(contextual_length=3),
    "context-1": Mask(contextual_length=1),
    "context-per-row": Mask(contextual_length=(0, 2, 1, 3, 0, 4)),
    "window": Mask(max_attention_length=3),
    "window-last": Mask(max_attention_length=2, min_full_attention_length=4),
    "context-targets": Mask(contextual_length=2, num_targets=TARGETS),
    "everything": Mask(
        contextual_length=2,
        num_targets=TARGETS,
        max_attention_length=2,
        min_full_attention_length=1,
        target_group_size=3,
    ),
}


def visible(mask, lengths, capacity, query_lengths=None):
    """``[capacity, keys]`` by the intervals."""
    described = make_mask(lengths, **mask.arguments())
    intervals = key_intervals(described, lengths, capacity, query_lengths)
    return np.asarray(intervals.see(jnp.arange(lengths.sum(), dtype=jnp.int32)))


@pytest.mark.parametrize("name", MASKS)
def test_intervals_are_the_formula(name):
    lengths = np.array(LENGTHS, np.int32)
    expected = np.zeros((sum(LENGTHS) + 5,) * 2, bool)
    ends = np.cumsum(lengths)
    for row, (end, length) in enumerate(zip(ends, LENGTHS, strict=True)):
        part = slice(end - length, end)
        expected[part, part] = MASKS[name].visible(row, length)
    found = visible(MASKS[name], lengths, len(expected))
    np.testing.assert_array_equal(found, expected[:, : sum(LENGTHS)])
    last = np.minimum(lengths, (3, 1, 0, 5, 3, 2)).astype(np.int32)
    places = np.concatenate([np.arange(e - n, e) for e, n in zip(ends, last, strict=True)])
    found = visible(MASKS[name], lengths, int(last.sum()) + 2, last)
    np.testing.assert_array_equal(found[: last.sum()], expected[places, : sum(LENGTHS)])
    assert not found[last.sum() :].any()


REFUSALS = {
    "negative window": ({"max_attention_length": -1}, "max_attention_length is 0 or more, got -1"),
    "window without order": (
        {"max_attention_length": 2, "causal": False},
        "needs causal=True",
    ),
    "exemption without window": ({"min_full_attention_length": 2}, "give both or neither"),
    "empty groups": ({"target_group_size": 0}, "target_group_size is 1 or more, got 0"),
    "groups without targets": ({"target_group_size": 2}, "needs num_targets"),
    "targets of other rows": (
        {"num_targets": np.array([1], np.int32)},
        r"shape of lengths, \(2,\); its shape is \(1,\)",
    ),
    "too many targets": (
        {"num_targets": np.array([1, 4], np.int32)},
        "row 1 has num_targets=4 and length 3",
    ),
    "negative targets": ({"num_targets": np.array([-1, 0], np.int32)}, "0 or more, got -1"),
    "negative context": ({"contextual_length": -2}, "contextual_length is 0 or more, got -2"),
    "fractions of targets": ({"num_targets": np.array([1.5, 0])}, "num_targets counts tokens in"),
    "fractions of context": ({"contextual_length": 1.5}, "contextual_length counts tokens in"),
    "half a window": ({"max_attention_length": 1.5}, "max_attention_length is an integer"),
    "too many queries": (
        {"query_lengths": np.array([3, 0], np.int32)},
        "row 0 has query_lengths=3 and length 2",
    ),
}


@pytest.mark.parametrize("attend", [hstu_attention, jagged_attention])
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name, attend):
    arguments, message = REFUSALS[name]
    ones = jnp.ones((5, 1, 2))
    with pytest.raises(ValueError, match=message):
        attend(ones, ones, ones, jnp.array([2, 3]), **arguments)


def test_fewer_queries_than_keys_need_their_lengths():
    ones = jnp.ones((5, 1, 2))
    with pytest.raises(ValueError, match="3 queries and 5 keys"):
        hstu_attention(ones[:3], ones, ones, jnp.array([2, 3]))


def test_scales_of_other_queries_are_refused():
    ones = jnp.ones((5, 1, 2))
    with pytest.raises(ValueError, match=r"one for each query, \(5,\); its shape is \(2,\)"):
        hstu_attention(ones, ones, ones, jnp.array([2, 3]), scale=jnp.ones(2))


@pytest.mark.parametrize("name", ["num_targets", "query_lengths"])
def test_rows_with_too_many_tokens_become_nan_under_jit(name):
    ones = jnp.ones((5, 1, 2))
    queries = ones[:3] if name == "query_lengths" else ones
    counts = np.array([1, 4] if name == "num_targets" else [0, 4], np.int32)
    out = jax.jit(lambda counts: hstu_attention(queries, ones, ones, jnp.array([2, 3]),
                                                **{name: counts}))(counts)  # fmt: skip
    first = 2 if name == "num_targets" else 0
    assert np.isfinite(out[:first]).all()
    assert np.isnan(out[first:]).all()


CAPACITIES = {
    "rows": ({}, [2, 4], "lengths sum to 6, more than the 5 elements of key and value"),
    "queries": (
        {"query_lengths": np.array([3, 3], np.int32)},
        [3, 3],
        "query_lengths sum to 6, more than the 5 elements of query",
    ),
    "negative": ({}, [2, -1], "lengths are 0 or more; row 1 has -1"),
    "one of two devices": ({}, [[2, 3], [5, 1]], "lengths sum to 6"),
}


@pytest.mark.parametrize("attend", [hstu_attention, jagged_attention])
@pytest.mark.parametrize("name", CAPACITIES)
def test_rows_beyond_the_capacity_are_refused(name, attend):
    arguments, lengths, message = CAPACITIES[name]
    devices = (2,) if name == "one of two devices" else ()
    query = jnp.ones((*devices, 5, 1, 2))
    key = jnp.ones((*devices, 6, 1, 2)) if arguments else query
    with pytest.raises(ValueError, match=message):
        attend(query, key, key, jnp.array(lengths), **arguments)


def test_rows_beyond_the_capacity_become_nan_under_jit():
    ones = jnp.ones((5, 1, 2))
    attend = jax.jit(hstu_attention)
    out = attend(ones, ones, ones, jnp.array([2, 4]))
    assert np.isfinite(out[:2]).all()
    assert np.isnan(out[2:]).all()
    assert np.isfinite(attend(ones, ones, ones, jnp.array([2, 3]))).all()
    # The queries fit, but not the keys that they see.
    out = jax.jit(lambda lengths: hstu_attention(ones[:3], ones, ones, lengths,
                                                 query_lengths=jnp.array([2, 1])))(
        jnp.array([2, 4])
    )  # fmt: skip
    assert np.isfinite(out[:2]).all()
    assert np.isnan(out[2:]).all()


ONES = jnp.ones((5, 2, 2))
TIMED = {"time_bias": jnp.ones((3, 2)), "timestamps": jnp.arange(5)}
SHAPES = {
    "fewer values": ((ONES, ONES, ONES[:3]), {}, "equal elements"),
    "a head of keys": ((ONES, ONES[:, :1], ONES), {}, "equal heads"),
    "a head of values": ((ONES, ONES, ONES[:, :1]), {}, "equal heads"),
    "narrow keys": ((ONES, ONES[..., :1], ONES), {}, "equal columns"),
    "0 heads": ((ONES[:, :0],) * 3, {}, "have 1 head or more"),
    "no heads": ((ONES[:, 0], ONES[:, 0], ONES[:, 0]), {}, "have 3 axes"),
    "fewer times": ((ONES,) * 3, TIMED | {"timestamps": jnp.arange(4)}, "^timestamps has a time"),
    "fewer times of queries": (
        (ONES,) * 3,
        TIMED | {"query_timestamps": jnp.arange(4)},
        "query_timestamps has a time",
    ),
    "no distances": ((ONES,) * 3, {"position_bias": jnp.ones((0, 2))}, "position_bias has one row"),
    "a head of biases": ((ONES,) * 3, TIMED | {"time_bias": jnp.ones((3, 1))}, "each head, here 2"),
}


@pytest.mark.every_case
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_would_be_broadcast_or_padded_are_refused(name):
    arrays, arguments, message = SHAPES[name]
    with pytest.raises(ValueError, match=message):
        hstu_attention(*arrays, jnp.array([2, 3]), **arguments)


def test_lengths_of_queries_are_one_a_row_under_jit():
    attend = jax.jit(
        lambda counts: hstu_attention(ONES, ONES, ONES, jnp.array([2, 3]), query_lengths=counts)
    )
    with pytest.raises(ValueError, match="query_lengths has a number for each row"):
        attend(jnp.array([2]))
