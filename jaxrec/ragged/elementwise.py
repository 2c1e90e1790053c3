"""Jagged with dense arrays, element by element."""

from __future__ import annotations

from jaxtyping import Array, Int, Num

from jaxrec.ragged.arrays import AnyArray
from jaxrec.ragged.dense import dense_to_jagged, jagged_to_padded_dense
from jaxrec.ragged.offsets import without_padding

# Element i of row b of the jagged array meets element [b, i] of the dense one; where a dense row
# ends before the jagged one it counts as zero. Padding of the jagged array is never read.


def jagged_dense_elementwise_add(
    x_values: Num[AnyArray, "capacity *element"],
    x_offsets: Int[AnyArray, " offsets"],
    y: Num[AnyArray, "batch length *element"],
) -> Num[Array, "batch length *element"]:
    """Return the dense sum of a ragged and a dense array, ``padded(x) + y``.

    FBGEMM's op of that name.

    Args:
        x_values: ``[capacity, ...]``.
        x_offsets: ``[batch + 1]``, ascending from 0.
        y: ``[batch, length, ...]``; rows of ``x`` longer than ``length`` are cut.
    """
    return jagged_to_padded_dense(x_values, x_offsets, y.shape[1]) + y


def jagged_dense_elementwise_add_jagged_output(
    x_values: Num[AnyArray, "capacity *element"],
    x_offsets: Int[AnyArray, " offsets"],
    y: Num[AnyArray, "batch length *element"],
) -> Num[Array, "capacity *element"]:
    """Return the ragged sum of a ragged and a dense array, with zeros as padding.

    FBGEMM's op of that name.

    Args:
        x_values: ``[capacity, ...]``.
        x_offsets: ``[batch + 1]``, ascending from 0.
        y: ``[batch, length, ...]``; elements past a row of ``x`` are left out.
    """
    y_values = dense_to_jagged(y, x_offsets, x_values.shape[0])
    return without_padding(x_values, x_offsets) + y_values


def jagged_dense_dense_elementwise_add_jagged_output(
    x_values: Num[AnyArray, "capacity *element"],
    x_offsets: Int[AnyArray, " offsets"],
    y_0: Num[AnyArray, "batch length *element"],
    y_1: Num[AnyArray, "batch length *element"],
) -> Num[Array, "capacity *element"]:
    """Compute `jagged_dense_elementwise_add_jagged_output` with ``y_0 + y_1``; FBGEMM's op."""
    return jagged_dense_elementwise_add_jagged_output(x_values, x_offsets, y_0 + y_1)


def jagged_dense_elementwise_mul(
    x_values: Num[AnyArray, "capacity *element"],
    x_offsets: Int[AnyArray, " offsets"],
    y: Num[AnyArray, "batch length *element"],
) -> Num[Array, "capacity *element"]:
    """Return the ragged product of a ragged and a dense array, with zeros as padding.

    FBGEMM's op of that name.

    Args:
        x_values: ``[capacity, ...]``.
        x_offsets: ``[batch + 1]``, ascending from 0.
        y: ``[batch, length, ...]``; elements past a row of ``x`` are left out.
    """
    y_values = dense_to_jagged(y, x_offsets, x_values.shape[0])
    return without_padding(x_values, x_offsets) * y_values
