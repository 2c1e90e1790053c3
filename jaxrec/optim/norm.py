"""Sums over a row, which may be cut by columns, and what optimizers make of them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator

import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class CutRows:
    """Rows of which `update` sees some columns.

    Attributes:
        dim: Columns of the whole row.
        total: From sums over the columns at hand, one a row, to those over the whole row.
    """

    dim: int
    total: Callable[[Float[Array, " rows"]], Float[Array, " rows"]]


_cut_rows: contextvars.ContextVar[CutRows | None] = contextvars.ContextVar("cut_rows", default=None)


@contextlib.contextmanager
def cut_rows(
    dim: int, total: Callable[[Float[Array, " rows"]], Float[Array, " rows"]]
) -> Iterator[None]:
    """While this holds, the sums below are those of whole rows, of which arrays are a part."""
    token = _cut_rows.set(CutRows(dim, total))
    try:
        yield
    finally:
        _cut_rows.reset(token)


def sums_of_squares(rows: Float[Array, "rows dim"]) -> Float[Array, " rows"]:
    """The sum of the squares of each row's elements."""
    sums, cut = jnp.sum(rows * rows, axis=1), _cut_rows.get()
    return sums if cut is None else cut.total(sums)


def mean_squares(rows: Float[Array, "rows dim"]) -> Float[Array, " rows"]:
    """The mean of the squares of each row's elements."""
    cut = _cut_rows.get()
    return sums_of_squares(rows) / (rows.shape[1] if cut is None else cut.dim)


def limit_norm(rows: Float[Array, "rows dim"], max_norm: float | None) -> Float[Array, "rows dim"]:
    """Scales rows whose Euclidean norm exceeds ``max_norm`` down to it; None: no bound."""
    if max_norm is None:
        return rows
    norms = row_norms(rows)
    # The quotient of a short row is never used, so that a row of zeros does not divide by zero.
    return jnp.where(norms > max_norm, rows * (max_norm / jnp.maximum(norms, max_norm)), rows)


def row_norms(rows: Float[Array, "rows dim"]) -> Float[Array, "rows 1"]:
    """The Euclidean norm of each row, as a column."""
    return jnp.sqrt(sums_of_squares(rows))[:, None]


def trust_ratio(
    numerator: Float[Array, "rows 1"], denominator: Float[Array, "rows 1"]
) -> Float[Array, "rows 1"]:
    """The quotient of two norms, and 1 where either is zero."""
    defined = (numerator > 0) & (denominator > 0)
    return jnp.where(defined, numerator / jnp.where(defined, denominator, 1), 1)
