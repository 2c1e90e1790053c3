"""Packing of columns: capacities, strides, inverse indices, weights; and every error of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from jaxrec.ragged import KeyedJaggedArray
from tests.ragged.strategies import nested_batches, weights_like

pytestmark = pytest.mark.every_case

from_lists = KeyedJaggedArray.from_lists
from_dense = KeyedJaggedArray.from_dense
from_lengths = KeyedJaggedArray.from_lengths
from_offsets = KeyedJaggedArray.from_offsets


def flat(rows):
    """TorchRec's layout of nested lists: values and lengths."""
    bags = [bag for column in rows.values() for bag in column]
    return np.array([i for bag in bags for i in bag], np.int64), np.array(
        [len(b) for b in bags], int
    )


@given(nested_batches())
def test_all_constructors_agree(rows):
    values, lengths = flat(rows)
    weights, _ = flat(weights_like(rows))
    weights = np.array(
        [w for c in weights_like(rows).values() for bag in c for w in bag], np.float32
    )
    expected = from_lists(rows, weights_like(rows))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    arrays = {key: [np.array(bag, np.int64) for bag in bags] for key, bags in rows.items()}
    for batch in (
        from_lengths(list(rows), values, lengths, weights),
        from_offsets(list(rows), values.tolist(), offsets.tolist(), weights.tolist()),
        from_lengths(tuple(rows), jnp.asarray(values, jnp.int32), jnp.asarray(lengths), weights),
        from_lists(arrays, weights_like(rows)),
    ):
        for leaf, wanted in zip(jax.tree.leaves(batch), jax.tree.leaves(expected), strict=True):
            assert isinstance(leaf, np.ndarray)
            assert leaf.dtype == wanted.dtype
            np.testing.assert_array_equal(leaf, wanted)
        assert jax.tree.structure(batch) == jax.tree.structure(expected)


def test_padding_is_zero():
    batch = from_lists({"a": [[5]], "b": [[6, 7]]}, {"a": [[2.0]], "b": [[3.0, 4.0]]})
    np.testing.assert_array_equal(batch.values, [5] + [0] * 7 + [6, 7] + [0] * 6)
    np.testing.assert_array_equal(batch.weights, [2] + [0] * 7 + [3, 4] + [0] * 6)


def test_dense_columns():
    batch = from_dense(
        {
            "one": np.array([3, 1], np.uint8),
            "two": np.array([[4, 5], [6, 7]]),
            "no": np.zeros((2, 0)),
        },
        {"one": [0.5, 1], "two": [[1, 2], [3, 4]], "no": np.zeros((2, 0))},
    )
    assert batch.to_lists() == {"one": [[3], [1]], "two": [[4, 5], [6, 7]], "no": [[], []]}
    assert batch["one"].weights_to_lists() == [[0.5], [1.0]]
    assert batch["two"].weights_to_lists() == [[1.0, 2.0], [3.0, 4.0]]


def test_capacities_by_name_and_in_order():
    rows = {"a": [list(range(9))], "b": [[1]]}
    assert from_lists(rows).capacities == (12, 8)
    assert from_lists(rows, capacities={"b": 1}).capacities == (12, 1)
    assert from_lists(rows, capacities=[20, 3]).capacities == (20, 3)
    assert from_lists(rows, capacities={"a": 9}).to_lists() == rows


@pytest.mark.parametrize(
    ("dtype", "packed"),
    [
        (np.float64, np.float32),
        (np.int64, np.float32),
        (np.float32, np.float32),
        (np.float16, np.float32),
        (ml_dtypes.bfloat16, np.float32),
        (">f4", np.float32),
        (">f8", np.float32),
    ],
    ids=lambda dtype: np.dtype(dtype).name,
)
def test_weight_types(dtype, packed):
    batch = from_lengths(["a"], [1, 2], [2], np.array([1, 2], dtype))
    assert batch.weights.dtype == packed
    np.testing.assert_array_equal(batch.weights[:2].astype(np.float32), [1, 2])


def test_weights_of_several_types_become_float32():
    batch = from_dense(
        {"a": np.arange(2), "b": np.arange(2)},
        {"a": np.ones(2, np.float16), "b": np.ones(2, np.float32)},
    )
    assert batch.weights.dtype == np.float32


def test_ids_are_int32_whatever_x64_says():
    with jax.enable_x64(True):
        batch = from_lengths(["a"], np.array([2**31 - 1]), [1])
        assert batch.values.dtype == np.int32
        assert jax.jit(lambda b: b.permute([0, 0]))(batch).values.dtype == jnp.int32
        assert jax.jit(lambda b: b.offsets)(batch).dtype == jnp.int32
    assert batch.to_lists() == {"a": [[2**31 - 1]]}


def test_the_given_arrays_are_not_written_to():
    values = np.array([9, 1])
    batch = from_lengths(["a"], values, [2], bounds={"a": 2}, bounds_mode="ignore")
    assert batch.to_lists() == {"a": [[0, 1]]}
    np.testing.assert_array_equal(values, [9, 1])


def test_strides():
    batch = from_lengths(["a", "b"], [1, 2, 3], [1, 0, 2], strides=[1, 2])
    assert batch.to_lists() == {"a": [[1]], "b": [[], [2, 3]]}
    assert batch.batch_size == 2
    batch = from_offsets(["a", "b"], [1, 2, 3], [0, 1, 1, 3], strides=(1, 2))
    assert batch.strides == (1, 2)


def test_nothing():
    assert from_lists({}).keys == ()
    assert from_lists({"a": []}).batch_size == 0
    assert from_lengths([], [], []).keys == ()
    assert from_lengths(["a", "b"], [], []).to_lists() == {"a": [], "b": []}
    assert from_dense({"a": np.zeros((0, 3), int)}).batch_size == 0


TWO = ["a", "b"]

# Each: the call, the error and what it must say.
ERRORS = {
    "batch_sizes": (
        lambda: from_lists({"a": [[1]], "b": [[1], [2]]}),
        ValueError,
        "different numbers of samples: 'a' 1, 'b' 2; pass inverse_indices",
    ),
    "duplicate_keys": (
        lambda: from_lengths(["a", "b", "a"], [1, 2, 3], [1, 1, 1]),
        ValueError,
        r"\['a'\] occur more than once",
    ),
    "keys_a_string": (
        lambda: from_lengths("ab", [1, 2], [1, 1]),
        TypeError,
        "keys is the string 'ab'",
    ),
    "keys_a_string_offsets": (
        lambda: from_offsets("ab", [1, 2], [0, 1, 2]),
        TypeError,
        "keys is the string",
    ),
    "capacity": (
        lambda: from_lists({"a": [list(range(9)), [1]]}, capacities={"a": 8}),
        ValueError,
        r"feature 'a' has 10 ids, but its capacity is 8; give it at least 10 \(on the ladder: 12\)",
    ),
    "capacity_unknown": (
        lambda: from_lists({"a": [[1]]}, capacities={"x": 8}),
        ValueError,
        r"capacities name \['x'\], but the keys are \['a'\]",
    ),
    "capacity_count": (
        lambda: from_lists({"a": [[1]]}, capacities=[8, 8]),
        ValueError,
        "2 capacities for 1 keys",
    ),
    "capacity_total": (
        lambda: from_lists({"a": [[1]], "b": [[1]]}, capacities=[2**30, 2**30]),
        ValueError,
        "fewer than 2.*31 ids, but capacities sum to 2147483648",
    ),
    "some_weights": (
        lambda: from_lists({"a": [[1]], "b": [[2]]}, {"a": [[0.5]]}),
        ValueError,
        r"features \['b'\] have no weights, but others do",
    ),
    "weights_unknown": (
        lambda: from_lists({"a": [[1]]}, {"x": [[0.5]]}),
        ValueError,
        r"weights name \['x'\]",
    ),
    "inverse_shape": (
        lambda: from_lists({"a": [[1]], "b": [[2]]}, inverse_indices=[[0]]),
        ValueError,
        r"inverse_indices has shape \(1, 1\); expected \[2 keys, batch\]",
    ),
    "inverse_range": (
        lambda: from_lists({"a": [[1]], "b": [[2], []]}, inverse_indices=[[0, 0], [1, 2]]),
        ValueError,
        "inverse_indices of feature 'b', sample 1 is 2, but the feature has 2 bags",
    ),
    "inverse_negative": (
        lambda: from_lists({"a": [[1]], "b": [[2], []]}, inverse_indices=[[0, -1], [1, 0]]),
        ValueError,
        "inverse_indices of feature 'a', sample 1 is -1, but the feature has 1 bags",
    ),
    "inverse_float": (
        lambda: from_lists({"a": [[1]]}, inverse_indices=[[0.0]]),
        TypeError,
        "inverse_indices: bag numbers must be integers",
    ),
    "lengths_sum": (
        lambda: from_lengths(TWO, [1, 2, 3], [1, 1]),
        ValueError,
        "lengths sum to 2, but there are 3 values",
    ),
    "lengths_negative": (
        lambda: from_lengths(TWO, [1, 2], [1, 1, 1, -1]),
        ValueError,
        "feature 'b', sample 1 has the negative length -1",
    ),
    "lengths_divide": (
        lambda: from_lengths(TWO, [1, 2, 3], [1, 1, 1]),
        ValueError,
        "3 lengths do not divide among 2 keys; give strides=",
    ),
    "lengths_without_keys": (
        lambda: from_lengths([], [1], [1]),
        ValueError,
        "1 lengths do not divide among 0 keys",
    ),
    "lengths_float": (
        lambda: from_lengths(TWO, [1, 2], [1.0, 1.0]),
        TypeError,
        "lengths: lengths must be integers, not of type float64",
    ),
    "lengths_rank": (
        lambda: from_lengths(TWO, [1, 2], [[1], [1]]),
        ValueError,
        r"lengths has shape \(2, 1\); expected one dimension",
    ),
    "values_rank": (
        lambda: from_lengths(TWO, [[1, 2]], [1, 1]),
        ValueError,
        r"values has shape \(1, 2\)",
    ),
    "values_float": (lambda: from_lengths(TWO, [1.5, 2], [1, 1]), TypeError, "not of type float64"),
    "values_bool": (
        lambda: from_lengths(TWO, [True, False], [1, 1]),
        TypeError,
        "not of type bool",
    ),
    "values_none": (lambda: from_lengths(TWO, [1, None], [1, 1]), TypeError, "not of type object"),
    "values_string": (lambda: from_lengths(TWO, ["1", "2"], [1, 1]), TypeError, "not of type <U1"),
    "weights_shape": (
        lambda: from_lengths(TWO, [1, 2], [1, 1], [0.5]),
        ValueError,
        r"values have shape \(2,\) but weights \(1,\)",
    ),
    "weights_complex": (
        lambda: from_lengths(TWO, [1, 2], [1, 1], [1j, 2]),
        TypeError,
        "weights must be real numbers, not of type complex128",
    ),
    "strides_sum": (
        lambda: from_lengths(TWO, [1, 2], [1, 1], strides=[1, 2]),
        ValueError,
        r"strides \(1, 2\) do not fit 2 keys and 2 lengths",
    ),
    "strides_count": (
        lambda: from_lengths(TWO, [1, 2], [1, 1], strides=[2]),
        ValueError,
        r"strides \(2,\) do not fit",
    ),
    "strides_negative": (
        lambda: from_lengths(TWO, [1, 2], [1, 1], strides=[3, -1]),
        ValueError,
        r"strides \(3, -1\) do not fit",
    ),
    "offsets_start": (
        lambda: from_offsets(TWO, [1, 2], [1, 1, 2]),
        ValueError,
        "offsets start at 1; expected 0",
    ),
    "offsets_descend": (
        lambda: from_offsets(TWO, [1, 2], [0, 2, 2, 1, 2]),
        ValueError,
        "feature 'b', sample 0: offsets descend from 2 to 1",
    ),
    "offsets_end": (
        lambda: from_offsets(TWO, [1, 2], [0, 1, 3]),
        ValueError,
        "lengths sum to 3, but there are 2 values",
    ),
    "offsets_empty": (lambda: from_offsets([], [], []), ValueError, r"offsets has shape \(0,\)"),
    "offsets_float": (
        lambda: from_offsets(TWO, [1, 2], [0, 1.5, 2]),
        TypeError,
        "offsets must be integers",
    ),
    "dense_rank": (
        lambda: from_dense({"a": np.zeros((2, 2, 2), int)}),
        ValueError,
        r"feature 'a' has ids of shape \(2, 2, 2\); expected \[batch\] or \[batch, k\]",
    ),
    "dense_float": (
        lambda: from_dense({"a": np.ones(2)}),
        TypeError,
        "feature 'a': ids must be integers, not of type float64",
    ),
    "dense_weights": (
        lambda: from_dense({"a": np.ones(2, int)}, {"a": np.ones((2, 1))}),
        ValueError,
        r"feature 'a' has ids of shape \(2,\) but weights of shape \(2, 1\)",
    ),
    "dense_batch": (
        lambda: from_dense({"a": np.arange(2), "b": np.arange(3)}),
        ValueError,
        "different numbers of samples: 'a' 2, 'b' 3",
    ),
    "lengths_wrap": (
        lambda: from_lengths(TWO, [], [2**62] * 4),
        ValueError,
        "feature 'a', sample 0 has the length 4611686018427387904, but there are 0 values",
    ),
    "lengths_uint64": (
        lambda: from_lengths(TWO, [1], np.array([2, 2**64 - 1], np.uint64)),
        ValueError,
        "feature 'a', sample 0 has the length 2, but there are 1 values",
    ),
    "offsets_wrap": (
        lambda: from_offsets(["a"], [1], np.array([0, 2**64 - 1], np.uint64)),
        ValueError,
        "offsets end at 18446744073709551615",
    ),
    "strides_float": (
        lambda: from_lengths(TWO, [1, 2], [1, 1], strides=[1, 1.5]),
        TypeError,
        "strides: 1.5 is not an integer",
    ),
    "strides_number": (
        lambda: from_lengths(TWO, [1, 2], [1, 1], strides=1),
        TypeError,
        "strides is 1; expected the number of bags of each key",
    ),
    "capacity_float": (
        lambda: from_lists({"a": [[1]]}, capacities={"a": 2.7}),
        TypeError,
        "the capacity of feature 'a': 2.7 is not an integer",
    ),
    "capacity_number": (
        lambda: from_lists({"a": [[1]]}, capacities=64),
        TypeError,
        "capacities is 64; expected capacities by name",
    ),
    "masked_ids": (
        lambda: from_lengths(["a"], np.ma.masked_equal([1, 2], 2), [2]),
        ValueError,
        r"values: 1 elements are masked, .*fill them \(array\.filled\(0\)\)",
    ),
    "masked_dense": (
        lambda: from_dense({"a": np.ma.masked_equal([[1, 2]], 2)}),
        ValueError,
        "feature 'a': 1 elements are masked",
    ),
    "masked_rows": (
        lambda: from_lists({"a": np.ma.masked_equal([[1, 2]], 2)}),
        TypeError,
        "feature 'a', sample 0: id None .* is not an integer",
    ),
    "weight_nan": (
        lambda: from_lists({"a": [[1], [2, 3]]}, {"a": [[1.0], [2.0, np.nan]]}),
        ValueError,
        "feature 'a', sample 1: weight nan is not finite in float32",
    ),
    "weight_infinite": (
        lambda: from_dense({"a": np.arange(2)}, {"a": np.array([1, -np.inf], np.float16)}),
        ValueError,
        "feature 'a', sample 1: weight -inf is not finite",
    ),
    "weight_large": (
        lambda: from_lengths(TWO, [1, 2], [1, 1], [1.0, 1e300]),
        ValueError,
        r"feature 'b', sample 0: weight 1e\+300 is not finite in float32",
    ),
    "weight_large_in_lists": (
        lambda: from_lists({"a": [[1]]}, {"a": [[1e39]]}),
        ValueError,
        r"feature 'a', sample 0: weight 1e\+39 is not finite in float32",
    ),
    "weight_huge_int": (
        lambda: from_lists({"a": [[], [1]]}, {"a": [[], [10**400]]}),
        ValueError,
        "feature 'a', sample 1: weight 10+ is not finite in float32",
    ),
    "data_no_mapping": (
        lambda: from_lists([[1]]),
        TypeError,
        r"data is \[\[1\]\] \(list\); expected a mapping by the names of features",
    ),
    "weights_no_mapping": (
        lambda: from_dense({"a": [1]}, [1.0]),
        TypeError,
        r"weights is \[1.0\] \(list\); expected a mapping",
    ),
    "key_no_string": (
        lambda: from_lists({1: [[1]]}),
        TypeError,
        "keys are names of features, strings, but 1 is among them",
    ),
    "ragged_array": (
        lambda: from_lengths(["a"], [[1], [1, 2]], [1, 2]),
        TypeError,
        "values: expected an array of numbers",
    ),
    "unknown_option": (lambda: from_lists({"a": [[1]]}, bound={"a": 2}), TypeError, "'bound'"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_packing_under_jit_is_an_error():
    def pack(values):
        return from_lengths(["a"], values, [2])

    with pytest.raises(TypeError, match="values: the array is traced, but batches are packed"):
        jax.jit(pack)(jnp.arange(2))
