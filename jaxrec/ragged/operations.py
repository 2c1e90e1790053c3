"""Operations on the rows of one ragged column: select, slice, softmax, sums, products.

They have FBGEMM's names and take a `JaggedArray`; those of `jaxrec.ragged.fbgemm` take arrays of
values and offsets. They refuse a column over a mesh, which has a batch per device: call them within
`jax.shard_map`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from jaxtyping import Array, Float, Int, Num

from jaxrec._public import warn_of_earlier_form
from jaxrec.ragged import fbgemm
from jaxrec.ragged.arrays import AnyArray, require_one_batch
from jaxrec.ragged.fbgemm import Dense
from jaxrec.ragged.jagged import JaggedArray
from jaxrec.ragged.keyed_jagged import KeyedJaggedArray

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _column_first(operation: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let an operation take FBGEMM's arrays for one more version, with a `DeprecationWarning`."""
    name = operation.__name__

    @functools.wraps(operation)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        # Calls with FBGEMM's arrays begin with an array, by position, as `values=` or `x_values=`.
        if (arguments and isinstance(arguments[0], JaggedArray)) or "column" in options:
            return operation(*arguments, **options)
        if arguments and isinstance(arguments[0], KeyedJaggedArray):
            raise TypeError(
                f"jaxrec.ragged.{name} takes one column of a batch, such as batch["
                f"{next(iter(arguments[0].keys), 'feature')!r}]; got a KeyedJaggedArray"
            )
        warn_of_earlier_form(
            f"jaxrec.ragged.{name} takes a JaggedArray; jaxrec.ragged.fbgemm.{name} takes arrays"
        )
        loose: Any = getattr(fbgemm, name)
        return loose(*arguments, **options)

    return call


@_column_first
def jagged_index_select(
    column: JaggedArray, indices: Int[AnyArray, " selected"], capacity: int | None = None
) -> JaggedArray:
    """Return rows ``indices[0], indices[1], ...`` of a column, with their weights.

    FBGEMM's op of that name. Differentiable with respect to the values.

    Args:
        column: The column.
        indices: ``[selected]`` from 0 to ``batch_size - 1``; they may repeat.
        capacity: Capacity of the result. None: `capacity_for` its elements; not under jit.

    Returns:
        A column of ``selected`` rows. Under jit no error can be raised. An index out of range then
        gives an empty row, and elements beyond the capacity are left out, although the lengths
        still count them.

    Raises:
        IndexError: An index is out of range.
        TypeError: The capacity is missing under jit.
        ValueError: The capacity is too small, or the column lies over a mesh.

    Example:
        >>> import numpy as np
        >>> column = JaggedArray.from_lists([[1], [2, 3]])
        >>> jagged_index_select(column, np.array([1, 0, 1])).to_lists()
        [[2, 3], [1], [2, 3]]
    """
    return _picked(
        column, lambda values, rows: fbgemm.jagged_index_select(values, rows, indices, capacity)
    )


@_column_first
def jagged_slice(
    column: JaggedArray,
    starts: Int[AnyArray, " batch"],
    max_length: int,
    capacity: int | None = None,
) -> JaggedArray:
    """Return up to ``max_length`` elements of each row, from a position in the row on.

    FBGEMM's op of that name. Differentiable with respect to the values.

    Args:
        column: The column; its weights are cut alike.
        starts: ``[batch]`` first position of each slice, 0 or more. A slice that starts past the
            end of its row is empty. A negative start counts as 0.
        max_length: Static bound on the length of a slice.
        capacity: Static capacity of the result. None: large enough for every batch of this shape.

    Returns:
        The slices. Elements beyond the capacity are left out, although the lengths still count
        them.

    Raises:
        ValueError: ``max_length`` is negative, or the column lies over a mesh.

    Example:
        >>> import numpy as np
        >>> column = JaggedArray.from_lists([[1, 2], [3, 4, 5]])
        >>> jagged_slice(column, np.array([1, 0]), max_length=2).to_lists()
        [[2], [3, 4]]
    """
    return _picked(
        column,
        lambda values, lengths: fbgemm.jagged_slice(values, lengths, starts, max_length, capacity),
    )


@_column_first
def jagged_softmax(column: JaggedArray) -> JaggedArray:
    """Compute the softmax over the elements of each row, column by column.

    FBGEMM's op of that name, exact for rows of any length. Values are computed in float32 or wider
    and keep their type.

    Example:
        >>> jagged_softmax(JaggedArray.from_lists([[0.0, 0.0], [5.0]])).to_lists()
        [[0.5, 0.5], [1.0]]
    """
    return _with_values(column, fbgemm.jagged_softmax(column.values, column.offsets))


@_column_first
def segment_sum_csr(column: JaggedArray) -> Num[Array, "batch *element"]:
    """Return the sum of each row's elements, zeros for empty rows; FBGEMM's op.

    Example:
        >>> segment_sum_csr(JaggedArray.from_lists([[1.0, 2.0], [], [3.0]])).tolist()
        [3.0, 0.0, 3.0]
    """
    return fbgemm.segment_sum_csr(column.values, column.offsets)


@_column_first
def jagged_dense_elementwise_add_jagged_output(column: JaggedArray, y: Dense) -> JaggedArray:
    """Return the ragged sum of a column and a dense array.

    FBGEMM's op of that name. Elements of ``y`` past the end of a row are left out. Missing elements
    of ``y`` count as zero.

    Example:
        >>> import numpy as np
        >>> column = JaggedArray.from_lists([[1.0], [2.0, 3.0]])
        >>> jagged_dense_elementwise_add_jagged_output(column, np.ones((2, 1))).to_lists()
        [[2.0], [3.0, 3.0]]
    """
    sums = fbgemm.jagged_dense_elementwise_add_jagged_output(column.values, column.offsets, y)
    return _with_values(column, sums)


@_column_first
def jagged_dense_elementwise_mul(column: JaggedArray, y: Dense) -> JaggedArray:
    """Return the ragged product of a column and a dense array.

    FBGEMM's op of that name. Rows of different lengths are treated as in
    `jagged_dense_elementwise_add_jagged_output`.
    """
    products = fbgemm.jagged_dense_elementwise_mul(column.values, column.offsets, y)
    return _with_values(column, products)


@_column_first
def jagged_dense_bmm(
    column: JaggedArray, y: Float[AnyArray, "batch inner columns"], max_length: int
) -> JaggedArray:
    """Multiply each row, ``[length, inner]``, by its matrix of ``y``.

    FBGEMM's op of that name. ``max_length`` is a static bound on the rows' lengths. Elements past
    it give zeros and have no gradient.
    """
    products = fbgemm.jagged_dense_bmm(column.values, column.offsets, y, max_length)
    return _with_values(column, products)


@_column_first
def jagged_jagged_bmm(
    column: JaggedArray, other: JaggedArray, max_length: int
) -> Float[Array, "batch rows columns"]:
    """Return ``x_b^T y_b`` for each row ``b`` of two columns of the same lengths.

    FBGEMM's op of that name; ``max_length`` as for `jagged_dense_bmm`.
    """
    return fbgemm.jagged_jagged_bmm(column.values, other.values, column.offsets, max_length)


def _with_values(column: JaggedArray, values: Array) -> JaggedArray:
    return dataclasses.replace(column, values=values)


def _picked(column: JaggedArray, pick: Callable[[Any, Any], tuple[Array, Array]]) -> JaggedArray:
    """Return a column of ``pick(values, lengths)``, with its weights picked alike."""
    require_one_batch(column.lengths, "an operation on rows")
    values, lengths = pick(column.values, column.lengths)
    weights = None if column.weights is None else pick(column.weights, column.lengths)[0]
    return JaggedArray(values, lengths, weights)
