"""Checks of whole batches on the host, for arrays that were made by hand or on a device."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jaxrec.ragged.bounds import find_bad_ids, raw_column
from jaxrec.ragged.columns import Column, by_name, whole_number
from jaxrec.ragged.jagged import JaggedArray
from jaxrec.ragged.keyed_jagged import KeyedJaggedArray
from jaxrec.ragged.packing import as_float32, checked_inverse
from jaxrec.ragged.raw_ids import is_raw
from jaxrec.ragged.wide_ids import WideIds

Ragged = TypeVar("Ragged")


def validate(
    batch: Ragged, bounds: Mapping[str, int] | None = None, *, name: str = "column"
) -> Ragged:
    """Check a batch or a column whole, and return it.

    TorchRec's ``validate_keyed_jagged_tensor``. The constructors check host data when they pack it.
    This also checks arrays on a device, such as the result of a step, and copies them to the host.
    Batches over a mesh are checked device by device.

    Args:
        batch: A `KeyedJaggedArray`, or a `JaggedArray` of any elements.
        bounds: Number of rows of some features' tables, by feature, such as ``collection.bounds``.
            Ids of other features must be 0 or more and fit int32 (`WideIds`: int64); raw ids must
            not be -1. A `JaggedArray` takes ``{name: bound}``; without one its elements may be any
            numbers.
        name: Name of a `JaggedArray` in errors.

    Returns:
        The batch, unchanged.

    Raises:
        TypeError: The batch is of another class or traced, or ids or lengths are not integers.
        ValueError: Shapes do not fit; a length is negative; the ids of a sample end beyond the
            capacity; an id is out of range; a weight is not finite; an inverse index names no bag.
            The message names the feature and the sample.

    Example:
        >>> column = JaggedArray(np.array([4, 2, 0, 0]), np.array([1, 2, 3], np.int32))
        >>> validate(column, name="clicks")
        Traceback (most recent call last):
            ...
        ValueError: 'clicks', sample 2: its elements end at 6, beyond the capacity 4
    """
    # Checks run on the host, key by key. People call this to find a mistake, so an error that names
    # the sample matters more than speed.
    names = batch.keys if isinstance(batch, KeyedJaggedArray) else (name,)
    bounds = _checked_bounds(bounds, names)
    if isinstance(batch, JaggedArray):
        host = _on_host(batch)
        _check_array(f"{name!r}: lengths", host.lengths, "[rows]", 1)
        _check_column(f"{name!r}", name, host, bounds.get(name), are_ids=name in bounds)
        return batch
    if not isinstance(batch, KeyedJaggedArray):
        raise TypeError(
            f"validate takes a KeyedJaggedArray or a JaggedArray, got {type(batch).__name__}"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"keys occur more than once in {names}")
    for device, part in _parts(_on_host(batch)):
        for key in part.keys:
            label = f"feature {key!r}" + ("" if device is None else f" on device {device}")
            _check_column(label, key, part[key], bounds.get(key), are_ids=True)
        if part.inverse_indices is not None:
            checked_inverse(part.keys, part.strides, part.inverse_indices)
    return batch


def _checked_bounds(bounds: Mapping[str, int] | None, names: Sequence[str]) -> dict[str, int]:
    checked = by_name("bounds", bounds)
    if unknown := [key for key in checked if key not in names]:
        raise ValueError(f"bounds name {unknown}, but the features are {list(names)}")
    return {key: whole_number(f"the bound of {key!r}", bound) for key, bound in checked.items()}


def _on_host(batch: Ragged) -> Ragged:
    """Copy a batch to the host; raise a TypeError if it is traced."""
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError("validate needs the numbers of a batch: call it outside of jax.jit")
    return jax.device_get(batch)


def _parts(batch: KeyedJaggedArray) -> Iterator[tuple[int | None, KeyedJaggedArray]]:
    """Yield each device's number and batch; ``None`` and the batch if it is not over a mesh."""
    _check_shapes(batch)
    if batch.lengths.ndim == 1:
        yield None, batch
        return
    for device in range(batch.lengths.shape[0]):
        yield device, jax.tree.map(operator.itemgetter(device), batch)


def _check_shapes(batch: KeyedJaggedArray) -> None:
    """Raise a ValueError if the arrays of a batch have not the shapes of its static fields."""
    _check_array("lengths", batch.lengths, "[sum(strides)], or [devices, sum(strides)]", 1, 2)
    axes = batch.lengths.shape[:-1]
    wanted = {
        "lengths": (batch.lengths, (*axes, sum(batch.strides)), "the strides"),
        "values": (batch.values, (*axes, sum(batch.capacities)), "the capacities"),
        "weights": (batch.weights, batch.values.shape, "one for each value"),
    }
    for name, (array, shape, why) in wanted.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} have shape {array.shape}; expected {shape}, {why}")


def _check_array(what: str, array: Any, shape: str, *num_axes: int) -> None:
    """Raise an error if an array has no integers, or a number of axes not in ``num_axes``."""
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what} are integers, got {array.dtype}")
    if array.ndim not in num_axes:
        raise ValueError(f"{what} have shape {array.shape}; expected {shape}")


def _check_column(
    label: str, name: str, column: JaggedArray, bound: int | None, *, are_ids: bool
) -> None:
    """Check the lengths, ids and weights of one column; messages begin with ``label``."""
    # int64, and lengths before their sums: damaged int32 lengths could sum to something harmless.
    lengths, capacity = np.asarray(column.lengths, np.int64), column.values.shape[0]
    if (lengths < 0).any():
        sample = int(np.argmax(lengths < 0))
        raise ValueError(f"{label}, sample {sample} has the negative length {lengths[sample]}")
    ends = np.cumsum(lengths)
    if (beyond := ends > capacity).any():
        sample = int(np.argmax(beyond))
        raise ValueError(
            f"{label}, sample {sample}: its elements end at {ends[sample]}, beyond the capacity "
            f"{capacity}"
        )
    used = int(ends[-1]) if ends.size else 0
    values: Any = column.values
    if is_raw(values):
        raw_column(name, Column(values[:used], lengths), is_bounded=bound is not None)
    elif are_ids and values.dtype.kind not in "iu":
        raise TypeError(f"{label}: ids are integers, got {values.dtype}")
    if are_ids and (bound is not None or not is_raw(values)):
        ids = np.asarray(values)[:used]
        id_bits = 64 if isinstance(values, WideIds) else 32
        bad = find_bad_ids(name, ids, lengths, bound, id_bits=id_bits)
        if bad is not None:
            raise ValueError(bad.message.replace(f"feature {name!r}", label, 1))
    if column.weights is not None:
        if column.weights.shape[0] != capacity:
            raise ValueError(
                f"{label} has {column.weights.shape[0]} weights for {capacity} values; each needs "
                "one"
            )
        as_float32(name, np.asarray(column.weights)[:used], lengths)
