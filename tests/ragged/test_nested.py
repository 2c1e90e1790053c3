"""Nested lists as input: what is taken, and what each mistake says."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrec.ragged import KeyedJaggedArray

pytestmark = pytest.mark.every_case

from_lists = KeyedJaggedArray.from_lists


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2], [], [3]],
        [(1, 2), (), (3,)],
        ([1, 2], (), np.array([3])),
        [np.array([1, 2], np.uint8), np.array([]), np.array([3], np.int64)],
        [[np.int32(1), 2], [], [np.uint64(3)]],
        [[1, 2], np.array([]), np.array([3], np.uint64)],
    ],
    ids=["lists", "tuples", "mixed", "arrays", "numpy_scalars", "lists_and_arrays"],
)
def test_what_is_taken(rows):
    batch = from_lists({"a": rows}, {"a": [[0.5, 1], (), np.array([2.0])]})
    assert batch.values.dtype == np.int32
    assert batch["a"].to_lists() == [[1, 2], [], [3]]
    assert batch["a"].weights_to_lists() == [[0.5, 1.0], [], [2.0]]


def test_unsigned_and_signed_arrays_lose_no_digits():
    wide = 2**63 + 1
    with pytest.raises(ValueError, match=f"feature 'a', sample 0: id {wide} does not fit int32"):
        from_lists({"a": [np.array([wide], np.uint64), np.array([1])]})


def test_weights_of_arrays():
    batch = from_lists({"a": [[1], [2]]}, {"a": [np.array([1]), np.array([0.5], np.float16)]})
    assert batch["a"].weights_to_lists() == [[1.0], [0.5]]
    empty = from_lists({"a": [[], []]}, {"a": [np.array([]), np.array([])]})
    assert empty["a"].weights_to_lists() == [[], []]
    assert empty.weights.dtype == np.float32


ERRORS = {
    "no_list": ({"a": 3}, None, r"feature 'a' is 3 \(int\); expected a list of lists"),
    "string": ({"a": "ab"}, None, r"feature 'a' is 'ab' \(str\)"),
    "flat": ({"a": [1, 2]}, None, r"feature 'a', sample 0 is 1 \(int\); expected a list of ids"),
    "none_bag": ({"a": [[1], None]}, None, r"feature 'a', sample 1 is None \(NoneType\)"),
    "string_bag": ({"a": [[1], "23"]}, None, r"feature 'a', sample 1 is '23' \(str\)"),
    "deep": ({"a": [[1], [[2]]]}, None, r"sample 1: id \[2\] \(list\) is not an integer"),
    "none": ({"a": [[1], [2, None]]}, None, r"sample 1: id None \(NoneType\) is not an integer"),
    "float": ({"a": [[1], [], [2.0]]}, None, r"'a', sample 2: id 2.0 \(float\) is not an integer"),
    "bool": ({"a": [[1], [True]]}, None, r"sample 1: id True \(bool\) is not an integer"),
    "numpy_bool": ({"a": [[np.True_]]}, None, r"sample 0: id np.True_ \(bool\) is not an integer"),
    "id_string": ({"a": [["1"]]}, None, r"sample 0: id '1' \(str\) is not an integer"),
    "float_array": (
        {"a": [np.ones(1, int), np.ones(1)]},
        None,
        "sample 1: id of type float64 is not",
    ),
    "bool_array": ({"a": [np.ones(1, bool)]}, None, "sample 0: id of type bool is not an integer"),
    "deep_array": (
        {"a": [np.ones(1, int), np.ones((1, 1), int)]},
        None,
        r"sample 1 has shape \(1, 1\)",
    ),
    "scalar_array": ({"a": [np.array(1)]}, None, r"sample 0 has shape \(\); expected a one-dim"),
    "mixed_float": ({"a": [[1], np.ones(1)]}, None, "sample 1: id 1.0 .float. is not an integer"),
    "mixed_deep": ({"a": [[1], np.ones((1, 1), int)]}, None, r"sample 1: id \[1\] \(list\)"),
    "weight_none": (
        {"a": [[1]]},
        {"a": [[None]]},
        "sample 0: weight None .NoneType. is not a real",
    ),
    "weight_bool": ({"a": [[1]]}, {"a": [[True]]}, "weight True .bool. is not a real number"),
    "weight_flat": (
        {"a": [[1]]},
        {"a": [0.5]},
        "sample 0 is 0.5 .float.; expected a list of weights",
    ),
    "weight_array": ({"a": [[1]]}, {"a": [np.array(["x"])]}, "weight of type <U1 is not a real"),
}


@pytest.mark.parametrize(("rows", "weights", "message"), ERRORS.values(), ids=ERRORS)
def test_type_errors(rows, weights, message):
    with pytest.raises(TypeError, match=message):
        from_lists(rows, weights)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[1.0, 2.0]], "feature 'a' has 2 samples but weights for 1"),
        ([[1.0, 2.0], []], "feature 'a', sample 1: 1 ids but 0 weights; each id needs one weight"),
        ([[1.0], [2.0, 3.0]], "feature 'a', sample 0: 2 ids but 1 weights"),
    ],
    ids=["samples", "missing", "moved"],
)
def test_weights_of_another_shape(weights, message):
    with pytest.raises(ValueError, match=message):
        from_lists({"a": [[1, 2], [3]]}, {"a": weights})
