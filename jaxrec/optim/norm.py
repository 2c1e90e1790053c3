"""Norms of rows, and sums over their columns, where rows may be padded or cut by columns."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

SumColumns: TypeAlias = Callable[[Float[Array, "rows dim"]], Float[Array, " rows"]]


def _sum_columns(rows: Float[Array, "rows dim"]) -> Float[Array, " rows"]:
    return jnp.sum(rows, axis=1)


@dataclasses.dataclass(frozen=True)
class CutRows:
    """Description of rows that reach `update` without some of their columns, or with padding.

    Attributes:
        dim: Columns of the whole row.
        total: Function from ``[rows]`` sums over the present columns to sums over whole rows.
        is_column: Which present columns are not padding, ``[dim]`` or ``[rows, dim]``; None: all.
        sum_columns: Function that sums the present columns, ``[rows, dim]`` to ``[rows]``, where
            `jax.numpy.sum` cannot.
    """

    dim: int
    total: Callable[[Float[Array, " rows"]], Float[Array, " rows"]]
    is_column: Bool[Array, "*rows dim"] | None = None
    sum_columns: SumColumns = _sum_columns


# A context variable, not an argument: users implement `update`, and should not have to know that a
# kernel pads rows or that a mesh cuts them by columns.
_cut_rows: contextvars.ContextVar[CutRows | None] = contextvars.ContextVar("cut_rows", default=None)


@contextlib.contextmanager
def cut_rows(
    dim: int,
    total: Callable[[Float[Array, " rows"]], Float[Array, " rows"]] = lambda sums: sums,
    is_column: Bool[Array, "*rows dim"] | None = None,
    sum_columns: SumColumns = _sum_columns,
) -> Iterator[None]:
    """Within this context, make the functions below sum over whole rows; see `CutRows`."""
    token = _cut_rows.set(CutRows(dim, total, is_column, sum_columns))
    try:
        yield
    finally:
        _cut_rows.reset(token)


def sums_of_squares(rows: Float[Array, "rows dim"]) -> Float[Array, " rows"]:
    """Return the sum of the squares of each row's elements."""
    squares, cut = rows * rows, _cut_rows.get()
    if cut is None:
        return jnp.sum(squares, axis=1)
    if cut.is_column is not None:
        squares = jnp.where(jnp.atleast_2d(cut.is_column), squares, 0)
    return cut.total(cut.sum_columns(squares))


def mean_squares(rows: Float[Array, "rows dim"]) -> Float[Array, " rows"]:
    """Return the mean of the squares of each row's elements."""
    cut = _cut_rows.get()
    return sums_of_squares(rows) / (rows.shape[1] if cut is None else cut.dim)


def root(squares: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the square roots of sums of squares, and NaN for an infinite sum."""
    # An infinite root would make the step of its row zero, and a row with such state would silently
    # never change again. NaN is noticed.
    return jnp.where(squares < jnp.inf, jnp.sqrt(squares), jnp.nan)


def limit_norm(rows: Float[Array, "rows dim"], max_norm: float | None) -> Float[Array, "rows dim"]:
    """Scale rows whose Euclidean norm exceeds ``max_norm`` down to it; None: no bound."""
    if max_norm is None:
        return rows
    norms = row_norms(rows)
    # The maximum keeps a row of zeros, whose quotient is not used, from dividing by zero.
    return jnp.where(norms <= max_norm, rows, rows * (max_norm / jnp.maximum(norms, max_norm)))


def row_norms(rows: Float[Array, "rows dim"]) -> Float[Array, "rows 1"]:
    """Return the Euclidean norm of each row, as a column."""
    return root(sums_of_squares(rows))[:, None]


def trust_ratio(
    numerator: Float[Array, "rows 1"], denominator: Float[Array, "rows 1"]
) -> Float[Array, "rows 1"]:
    """Return the quotient of two norms, and 1 where either is zero."""
    is_zero = (numerator == 0) | (denominator == 0)
    return jnp.where(is_zero, 1, numerator / jnp.where(is_zero, 1, denominator))
