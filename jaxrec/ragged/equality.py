"""Equality of ragged arrays by their rows, without their padding."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool

from jaxrec.ragged.arrays import namespace
from jaxrec.ragged.jagged import BatchColumn, JaggedArray
from jaxrec.ragged.keyed_array import KeyedArray
from jaxrec.ragged.keyed_jagged import KeyedJaggedArray
from jaxrec.ragged.wide_ids import WideIds

_KINDS = (JaggedArray, KeyedJaggedArray, KeyedArray)


def equal(first: Any, second: Any) -> bool | Bool[Array, ""]:
    """Return whether two ragged arrays hold the same rows.

    TorchRec's ``jt_is_equal`` and ``kjt_is_equal``: keys may be in another order. Padding,
    capacities, types, and whether arrays are on the host or a device do not matter. Batches over a
    mesh are compared device by device. Numbers are compared exactly, and NaN equals no number, not
    even NaN.

    Args:
        first: A `JaggedArray`, `KeyedJaggedArray` or `KeyedArray`.
        second: Another one of the same class.

    Returns:
        A bool; under jit a scalar array.

    Raises:
        TypeError: The two are of different classes or of another one.

    Example:
        >>> one = KeyedJaggedArray.from_lists({"a": [[1], []], "b": [[], [2, 3]]})
        >>> other = one.permute([1, 0]).with_capacities({"a": 64})
        >>> equal(one, other), equal(one, one.select(["a"]))
        (True, False)
    """
    for array in (first, second):
        if not isinstance(array, _KINDS):
            raise TypeError(
                f"equal compares a JaggedArray, KeyedJaggedArray or KeyedArray, got {array!r:.60}"
            )
    if _kind(first) is not _kind(second):
        raise TypeError(
            f"equal compares two of one kind, got {type(first).__name__} and "
            f"{type(second).__name__}"
        )
    # Static properties come first: a difference there is a plain bool, also under jit.
    differs = _static_difference(first, second)
    if differs:
        return False
    leaves = jax.tree.leaves((first, second), is_leaf=lambda leaf: isinstance(leaf, np.ndarray))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return _compare(first, second)
    return bool(_compare(jax.device_get(first), jax.device_get(second)))


def _kind(array: Any) -> type:
    return next(kind for kind in _KINDS if isinstance(array, kind))


def _static_difference(first: Any, second: Any) -> bool:
    """Return whether names, shapes or the presence of weights differ."""
    if isinstance(first, JaggedArray):
        return _column_shape(first) != _column_shape(second)
    if sorted(first.keys) != sorted(second.keys):
        return True
    if isinstance(first, KeyedArray):
        return any(first[key].shape != second[key].shape for key in first.keys)
    if first.batch_size != second.batch_size:
        return True
    return any(_column_shape(first[key]) != _column_shape(second[key]) for key in first.keys)


def _column_shape(column: JaggedArray) -> tuple[Any, ...]:
    """Return the static properties that equal columns have in common."""
    batch_axes = column.lengths.ndim - 1
    element = column.values.shape[batch_axes + 1 :]
    inverse, are_slots = None, False
    if isinstance(column, BatchColumn):
        inverse, are_slots = column.inverse_indices, column.are_slots
    samples = None if inverse is None else inverse.shape
    return column.lengths.shape, element, column.weights is None, samples, are_slots


def _compare(first: Any, second: Any) -> Any:
    """Return whether arrays without a static difference hold the same rows."""
    if isinstance(first, JaggedArray):
        return _equal_columns(first, second)
    is_dense, xp = isinstance(first, KeyedArray), namespace(first.values, second.values)
    pairs = [(first[key], second[key]) for key in first.keys]
    parts = [(a == b).all() if is_dense else _equal_columns(a, b) for a, b in pairs]
    return xp.stack([xp.asarray(part) for part in parts]).all() if parts else np.True_


def _equal_numbers(one: Any, other: Any) -> Any:
    """Compare two arrays of numbers, or of wide ids, element by element."""
    if isinstance(other, WideIds):
        return other.is_equal(one)
    return one.is_equal(other) if isinstance(one, WideIds) else one == other


def _equal_columns(first: JaggedArray, second: JaggedArray) -> Any:
    """Return whether two columns hold the same rows, weights and inverse indices."""
    xp = namespace(first.values, first.lengths, second.values, second.lengths)
    axis = first.lengths.ndim - 1
    capacity = min(first.values.shape[axis], second.values.shape[axis])
    # If the lengths are equal, all elements lie within the smaller capacity. If they are not, the
    # result is False whatever the elements.
    used = xp.arange(capacity) < first.lengths.sum(axis=-1, keepdims=True)

    def same(one: Any, other: Any) -> Any:
        cut = (slice(None),) * axis + (slice(capacity),)
        equal = _equal_numbers(one[cut], other[cut])
        return (equal | ~used.reshape(used.shape + (1,) * (equal.ndim - used.ndim))).all()

    result = (first.lengths == second.lengths).all() & same(first.values, second.values)
    if first.weights is not None:
        result &= same(first.weights, second.weights)
    if isinstance(first, BatchColumn) and first.inverse_indices is not None:
        assert isinstance(second, BatchColumn)
        are_same: Any = first.inverse_indices == second.inverse_indices
        result &= are_same.all()
    return result
