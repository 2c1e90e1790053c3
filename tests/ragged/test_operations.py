"""Operations on columns are those of `jaxrec.ragged.fbgemm`; old forms of calls say the new one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrec import ragged
from jaxrec.ragged import JaggedArray, KeyedJaggedArray, fbgemm

RNG = np.random.default_rng(0)
# Three rows of 2, 0 and 3 vectors, and padding that must not be read.
LENGTHS = np.array([2, 0, 3], np.int32)
VALUES = np.where(np.arange(7)[:, None] < 5, RNG.normal(size=(7, 4)), np.nan).astype(np.float32)
WEIGHTS = np.array([1, 2, 3, 4, 5, 0, 0], np.float32)
COLUMN = JaggedArray(VALUES, LENGTHS, WEIGHTS)
ORDER = np.array([2, 0, 2])
STARTS = np.array([1, 0, 2])
DENSE = RNG.normal(size=(3, 2, 4)).astype(np.float32)
MATRICES = RNG.normal(size=(3, 4, 2)).astype(np.float32)

# By operation: arguments behind the column, and behind the values and offsets (or lengths).
CASES = {
    "jagged_softmax": (),
    "segment_sum_csr": (),
    "jagged_dense_elementwise_add_jagged_output": (DENSE,),
    "jagged_dense_elementwise_mul": (DENSE,),
    "jagged_dense_bmm": (MATRICES, 3),
}
PICKS = {
    "jagged_index_select": (ORDER, 9),
    "jagged_slice": (STARTS, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_loose_form(name):
    arguments = CASES[name]
    found = jax.jit(lambda column: getattr(ragged, name)(column, *arguments))(COLUMN)
    expected = getattr(fbgemm, name)(VALUES, COLUMN.offsets, *arguments)
    if isinstance(found, JaggedArray):
        np.testing.assert_array_equal(found.lengths, LENGTHS)
        np.testing.assert_array_equal(found.weights, WEIGHTS)
        found = found.values
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", PICKS)
def test_picked_rows_keep_their_weights(name):
    found = getattr(ragged, name)(COLUMN, *PICKS[name])
    rows = {
        "jagged_index_select": [(2, 5), (0, 2), (2, 5)],
        "jagged_slice": [(1, 2), (0, 0), (4, 5)],
    }[name]
    assert found.lengths.tolist() == [end - start for start, end in rows]
    wanted = np.concatenate([np.arange(start, end) for start, end in rows])
    np.testing.assert_array_equal(found.values[: wanted.size], VALUES[wanted])
    np.testing.assert_array_equal(found.weights[: wanted.size], WEIGHTS[wanted])
    assert not np.any(found.values[wanted.size :])


def test_products_of_two_columns():
    other = JaggedArray(VALUES[:, :2], LENGTHS)
    found = ragged.jagged_jagged_bmm(COLUMN, other, 3)
    rows = [VALUES[:2], VALUES[2:2], VALUES[2:5]]
    expected = np.stack([row.T @ row[:, :2] for row in rows])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_column_over_a_mesh_is_refused():
    stacked = JaggedArray(VALUES[None], LENGTHS[None], WEIGHTS[None])
    for name, arguments in (CASES | PICKS).items():
        with pytest.raises(ValueError, match="needs one batch, and this one lies over a mesh"):
            getattr(ragged, name)(stacked, *arguments)


@pytest.mark.parametrize("name", [*CASES, *PICKS])
def test_the_old_form_of_a_call_says_the_new_one(name):
    rows = LENGTHS if name in PICKS else COLUMN.offsets
    arguments = (CASES | PICKS)[name]
    message = rf"jaxrec.ragged.{name} takes a JaggedArray; jaxrec.ragged.fbgemm.{name} takes arrays"
    with pytest.warns(DeprecationWarning, match=message):
        found = getattr(ragged, name)(jnp.asarray(VALUES), rows, *arguments)
    expected = getattr(fbgemm, name)(VALUES, rows, *arguments)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_operations_on_arrays_alone_moved():
    message = "jaxrec.ragged.segment_mask is now jaxrec.ragged.fbgemm.segment_mask"
    with pytest.warns(DeprecationWarning, match=message):
        assert ragged.segment_mask is fbgemm.segment_mask
    assert "segment_mask" not in dir(ragged)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        ragged.nonsense  # noqa: B018


def test_a_batch_of_several_features_is_refused():
    batch = KeyedJaggedArray.from_lists({"f": [[1], [2, 3]]})
    with pytest.raises(TypeError, match=r"takes one column of a batch, such as batch\['f'\]"):
        ragged.jagged_softmax(batch)
