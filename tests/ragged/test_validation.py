"""Hand-made batches: each error names the feature and the sample."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxrec.ragged import JaggedArray, KeyedJaggedArray, validate
from tests.ragged.strategies import nested_batches

pytestmark = pytest.mark.every_case

BATCH = jax.device_put(
    KeyedJaggedArray.from_lists(
        {"user": [[7], [8, 9]], "item": [[1, 2], [3]]},
        {"user": [[1.0], [2.0, 3.0]], "item": [[1.0, 1.0], [1.0]]},
        capacities=(4, 4),
    )
)


def changed(**fields) -> KeyedJaggedArray:
    """The batch with arrays on the device that no constructor would make."""
    return BATCH._with(**{name: jnp.asarray(array) for name, array in fields.items()})


@given(nested_batches())
@settings(max_examples=25, deadline=None)
def test_packed_batches_are_good(lists):
    batch = KeyedJaggedArray.from_lists(lists)
    assert validate(batch) is batch
    on_device = jax.device_put(batch)
    assert validate(on_device) is on_device
    for key in batch.keys:
        validate(batch[key], name=key)


@pytest.mark.parametrize(
    ("batch", "bounds", "message"),
    [
        (
            changed(lengths=[1, 2, 2, 3]),
            None,
            "feature 'item', sample 1: its elements end at 5, beyond the capacity 4",
        ),
        (
            changed(lengths=[9, 2, 2, 1]),
            None,
            "feature 'user', sample 0: its elements end at 9, beyond the capacity 4",
        ),
        (
            changed(lengths=[1, 2, 2, -1]),
            None,
            "feature 'item', sample 1 has the negative length -1",
        ),
        (changed(values=[7, 8, -3, 0, 1, 2, 3, 0]), None, "feature 'user', sample 1: id -3 is"),
        (BATCH, {"user": 9}, "feature 'user', sample 1: id 9 is outside [0, 9)"),
        (
            changed(weights=[1.0, 2.0, 3.0, 0, np.inf, 1, 1, 0]),
            None,
            "feature 'item', sample 0: weight inf is not finite",
        ),
        (changed(lengths=[1, 2, 2]), None, "lengths have shape (3,); expected (4,), the strides"),
        (changed(values=[7, 8]), None, "values have shape (2,); expected (8,), the capacities"),
        (changed(weights=[1.0]), None, "weights have shape (1,); expected (8,)"),
        (
            changed(inverse_indices=[[0, 1], [0, 2]]),
            None,
            "inverse_indices of feature 'item', sample 1 is 2",
        ),
        (BATCH, {"clicks": 9}, "bounds name ['clicks'], but the features are ['user', 'item']"),
        (BATCH.permute([0, 0]), None, "keys occur more than once in ('user', 'user')"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_the_feature_and_the_sample_are_named(batch, bounds, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(batch, bounds)


def test_padding_is_not_looked_at():
    validate(changed(values=[7, 8, 9, -5, 1, 2, 3, -5]), {"user": 10, "item": 4})
    validate(changed(weights=[1.0, 2.0, 3.0, np.nan, 1, 1, 1, np.nan]))


def test_over_devices():
    stacked = jax.tree.map(lambda array: jnp.stack([array, array]), BATCH)
    validate(stacked)
    bad = stacked._with(lengths=stacked.lengths.at[1, 3].set(3))
    with pytest.raises(ValueError, match="feature 'item' on device 1, sample 1: its elements end"):
        validate(bad)
    bad = stacked._with(values=stacked.values.at[1, 4].set(-1))
    with pytest.raises(ValueError, match="feature 'item' on device 1, sample 0: id -1"):
        validate(bad)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            JaggedArray(np.zeros((4, 2)), np.array([3, 2])),
            "'clicks', sample 1: its elements end at 5, beyond the capacity 4",
        ),
        (JaggedArray(np.zeros(4), np.array([3, -2])), "'clicks', sample 1 has the negative"),
        (JaggedArray(np.zeros(4), np.array([[1]])), "lengths have shape (1, 1); expected [rows]"),
        (
            JaggedArray(np.zeros(4), np.array([1]), np.zeros(3)),
            "'clicks' has 3 weights for 4 values",
        ),
    ],
    ids=["capacity", "negative", "shape", "weights"],
)
def test_columns(column, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(column, name="clicks")


def test_columns_of_ids_have_bounds():
    column = JaggedArray(np.array([1, 2, 30]), np.array([1, 1], np.int32))
    assert validate(column, {"clicks": 3}, name="clicks") is column
    with pytest.raises(ValueError, match=r"'clicks', sample 1: id 2 is outside \[0, 2\)"):
        validate(column, {"clicks": 2}, name="clicks")
    floats = dataclasses.replace(column, values=np.ones(3))
    with pytest.raises(TypeError, match="'clicks': ids are integers, got float64"):
        validate(floats, {"clicks": 2}, name="clicks")


def test_raw_ids():
    batch = KeyedJaggedArray.from_lists({"user": [[2**40], []]}, id_bits=64)
    assert validate(batch) is batch
    reserved = batch._with(values=np.where(batch.values == 2**40, -1, batch.values).view(np.int64))
    with pytest.raises(ValueError, match="sample 0: id -1 is"):
        validate(reserved)


def test_other_things():
    with pytest.raises(TypeError, match="takes a KeyedJaggedArray or a JaggedArray, got list"):
        validate([1])
    with pytest.raises(TypeError, match=r"call it outside of jax\.jit"):
        jax.jit(validate)(BATCH)
    with pytest.raises(TypeError, match="lengths are integers, got float32"):
        validate(changed(lengths=[1.0, 2, 2, 1]))
    with pytest.raises(TypeError, match="feature 'user': ids are integers, got float32"):
        validate(changed(values=np.zeros(8)))
