"""Columns of vectors: lists of one length, such as pretrained embeddings, as dense features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Float32

from jaxrec.data.column_types import is_list, is_vector
from jaxrec.data.encode import Location, joined, signed_log1p
from jaxrec.data.groups import ColumnGroups
from jaxrec.data.schema import DenseColumn
from jaxrec.data.statistics import Moments


def vectors_of(
    column: Any, options: DenseColumn, location: Location
) -> tuple[Float[np.ndarray, "rows width"], Bool[np.ndarray, " rows"]]:
    """Return a column's vectors as float32 or float64, zeros for nulls, and whether each is null.

    Numbers to standardize after a logarithm are returned as logarithms.

    Raises:
        DataError: A list has another length than ``options.width``, a number of it is null or not
            finite, or a vector is null and nulls are refused.
    """
    width = options.width
    assert width is not None
    array = joined(column)
    if pa.types.is_null(array.type):
        array = pa.nulls(len(array), pa.list_(pa.float32()))
    is_null = np.asarray(array.is_null())
    if is_null.any() and options.missing == "error":
        problem = "the vector is null; fill it, or give missing: zero in the schema"
        raise location.error(int(np.argmax(is_null)), problem)
    lengths = pc.list_value_length(array).fill_null(width).to_numpy(zero_copy_only=False)
    if (bad := lengths != width).any():
        row = int(np.argmax(bad))
        raise location.error(
            row, f"the vector has {lengths[row]} numbers, and others have {width}; make it null"
        )
    flat = array.flatten()  # without the lists that are null
    rows = np.flatnonzero(~is_null)
    if flat.null_count:
        first = int(np.argmax(np.asarray(flat.is_null()))) // width
        raise location.error(rows[first], "a number of the vector is null; make the vector null")
    # Integers of 64 bits and decimals lose digits in float32, which is what the model takes.
    is_float = pa.types.is_floating(flat.type)
    numbers = (flat if is_float else flat.cast(pa.float64(), safe=False)).to_numpy()
    if numbers.dtype == np.float16:
        numbers = numbers.astype(np.float32)
    numbers = numbers.reshape(-1, width)
    # A sum is finite if all are, and costs no array of booleans; float64 sums do not overflow.
    with np.errstate(invalid="ignore", over="ignore"):
        sums = numbers.sum(axis=1, dtype=np.float64)
    large = np.abs(numbers).max(axis=1, initial=0) > np.finfo(np.float32).max
    if (bad := ~np.isfinite(sums) | large).any():
        first = int(np.argmax(bad))
        value = next(x for x in numbers[first] if not abs(x) <= np.finfo(np.float32).max)
        problem = f"the vector has the number {value:g}, which float32 does not hold; make it null"
        raise location.error(rows[first], problem)
    if options.transform == "log_standardize":
        numbers = signed_log1p(numbers)
    if len(rows) == len(is_null):
        return numbers, is_null
    vectors = np.zeros((len(is_null), width), numbers.dtype)
    vectors[rows] = numbers
    return vectors, is_null


def encode_vectors(
    column: Any, options: DenseColumn, moments: Moments, location: Location
) -> pa.FixedSizeListArray:
    """Return a column's vectors as lists of float32 after the transform; nulls become zeros."""
    vectors, is_null = vectors_of(column, options, location)
    if options.is_standardized:
        # One mean and one deviation for all numbers: directions of embeddings keep their meaning.
        encoded = (vectors - moments.mean) / moments.scale
    elif options.transform == "log1p":
        encoded = signed_log1p(vectors)
    elif options.transform == "log_counts":
        encoded = np.log(np.maximum(np.trunc(vectors), -2) + 3)
    else:
        encoded = vectors
    with np.errstate(over="ignore"):
        encoded = encoded.astype(np.float32)
    if is_null.any():
        encoded[is_null] = 0
    if not np.isfinite(encoded).all():
        row = int(np.argmax(~np.isfinite(encoded).all(axis=1)))
        raise location.error(row, "a number of the vector does not fit float32; scale the vectors")
    return pa.FixedSizeListArray.from_arrays(pa.array(encoded.reshape(-1)), encoded.shape[1])


def stacked(
    columns: Sequence[pa.Array], widths: Sequence[int], rows: int
) -> Float32[np.ndarray, "rows features"]:
    """Return encoded dense columns side by side, with zeros for rows that they lack.

    Args:
        columns: Encoded columns: numbers, or vectors as lists of a fixed size.
        widths: Number of features of each column.
        rows: Number of rows, at least as many as the columns have.
    """
    # Columns are copied into one array that has its padding already: stacking and padding them
    # would copy each twice.
    dense = np.zeros((rows, sum(widths)), np.float32)
    place = 0
    for column, width in zip(columns, widths, strict=True):
        if is_list(column.type):
            numbers = column.flatten().to_numpy().reshape(-1, width)
            dense[: len(column), place : place + width] = numbers
        else:
            dense[: len(column), place] = column.to_numpy()
        place += width
    return dense


def learned_widths(columns: pa.Schema, groups: Iterable[ColumnGroups]) -> dict[str, int]:
    """Return the length of the vectors in each column of lists of floats of one length.

    The first row group with vectors decides; a pass over all rows then refuses other lengths.
    """
    names = [x.name for x in columns if is_vector(x.type)]
    widths: dict[str, int] = {}
    for rows in groups:
        for group in range(len(rows.sizes)):
            if not names:
                return {name: width for name, width in widths.items() if width}
            table = rows.read(group, names)
            for name in [*names]:
                if not is_list(table.field(name).type):
                    continue  # nulls alone, in one of several files
                lengths = pc.unique(pc.list_value_length(joined(table[name])).drop_null())
                # Empty lists, such as those of a file whose lists are all empty, tell nothing.
                if lengths.to_pylist() not in ([], [0]):
                    names.remove(name)
                    widths[name] = lengths[0].as_py() if len(lengths) == 1 else 0
    return {name: width for name, width in widths.items() if width}
