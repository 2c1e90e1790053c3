"""One ragged column."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.ragged import JaggedArray
from jaxrec.ragged.capacity import capacity_for

pytestmark = pytest.mark.every_case

numbers = st.integers(-(2**31), 2**31 - 1)
nested = st.lists(st.lists(numbers, max_size=5), max_size=5)


@given(nested)
def test_lists_round_trip(rows):
    weights = [[value / 4 for value in range(len(row))] for row in rows]
    column = JaggedArray.from_lists(rows, weights)
    assert column.to_lists() == rows
    assert column.weights_to_lists() == weights
    assert column.batch_size == len(rows)
    assert column.capacity == capacity_for(sum(map(len, rows)))
    np.testing.assert_array_equal(column.offsets, np.cumsum([0, *map(len, rows)]))
    for leaf in jax.tree.leaves(column):
        assert isinstance(leaf, np.ndarray)


@given(st.lists(st.lists(numbers, max_size=5), min_size=3, max_size=3), st.sampled_from([0, 2, 6]))
@settings(max_examples=30)
def test_padded_dense_against_lists(rows, length):
    column = JaggedArray.from_lists(rows, capacity=32)
    expected = [(row + [-7] * length)[:length] for row in rows]
    np.testing.assert_array_equal(
        column.to_padded_dense(length, -7), np.array(expected).reshape(len(rows), length)
    )
    lengths = jnp.minimum(column.lengths, length)
    back = JaggedArray.from_dense(column.to_padded_dense(length), lengths)
    assert back.to_lists() == [row[:length] for row in rows]


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([[1.5], []], np.float32),
        ([[1], [0.5]], np.float32),
        ([np.ones(1, np.float16)], np.float16),
        ([np.ones(1, ml_dtypes.bfloat16)], ml_dtypes.bfloat16),
        ([np.ones(1, np.float64)], np.float32),
        ([np.ones(1, np.int64)], np.int32),
        ([np.ones(1, np.uint32)], np.int32),
        ([np.ones(1, np.int8)], np.int8),
        ([[True], []], np.bool_),
        ([[], []], np.int32),
        ([], np.int32),
    ],
)
def test_types(rows, dtype):
    column = JaggedArray.from_lists(rows)
    assert column.values.dtype == dtype
    assert column.to_lists() == [np.asarray(row, dtype).tolist() for row in rows]


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        ([[1, 2]], np.float32),
        ([[0.5, 1]], np.float32),
        ([np.ones(2, np.float16)], np.float16),
        ([np.ones(2, ml_dtypes.bfloat16)], ml_dtypes.bfloat16),
    ],
)
def test_weight_types(weights, dtype):
    column = JaggedArray.from_lists([[3, 4]], weights)
    assert column.weights.dtype == dtype
    assert column.weights_to_lists() == np.asarray(weights, np.float32).tolist()


def test_rows_of_vectors():
    rows = [[[1.0, 2.0], [3.0, 4.0]], [], [[5.0, 6.0]]]
    column = JaggedArray.from_lists(rows, capacity=4)
    assert column.values.shape == (4, 2)
    assert column.to_lists() == rows
    dense = column.to_padded_dense(padding_value=9)
    np.testing.assert_array_equal(dense[0], [[1, 2], [3, 4]])
    np.testing.assert_array_equal(dense[1], np.full((2, 2), 9))
    np.testing.assert_array_equal(dense[2], [[5, 6], [9, 9]])
    assert JaggedArray.from_dense(dense, jnp.array([2, 0, 1])).to_lists() == rows
    arrays = JaggedArray.from_lists([np.ones((2, 3), np.float32), np.zeros((0, 3), np.float32)])
    assert arrays.values.shape == (8, 3)
    assert arrays.to_lists() == [[[1.0] * 3] * 2, []]


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_from_dense(place):
    dense = place(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert JaggedArray.from_dense(dense).to_lists() == [[0, 1, 2], [3, 4, 5]]
    column = JaggedArray.from_dense(dense, place(np.array([1, 9])), weights=dense * 2)
    assert column.to_lists() == [[0], [3, 4, 5]]
    assert column.weights_to_lists() == [[0], [6, 8, 10]]
    assert column.capacity == 6


def test_segment_ids():
    column = JaggedArray.from_lists([[], [1, 2], [], [3], []], capacity=5)
    np.testing.assert_array_equal(column.segment_ids, [1, 1, 3, 5, 5])
    full = JaggedArray.from_lists([[1], [2, 3], []], capacity=3)
    np.testing.assert_array_equal(full.segment_ids, [0, 1, 1])


def test_empty():
    column = JaggedArray.empty(np.float32, weighted=True)
    assert (column.batch_size, column.capacity, column.to_lists()) == (0, 0, [])
    assert column.values.dtype == column.weights.dtype == np.float32
    assert column.to_padded_dense().shape == (0, 0)
    assert JaggedArray.empty().weights is None


def test_under_jit_scan_and_grad():
    column = JaggedArray.from_lists([[1.0, 2.0], [], [3.0]], [[0.5, 1.0], [], [2.0]])
    dense = jax.jit(lambda c: c.to_padded_dense(2, -1))(column)
    np.testing.assert_array_equal(dense, [[1, 2], [-1, -1], [3, -1]])
    with pytest.raises(TypeError, match="needs a static length= under jit"):
        jax.jit(lambda c: c.to_padded_dense())(column)

    def loss(c):
        return (c.to_padded_dense(1) ** 2).sum() + 3 * c.to_padded_dense_weights(2).sum()

    gradient = jax.grad(lambda v, w: loss(JaggedArray(v, column.lengths, w)), (0, 1))(
        jnp.asarray(column.values), jnp.asarray(column.weights)
    )
    np.testing.assert_array_equal(gradient[0], [2, 0, 6, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(gradient[1], [3, 3, 3, 0, 0, 0, 0, 0])

    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), column)
    _, sums = jax.lax.scan(lambda c, x: (c, x.to_padded_dense(2).sum()), 0, stacked)
    np.testing.assert_array_equal(sums, [6, 6])


ERRORS = {
    "capacity": (
        lambda: JaggedArray.from_lists([[1, 2], [3]], capacity=2),
        ValueError,
        r"the rows have 3 elements, but the capacity is 2; give at least 3 \(on the ladder: 8\)",
    ),
    "int32": (
        lambda: JaggedArray.from_lists([[2**40]]),
        ValueError,
        "1099511627776 does not fit int32",
    ),
    "negative_int32": (
        lambda: JaggedArray.from_lists([[-(2**40)]]),
        ValueError,
        "-1099511627776 does not fit int32",
    ),
    "shapes": (
        lambda: JaggedArray.from_lists([[1], [[2]]]),
        TypeError,
        "the rows' elements have several shapes",
    ),
    "strings": (
        lambda: JaggedArray.from_lists([["a"]]),
        TypeError,
        "must be numbers, not of type <U1",
    ),
    "none": (lambda: JaggedArray.from_lists([[None]]), TypeError, "not of type object"),
    "flat": (
        lambda: JaggedArray.from_lists([[1], 2]),
        TypeError,
        r"row 1 is 2 \(int\); expected a",
    ),
    "weights": (
        lambda: JaggedArray.from_lists([[1, 2]], [[0.5]]),
        ValueError,
        "weights are not nested like the rows",
    ),
    "bool_weights": (
        lambda: JaggedArray.from_lists([[1, 2]], [[True, False]]),
        TypeError,
        "weights must be real numbers, not of type bool",
    ),
    "no_weights": (
        lambda: JaggedArray.from_lists([[1, 2]]).weights_to_lists(),
        ValueError,
        "the column has no weights",
    ),
    "no_weights_dense": (
        lambda: JaggedArray.from_lists([[1, 2]]).to_padded_dense_weights(),
        ValueError,
        "the column has no weights",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
