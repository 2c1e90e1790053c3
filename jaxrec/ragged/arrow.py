"""Arrow columns to flat columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrec.ragged.columns import Column

if TYPE_CHECKING:
    import pyarrow as pa


def named_columns(data: Any) -> dict[str, Any]:
    """The columns of a table or record batch by name; a mapping as it is."""
    return (
        dict(zip(data.column_names, data.columns, strict=True)) if _is_table(data) else dict(data)
    )


def from_arrow(feature: str, array: Any, weights: Any | None = None) -> Column:
    """The column of an Arrow array of ids or of lists of ids, chunked or not.

    A null row is an empty bag. A null inside a list is an error: Arrow cannot say what it means.

    Args:
        feature: Its name, for errors.
        array: Array of integers (one id per sample) or of lists of integers: list, large list,
            fixed size list or list view.
        weights: An Array of the same nesting, of floating point.

    Raises:
        TypeError: The array is of another type.
        ValueError: There is a null inside a list, or the weights are not shaped like the ids.
    """
    values, lengths = _flat(feature, array, "integers", _is_integer)
    if weights is None:
        return Column(values, lengths)
    flat_weights, weight_lengths = _flat(feature, weights, "floating point", _is_number)
    if not np.array_equal(weight_lengths, lengths):
        if weight_lengths.size != lengths.size:
            where, ids, given = f"feature {feature!r}", lengths.size, weight_lengths.size
            raise ValueError(f"{where} has {ids} samples but weights for {given}")
        sample = np.flatnonzero(weight_lengths != lengths)[0]
        raise ValueError(
            f"feature {feature!r}, sample {sample}: {lengths[sample]} ids but "
            f"{weight_lengths[sample]} weights; each id needs one weight"
        )
    if flat_weights.dtype != np.float16:
        flat_weights = flat_weights.astype(np.float32)
    return Column(values, lengths, flat_weights)


def _flat(
    feature: str, array: pa.Array | pa.ChunkedArray, wanted: str, accepts: Any
) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(array, pa.Array | pa.ChunkedArray):
        raise TypeError(f"feature {feature!r} is a {type(array).__name__}; expected an Arrow array")
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    if isinstance(array, pa.ChunkedArray):  # no chunks, in Arrow versions that keep them
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if accepts(array.type):
        lengths = np.asarray(array.is_valid()).astype(np.int64)
        return array.drop_null().to_numpy(zero_copy_only=False), lengths
    nested = (
        pa.types.is_list,
        pa.types.is_large_list,
        pa.types.is_fixed_size_list,
        pa.types.is_list_view,
        pa.types.is_large_list_view,
    )
    if not any(is_nested(array.type) for is_nested in nested) or not accepts(array.type.value_type):
        raise TypeError(
            f"feature {feature!r} is of Arrow type {array.type}; expected {wanted} or lists of them"
        )
    lengths = pc.list_value_length(array).fill_null(0).to_numpy().astype(np.int64)
    flat = array.flatten()  # without the rows that are null
    if flat.null_count:
        position = int(np.flatnonzero(np.asarray(flat.is_null()))[0])
        sample = np.searchsorted(np.cumsum(lengths), position, side="right")
        raise ValueError(
            f"feature {feature!r}, sample {sample} has a null inside its list; fill or drop it"
        )
    return flat.to_numpy(zero_copy_only=False), lengths


def _is_table(data: Any) -> bool:
    return hasattr(data, "column_names") and hasattr(data, "columns")


def _is_integer(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_integer(kind)


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_floating(kind) or pa.types.is_integer(kind)
