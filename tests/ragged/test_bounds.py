"""Ids outside their tables: named, clamped or passed over."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrec.ragged import KeyedJaggedArray

pytestmark = pytest.mark.every_case

ROWS = {"a": [[0, 1], [4]], "b": [[], [2, 3]]}


def with_id(value) -> dict:
    return {"a": ROWS["a"], "b": [[], [2, value]]}


def test_ids_within_bounds_pass():
    for mode in ("raise", "clamp", "ignore"):
        batch = KeyedJaggedArray.from_lists(ROWS, bounds={"a": 5, "b": 4}, bounds_mode=mode)
        assert batch.to_lists() == ROWS


IDS = {
    "beyond": (
        7,
        {"b": 7},
        r"feature 'b', sample 1: id 7 is outside \[0, 7\), the ids of its table",
    ),
    "negative": (-2, {"b": 7}, r"feature 'b', sample 1: id -2 is outside \[0, 7\)"),
    "minus_one": (-1, {"b": 7}, r"feature 'b', sample 1: id -1 is outside \[0, 7\)"),
    "negative_unbounded": (-2, {"a": 5}, "feature 'b', sample 1: id -2 is negative"),
    "beyond_int32": (
        2**31,
        {},
        r"feature 'b', sample 1: id 2147483648 does not fit int32 .*id_bits=64.*hash_ids",
    ),
    "wraps_to_zero": (2**32, {"b": 7}, r"id 4294967296 is outside \[0, 7\)"),
    "below_int32": (-(2**32), {}, "id -4294967296 is negative"),
    "uint64": (2**63, {}, "id 9223372036854775808 does not fit int32"),
    "beyond_64_bits": (2**70, {}, "id 1180591620717411303424 does not fit int32"),
    "far_below": (-(2**70), {"b": 7}, r"id -1180591620717411303424 is outside \[0, 7\)"),
}


@pytest.mark.parametrize(("value", "bounds", "message"), IDS.values(), ids=IDS)
def test_an_id_outside_is_named(value, bounds, message):
    with pytest.raises(ValueError, match=message):
        KeyedJaggedArray.from_lists(with_id(value), bounds=bounds)


@pytest.mark.parametrize(("value", "bounds", "message"), IDS.values(), ids=IDS)
def test_an_id_outside_is_repaired(value, bounds, message):
    repaired = with_id(0)
    batch = KeyedJaggedArray.from_lists(with_id(value), bounds=bounds, bounds_mode="ignore")
    assert batch.to_lists() == repaired
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch = KeyedJaggedArray.from_lists(with_id(value), bounds=bounds, bounds_mode="clamp")
    assert batch.to_lists() == repaired
    assert [str(w.message).split(";")[0] for w in caught] == ["1 of 5 ids became 0"]


def test_the_warning_counts_and_names_the_first():
    rows = {"a": [[1], [2, 9, -4]], "b": [[8], [0, 2**40]]}
    message = r"4 of 7 ids became 0; the first: feature 'a', sample 1: id 9 is outside \[0, 3\)"
    with pytest.warns(UserWarning, match=message) as caught:
        batch = KeyedJaggedArray.from_lists(rows, bounds={"a": 3, "b": 8}, bounds_mode="clamp")
    assert len(caught) == 1
    assert batch.to_lists() == {"a": [[1], [2, 0, 0]], "b": [[0], [0, 0]]}


@given(
    st.lists(
        st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 9), max_size=5), max_size=5
    ),
    st.integers(1, 8),
)
def test_ignore_agrees_with_a_loop(bags, bound):
    values = np.array([i for bag in bags for i in bag], np.int64)
    batch = KeyedJaggedArray.from_lengths(
        ["a"], values, [len(bag) for bag in bags], bounds={"a": bound}, bounds_mode="ignore"
    )
    expected = [[i if 0 <= i < bound else 0 for i in bag] for bag in bags]
    assert batch.to_lists() == {"a": expected}


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32, np.uint64, np.int64])
def test_every_integer_type(dtype):
    values = np.array([1, 100], dtype)
    batch = KeyedJaggedArray.from_lengths(
        ["a"], values, [2], bounds={"a": 100}, bounds_mode="ignore"
    )
    assert batch.to_lists() == {"a": [[1, 0]]}
    with pytest.raises(ValueError, match="sample 0: id 100 is outside"):
        KeyedJaggedArray.from_lengths(["a"], values, [2], bounds={"a": 100})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"bounds_mode": "fix"},
            "bounds_mode is 'fix'; expected one of .'raise', 'clamp', 'ignore'",
        ),
        ({"bounds": {"x": 3}}, r"bounds names 'x', but the features are \['a', 'b'\]"),
        ({"bounds": {"a": 0}}, "the bound of feature 'a' is 0; expected 1 to"),
        ({"bounds": {"a": 2.5}}, "the bound of feature 'a': 2.5 is not an integer"),
        ({"bounds": [3]}, r"bounds is \[3\] \(list\); expected a mapping by the names of features"),
        ({"bounds": {"a": 2**31 + 1}}, "'a' is 2147483649; expected 1 to 2.*31; give id_bits=64"),
        ({"bounds": {"a": 2**63 + 1}, "id_bits": 64}, "'a' is 9223372036854775809; expected 1"),
    ],
    ids=["mode", "unknown", "zero", "no_integer", "no_mapping", "too_large", "beyond_64_bits"],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_bounds(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        KeyedJaggedArray.from_lists(ROWS, **options)


def test_bounds_beyond_int32():
    lists = {"a": [[2**31, 7], [2**40 - 1]], "b": [[1], [-5]]}
    batch = KeyedJaggedArray.from_lists(lists, bounds={"a": 2**40}, id_bits=64)
    assert batch.to_lists() == lists
    with pytest.raises(ValueError, match=f"sample 1: id {2**40 - 1} is outside"):
        KeyedJaggedArray.from_lists(lists, bounds={"a": 2**40 - 1}, id_bits=64)
