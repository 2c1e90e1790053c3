"""Conversion of nested lists to flat columns and back, without Python code per id."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrec.ragged.columns import WIDE_IDS, Column, check_weight_lengths, is_integer, is_real

# The largest float32: a weight beyond it becomes infinite.
_LARGEST = int(np.finfo(np.float32).max)


def from_lists(feature: str, rows: Any, weights: Any | None = None, *, id_bits: int = 32) -> Column:
    """Make a column of a list of bags, each a list, tuple or one-dimensional array of ids."""
    lengths, values = _flat(feature, "id", rows, id_bits)
    if weights is None:
        return Column(values, lengths)
    weight_lengths, flat_weights = _flat(feature, "weight", weights)
    check_weight_lengths(feature, lengths, weight_lengths)
    return Column(values, lengths, flat_weights)


def flat_elements(rows: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate rows of numbers or of arrays of one shape; return the array, and rows' lengths.

    The elements of the array have at most 32 bits.
    """
    if bare := [index for index, row in enumerate(rows) if not hasattr(row, "__len__")]:
        raise TypeError(f"row {bare[0]} is {_shown(rows[bare[0]])}; expected a list of elements")
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    if filled := list(filter(len, rows)):
        try:
            values = np.concatenate(list(map(np.asarray, filled)))
        except ValueError as error:
            raise TypeError(f"the rows' elements have several shapes: {error}") from error
    else:
        values = np.zeros(0, np.int32)
    if values.dtype.kind not in "iub" and not jax.dtypes.issubdtype(values.dtype, np.floating):
        raise TypeError(f"the rows' elements must be numbers, not of type {values.dtype}")
    if values.dtype.kind in "iu" and values.dtype.itemsize > 2:
        if values.size and (values.min() < -(2**31) or values.max() >= 2**31):
            extreme = max(int(values.max()), int(values.min()), key=abs)
            raise ValueError(f"{extreme} does not fit int32; id_bits=64 keeps raw ids, on the host")
        values = values.astype(np.int32)
    if values.dtype != np.float64:
        return values, lengths
    if all(map(is_integer, set(map(type, itertools.chain.from_iterable(filled))))):
        # NumPy turns Python ints without a common 64-bit type into floats and loses digits.
        extreme = max(itertools.chain.from_iterable(filled), key=abs)
        raise ValueError(f"{extreme} does not fit int32; id_bits=64 keeps raw ids, on the host")
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if (lost := np.isinf(narrow) & ~np.isinf(values)).any():
        raise ValueError(f"{values[lost][0]} of the rows' elements is infinite in float32")
    return narrow, lengths


def to_lists(values: np.ndarray, lengths: np.ndarray) -> list[list[Any]]:
    """Return the rows of a padded column as nested lists of Python numbers."""
    ends = itertools.accumulate(lengths.tolist(), initial=0)
    flat = values[: int(lengths.sum())].tolist()
    return [flat[start:end] for start, end in itertools.pairwise(ends)]


def _flat(feature: str, what: str, rows: Any, id_bits: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate rows of ids or of weights (``what``); return the rows' lengths, and the array."""
    if isinstance(rows, str | bytes | Mapping) or not hasattr(rows, "__len__"):
        raise TypeError(f"feature {feature!r} is {_shown(rows)}; expected a list of lists")
    # `map` collects the types in C, and Python looks at each distinct type once. A Python loop over
    # the rows would take longer than all other work here.
    kinds = set(map(type, rows))
    if not all(issubclass(kind, list | tuple | np.ndarray) for kind in kinds):
        sample, row = _first(rows, lambda row: not isinstance(row, list | tuple | np.ndarray))
        raise TypeError(
            f"feature {feature!r}, sample {sample} is {_shown(row)}; expected a list of {what}s "
            "(empty where there are none; from_dense takes one id per sample)"
        )
    if kinds == {np.ndarray}:
        return _flat_arrays(feature, what, rows, id_bits)
    if any(issubclass(kind, np.ndarray) for kind in kinds):
        rows = [np.atleast_1d(row).tolist() if isinstance(row, np.ndarray) else row for row in rows]
    accepts, dtype = (is_integer, np.int64) if what == "id" else (is_real, np.float64)
    chain = itertools.chain.from_iterable
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    if not all(map(accepts, set(map(type, chain(rows))))):
        if id_bits == 64:
            return lengths, np.fromiter(chain(rows), object, lengths.sum())
        sample, row = _first(rows, lambda row: not all(map(accepts, map(type, row))))
        value = next(value for value in row if not accepts(type(value)))
        raise TypeError(_not_accepted(feature, sample, what, _shown(value)))
    try:
        return lengths, np.fromiter(chain(rows), dtype, lengths.sum())
    except OverflowError:  # an int beyond 64 bits: an object array lets the bounds check name it
        if what == "id":
            return lengths, np.array(list(chain(rows)), object)
        sample, row = _first(rows, lambda row: any(abs(weight) > _LARGEST for weight in row))
        weight = next(weight for weight in row if abs(weight) > _LARGEST)
        raise ValueError(
            f"feature {feature!r}, sample {sample}: weight {weight!r:.60} is not finite in float32"
        ) from None


def _flat_arrays(
    feature: str, what: str, rows: Sequence[np.ndarray], id_bits: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute `_flat` of rows that are all NumPy arrays."""
    if set(map(operator.attrgetter("ndim"), rows)) != {1}:
        sample, row = _first(rows, lambda row: row.ndim != 1)
        raise TypeError(
            f"feature {feature!r}, sample {sample} has shape {row.shape}; "
            f"expected a one-dimensional array of {what}s"
        )
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    filled = list(filter(len, rows))  # np.array([]) is float64, so empty rows have no say in types
    if not filled:
        return lengths, np.zeros(0, np.int64 if what == "id" else np.float32)
    accepts = is_integer if what == "id" else is_real
    dtypes = set(map(operator.attrgetter("dtype"), filled))
    if not all(accepts(dtype.type) for dtype in dtypes):
        if id_bits == 64:
            flat = itertools.chain.from_iterable(row.tolist() for row in filled)
            return lengths, np.fromiter(flat, object, lengths.sum())
        sample, row = _first(rows, lambda row: row.size > 0 and not accepts(row.dtype.type))
        raise TypeError(_not_accepted(feature, sample, what, f"of type {row.dtype}"))
    if what == "weight":
        common = dtypes.pop() if len(dtypes) == 1 else np.float64
        return lengths, np.concatenate(filled, dtype=common, casting="unsafe")
    if np.result_type(*dtypes).kind == "f":  # NumPy joins uint64 and int64 as floats: digits lost
        filled = [row.astype(object) for row in filled]
    return lengths, np.concatenate(filled)


def _first(rows: Sequence[Any], is_wrong: Any) -> tuple[int, Any]:
    return next((sample, row) for sample, row in enumerate(rows) if is_wrong(row))


def _not_accepted(feature: str, sample: int, what: str, shown: str) -> str:
    wanted = f"an integer; {WIDE_IDS}" if what == "id" else "a real number"
    return f"feature {feature!r}, sample {sample}: {what} {shown} is not {wanted}"


def _shown(value: object) -> str:
    return f"{value!r:.60} ({type(value).__name__})"
