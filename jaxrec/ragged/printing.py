"""Ragged batches as text: nested lists if they are small and on this process, shapes otherwise."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

# Number of elements that a person still reads.
_LARGEST = 64


def keyed_jagged(batch: Any) -> str:
    """Return a `KeyedJaggedArray` as text: the bags of each key, or the shapes of its arrays."""
    fields = (batch.values, batch.lengths, batch.weights, batch.inverse_indices)
    if not _is_small(*fields) or batch.lengths.shape != (sum(batch.strides),):
        return (
            f"KeyedJaggedArray(keys={_cut(batch.keys)}, values={_shape(batch.values)}, "
            f"lengths={_shape(batch.lengths)}, weights={_shape(batch.weights)}, "
            f"inverse_indices={_shape(batch.inverse_indices)}, "
            f"capacities={_cut(batch.capacities)}, strides={_cut(batch.strides)})"
        )
    batch = jax.device_get(batch)
    lines = [f"KeyedJaggedArray(batch_size={batch.batch_size}, {{"]
    for index, key in enumerate(batch.keys):
        column = batch._column(index)
        line = f"    {key!r}: {'slots ' if key in batch.slot_keys else ''}{column.to_lists()}"
        if column.weights is not None:
            line += f" weights {column.weights_to_lists()}"
        if batch.inverse_indices is not None:
            line += f" inverse {batch.inverse_indices[index].tolist()}"
        lines.append(line + ",")
    return "\n".join([*lines, "})"])


def jagged(column: Any) -> str:
    """Return a `JaggedArray` as text: its rows, or the shapes of its arrays."""
    fields = (column.values, column.lengths, column.weights)
    if not _is_small(*fields) or column.lengths.ndim != 1:
        return (
            f"JaggedArray(values={_shape(column.values)}, lengths={_shape(column.lengths)}, "
            f"weights={_shape(column.weights)})"
        )
    column = jax.device_get(column)
    rows = f"JaggedArray({column.to_lists()}"
    if column.weights is not None:
        rows += f", weights={column.weights_to_lists()}"
    return f"{rows}, capacity={column.capacity})"


def keyed(array: Any) -> str:
    """Return a `KeyedArray` as text: its shape and the columns of each key."""
    dims = ", ".join(f"{key!r}: {dim}" for key, dim in zip(array.keys, array.dims, strict=True))
    return f"KeyedArray(values={_shape(array.values)}, dims={{{dims}}})"


def _is_small(*arrays: Any) -> bool:
    """Return whether all arrays that are not None are small and readable on this process."""
    values, lengths, *optional = arrays
    given = [values, lengths, *(array for array in optional if array is not None)]
    return all(_is_known(array) and array.size <= _LARGEST for array in given)


def _is_known(array: Any) -> bool:
    if isinstance(array, np.ndarray):
        return True
    return (
        isinstance(array, jax.Array)
        and not isinstance(array, jax.core.Tracer)
        and not array.is_deleted()
        and array.is_fully_addressable
    )


def _shape(leaf: Any) -> str:
    if leaf is None or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return repr(leaf)
    return f"{leaf.dtype}{list(leaf.shape)}"


def _cut(items: tuple[Any, ...]) -> str:
    if len(items) <= 8:
        return repr(items)
    return f"({', '.join(map(repr, items[:8]))}, ... {len(items)} in all)"
